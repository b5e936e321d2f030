"""The modes that experts can be in, small enough for the demo model, and tokens to run."""

from __future__ import annotations

import random
from typing import Any

from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.llm import demo_model_path

CTX, SLOTS = 64, 12
POOL = "2MiB"  # of 32 experts a layer, about seven
WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "cache": {"expert_slots": SLOTS},
    "landing": {"expert_slots": SLOTS, "promote_on_read": True, "expert_copies": "overlap"},
    "gathered": {"expert_slots": SLOTS, "miss": "gather", "expert_policy": "slru"},
    "shared": {"expert_slots": SLOTS, "expert_allocation": "global"},
    "stepped": {"expert_slots": SLOTS, "executor": "stepped"},
    "host pool": {"expert_slots": SLOTS, "host_pool": POOL},
    # About 65 of the 96 experts of each size have a place there, so that 5 can leave their slots.
    "exchange": {"expert_slots": SLOTS, "host_pool": "16000KiB"},
    "pool alone": {"host_pool": POOL, "expert_mode": "cache"},
    "hybrid": {"expert_slots": SLOTS, "expert_mode": "hybrid"},
    "cpu experts": {"n_cpu_moe": 2},
    "cpu device": {"device": "cpu"},
}
CHANGEABLE = ("cache", "landing", "gathered", "shared", "stepped", "host pool")
SAMPLE = ("landing", "stepped", "exchange", "host pool", "hybrid")  # CI tries all


def opened(way: str, **more: Any) -> Engine:
    """The demo model in a way; contradictions are looked for after every token."""
    return Engine(demo_model_path(), EngineConfig(ctx_size=CTX, **WAYS[way], **more), checks=True)


def random_tokens(n_vocab: int, n_tokens: int, seed: int = 0) -> list[int]:
    """Tokens of which some come back often."""
    random_ = random.Random(seed)
    few = [random_.randrange(1, n_vocab) for _ in range(9)]
    return [random_.choice([*few, random_.randrange(1, n_vocab)]) for _ in range(n_tokens)]
