"""Placement changes no bit of any kind of layer: biases in spans, experts from tensors of their
own, shared experts in the trunk, latent attention, and dense layers before those with experts.

One model each; test_placement_law.py and test_moving_law.py try all ways with plain layers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.caches import assert_same_bits, rows
from tests.engine.tiny import expected, model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.placement.pools import SlotLayout
from vkmoe.weights.sizes import weight_bytes

pytestmark = pytest.mark.usefixtures("one_device")

N_TOKENS = 12
KINDS = ("mixtral_one_by_one", "qwen2moe_plain", "gptoss_mxfp4", "deepseek2_lite", "deepseek2_v3")
WAYS: tuple[dict[str, Any], ...] = (
    {"expert_slots": 1, "executor": "fused", "miss": "read", "promote_on_read": True},
    {"expert_slots": 2, "executor": "fused", "miss": "gather", "promote_on_read": False},
    {"expert_slots": 1, "executor": "stepped", "host_pool": "least"},
)


def least_pool(engine: Engine) -> str:
    """The smallest `--host-pool` that the model runs with: the rest is read from the file."""
    spans, spec = weight_bytes(engine.model.tensors).spans, engine.spec.experts
    assert spec is not None
    layout = SlotLayout(engine.device.info, spans, spec.n_experts, spec.n_used)
    return str(layout.least_host_bytes)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(3)
def test_where_experts_lie_does_not_matter(name: str) -> None:
    tokens = expected(name)["tokens"][:N_TOKENS].tolist()
    with Engine(model_path(name), EngineConfig(ctx_size=64)) as engine:
        assert engine.plan.mode.experts_in == "device"
        wanted, pool = rows(engine, tokens), least_pool(engine)
    for way in WAYS:
        asked = way | ({"host_pool": pool} if "host_pool" in way else {})
        with Engine(model_path(name), EngineConfig(ctx_size=64, **asked), checks=True) as engine:
            assert engine.cache is not None and engine.plan.mode.experts_in == "cache", way
            assert_same_bits(rows(engine, tokens), wanted)
            assert engine.cache.counters.n_uploads + engine.cache.counters.n_landed > 0, way
