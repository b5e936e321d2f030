"""What tells which experts come, unless that is chosen."""

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
        (BESIDE, DEFAULT_PREDICTOR, 2),
        ({"expert_copies": "wait", "moe_predict_prefetch": False}, "none", 1),
    ],
    ids=["waited for", "beside tokens", "turned off"],
)
def test_who_guesses_by_default_is_in_the_statistics(
    options: dict[str, Any], guesses: str, lag: int
) -> None:
    with LLM(model_path("moe_plain"), ctx_size=32, expert_slots=4, **options) as llm:
        assert llm.engine.cache is not None
        made = llm.engine.cache.residency.settings
        assert (made.predictor, made.lag) == (guesses, lag)
        assert llm.expert_statistics.setup.predictor == (None if guesses == "none" else guesses)
