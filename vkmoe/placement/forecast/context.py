"""Predicts how fast a plan decodes behind longer texts: more keys and values are read, and slots
have given memory to the KV cache. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.facts import AttentionSpec, DeltaNetSpec, DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.models.kept import Kept, state_bytes
from vkmoe.models.kv_caches import caching_layers, growth_bytes
from vkmoe.placement.forecast.cost import Prediction, TokenBytes, predict
from vkmoe.placement.forecast.speeds import Machine

MIDDLE = 8192  # positions


def context_rates(
    plan: MemoryPlan,
    spec: ModelSpec,
    device: DeviceInfo,
    read: TokenBytes,
    machine: Machine,
    curve: HitCurve = MEAN_CURVE,
) -> Iterator[tuple[int, Prediction]]:
    """Yield what to expect behind so many positions: none, some, and as many as there can be."""
    for n_positions in dict.fromkeys((0, min(MIDDLE, plan.ctx_size), plan.ctx_size)):
        less = with_context(plan, spec, device, n_positions)
        more = replace(read, trunk=read.trunk + _cached_bytes(plan, spec, n_positions))
        yield n_positions, predict(less, spec, more, machine, curve)


def with_context(
    plan: MemoryPlan, spec: ModelSpec, device: DeviceInfo, n_positions: int
) -> MemoryPlan:
    """Return the plan with the slots that are left when KV caches have so many positions."""
    n_bytes = growth_bytes(device, spec, plan, n_positions) - plan.spare_bytes
    if n_bytes <= 0 or not plan.gives_slots:
        return plan
    slots = plan.sizing.n_bytes if plan.sizing else 0
    share = max(0.0, 1.0 - n_bytes / max(1, slots))
    n_used = spec.experts.n_used if spec.experts else 0
    left = tuple(max(min(n, n_used), int(n * share)) for n in plan.expert_slots)
    return replace(plan, expert_slots=left)


def _cached_bytes(plan: MemoryPlan, spec: ModelSpec, n_positions: int) -> int:
    """Count the bytes of keys and values that a token behind so many positions reads."""
    total = 0
    for layer in (spec.layers[index] for index in caching_layers(spec)[: spec.n_layers]):
        window = layer.mixer.window if isinstance(layer.mixer, AttentionSpec) else 0
        seen = min(n_positions, window) if window else n_positions
        read = state_bytes(layer.mixer, Kept(seen, plan.kv_types))
        total += sum(read) * (1 + isinstance(layer.mixer, DeltaNetSpec))  # states are written, too
    return total
