"""What ranks experts unless that is chosen, and what the statistics call it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.tiny import model_path
from vkmoe.config import EngineConfig
from vkmoe.llm import LLM

pytestmark = pytest.mark.usefixtures("one_device")

BESIDE: dict[str, Any] = {"expert_copies": "overlap"}
DEFAULT = EngineConfig().expert_policy


@pytest.mark.parametrize(
    ("options", "policy", "lag"),
    [
        ({"expert_copies": "wait"}, DEFAULT, 1),
        (BESIDE, DEFAULT, 2),
        ({"expert_copies": "wait", "expert_policy": "lru"}, "lru", 1),
    ],
    ids=["waited for", "beside tokens", "chosen"],
)
def test_what_ranks_experts_is_in_the_statistics(
    options: dict[str, Any], policy: str, lag: int
) -> None:
    with LLM(model_path("moe_plain"), ctx_size=32, expert_slots=4, **options) as llm:
        assert llm.engine.cache is not None
        made = llm.engine.cache.residency.settings
        assert (made.policy, made.lag) == (policy, lag)
        assert llm.expert_statistics.setup.policy == policy
