"""Some layers have slots and others none, where there is no room for one in each: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.caches import assert_same_bits, rows
from tests.engine.tiny import expected, model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.placement.pools import SlotLayout

pytestmark = pytest.mark.usefixtures("one_device")

NAME = "moe_plain"
WAYS: dict[str, dict[str, Any]] = {
    "read": {"miss": "read"},
    "land": {"miss": "read", "promote_on_read": True},
    "gather": {"miss": "gather", "promote_on_read": True},
    "stepped": {"executor": "stepped"},
    "several": {"parallel": 2},
}


@pytest.mark.parametrize("slots", [(1, 0), (0, 2)])
@pytest.mark.parametrize("way", WAYS)
def test_layers_without_slots_compute_what_others_do(
    way: str, slots: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both layers of a tiny model fit in the least that is allocated: the slots are forced here."""
    tokens, asked = expected(NAME)["tokens"][:12].tolist(), WAYS[way]
    with Engine(model_path(NAME), EngineConfig(ctx_size=64)) as engine:
        wanted = rows(engine, tokens)
    monkeypatch.setattr(SlotLayout, "largest", lambda self, n_bytes: slots)
    config = EngineConfig(ctx_size=64, expert_cache="1MiB", **asked)
    with Engine(model_path(NAME), config, checks=True) as engine:
        assert engine.plan.expert_slots == slots
        assert_same_bits(rows(engine, tokens), wanted)
        assert engine.cache is not None
        n_moved = engine.cache.counters.n_uploads + engine.cache.counters.n_landed
        assert n_moved > 0


def test_the_cpu_computes_whole_layers_without_slots(
    cpu_native: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ from the GPU's by the rounding of the CPU's activations alone."""
    tokens = expected(NAME)["tokens"][:12].tolist()
    with Engine(model_path(NAME), EngineConfig(ctx_size=64)) as engine:
        wanted = rows(engine, tokens)
    monkeypatch.setattr(SlotLayout, "largest", lambda self, n_bytes: (3, 0))
    config = EngineConfig(ctx_size=64, expert_mode="hybrid")
    with Engine(model_path(NAME), config, checks=True) as engine:
        assert engine.plan.expert_slots == (3, 0) and engine.plan.mode.name == "hybrid"
        found = rows(engine, tokens)
    assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()
