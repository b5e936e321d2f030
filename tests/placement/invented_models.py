"""Models that are not here: shapes and bytes, for plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.invented import DISCRETE_12
from tests.models.changed_specs import of_layers
from vkmoe.config import EngineConfig
from vkmoe.experts.study.hit_curve import MEAN_CURVE
from vkmoe.facts import (
    AttentionSpec,
    DenseSpec,
    DeviceInfo,
    ExpertSpec,
    Heap,
    LayerSpec,
    MemoryPlan,
    ModelSpec,
    RopeSpec,
    WeightBytes,
)
from vkmoe.models.program_sizes import TokenBuffers
from vkmoe.modes import Cache, ExpertMode
from vkmoe.placement.decide import explained
from vkmoe.placement.forecast.cost import predict, token_bytes
from vkmoe.placement.forecast.speeds import Speeds, machine_of
from vkmoe.placement.plan import plans

MIB, GIB = 1 << 20, 1 << 30
N_LAYERS, N_EXPERTS, N_USED = 48, 128, 8
READ_IN_PLACE = Cache()

ATTENTION = AttentionSpec(32, 4, 128, RopeSpec(128, 1e6), "per_head")
DENSE = ModelSpec(
    architecture="qwen3moe", name="model", width=2048, n_vocab=151936, context_length=40960,
    norm_eps=1e-6, tied_embeddings=False, layers=(LayerSpec(ATTENTION, DenseSpec(0)),) * N_LAYERS,
)  # fmt: skip
SPEC = of_layers(DENSE, ATTENTION, *[ExpertSpec(N_EXPERTS, N_USED, 768)] * N_LAYERS)
SCRATCH = TokenBuffers(tensors=(MIB,) * 2 + (100,) * 10, params=64, results=6000, logits=(6000,),
                  rows=512)  # fmt: skip


def expert_bytes(*spans: int, trunk: int = GIB) -> WeightBytes:
    """Weights with these bytes per expert in successive layers, in turn for all layers."""
    in_turn = spans * (N_LAYERS // len(spans))
    return WeightBytes((trunk,), N_EXPERTS * sum(in_turn), in_turn)


WEIGHTS = expert_bytes(2_971_136)  # 17,409 MiB of experts
MIXED = expert_bytes(2_500_096, 3_442_176)  # as much, in two sizes in turn
ROOMY = replace(DISCRETE_12, heaps=(Heap(24 * GIB, True), Heap(64 * GIB, False)))
one_and_two_sizes = pytest.mark.parametrize("weights", [WEIGHTS, MIXED], ids=["one", "two sizes"])


def bytes_of(made: MemoryPlan, item: str) -> int:
    """Of the one line whose item begins like this."""
    (found,) = (line.n_bytes for line in made.lines if line.item.startswith(item))
    return found


def plan(
    config: EngineConfig, spec: ModelSpec, device: DeviceInfo, weights: WeightBytes,
    scratch: TokenBuffers, ram: int, speeds: Speeds | None = None,
) -> MemoryPlan:  # fmt: skip
    """The plan that is predicted to be fastest, at these speeds or those typical of the device."""
    machine = machine_of(device, speeds or Speeds(), ram)

    def seconds(made: MemoryPlan) -> float:
        reads = token_bytes(spec, weights, weights.pieces[0], made.host_layers)
        return predict(made, spec, reads, machine, MEAN_CURVE).seconds

    best = min(plans(config, spec, device, weights, scratch, ram), key=seconds)
    return explained(best, machine.speeds, speeds is not None)


def planned(
    info: DeviceInfo, weights: WeightBytes = WEIGHTS, ram: int = 40 * GIB,
    mode: ExpertMode = READ_IN_PLACE, spec: ModelSpec = SPEC, **asked: Any,
) -> MemoryPlan:  # fmt: skip
    """The plan for what was asked; `mode` is that of a cache, if there is one."""
    if asked.get("expert_mode", "auto") in ("auto", "cache") and spec.experts is not None:
        asked = {"miss": mode.miss, "promote_on_read": mode.promotes} | asked
    return plan(EngineConfig(**asked), spec, info, weights, SCRATCH, ram)
