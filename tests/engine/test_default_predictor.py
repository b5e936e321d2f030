"""Who guesses unless told: by what the device can do, and by how tokens run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.tiny import model_path
from vkmoe.config import DEFAULT_PREDICTOR
from vkmoe.llm import LLM

pytestmark = pytest.mark.usefixtures("one_device")

BESIDE: dict[str, Any] = {"expert_copies": "overlap"}


@pytest.mark.parametrize(
    ("options", "guesses", "lag"),
    [
        ({"expert_copies": "wait"}, DEFAULT_PREDICTOR, 1),
        (BESIDE, "none", 2),
        (BESIDE | {"executor": "stepped"}, DEFAULT_PREDICTOR, 2),
        (BESIDE | {"moe_predict_prefetch": True}, DEFAULT_PREDICTOR, 2),
        ({"expert_copies": "wait", "moe_predict_prefetch": False}, "none", 1),
    ],
    ids=["waited for", "beside tokens", "stepped", "asked for", "turned off"],
)
def test_who_guesses_by_default_is_in_the_statistics(
    options: dict[str, Any], guesses: str, lag: int
) -> None:
    with LLM(model_path("moe_plain"), ctx_size=32, expert_slots=4, **options) as llm:
        assert llm.engine.cache is not None
        made = llm.engine.cache.residency.settings
        assert (made.predictor, made.lag) == (guesses, lag)
        assert llm.expert_statistics.setup.predictor == (None if guesses == "none" else guesses)


def test_without_a_queue_for_copies_the_next_token_waits_and_experts_are_guessed() -> None:
    with LLM(model_path("moe_plain"), ctx_size=32, expert_slots=4) as llm:
        has_queue = llm.engine.device.native.has_upload_queue
        expected = None if has_queue else DEFAULT_PREDICTOR
        assert llm.expert_statistics.setup.predictor == expected
