"""Decides how a model runs on a device before memory is allocated, and what lies where.

`decide` makes all decisions, for the engine and for `vkmoe info`. `plan` makes the memory plan and
is pure: tests call it with invented devices. A line of the plan is one allocation of the engine, or
several of a kind, as bytes of a heap; a guard compares the plan with what the device counts. The
allocations are made in engine.py, placement/loader.py, models/workspace.py, experts/store/table.py,
gpu/token_io.py and gpu/transfer.py. Where experts go is the subject of experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.store.table import N_VERSIONS
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec, PlanLine, WeightBytes
from vkmoe.gpu.arena import round_up
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.gpu.memory_types import Intent, memory_type_candidates
from vkmoe.gpu.transfer import STAGING_BYTES
from vkmoe.models.tensors import ModelTensors
from vkmoe.models.workspace import Workspace, attention_shape
from vkmoe.ops.attention_shapes import (
    MAX_CACHE_BYTES,
    AttentionShape,
    AttentionSplit,
    LatentShape,
    choose_split,
)
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.placement.allocations import allocated, arena_bytes, is_mapped, plan_line, tensor_heap
from vkmoe.placement.cache_choice import cache_pools, cache_settings
from vkmoe.placement.conversions import CONVERTING_BYTES, growth_words
from vkmoe.placement.experts import Room, place_experts
from vkmoe.placement.host import available_bytes
from vkmoe.placement.misses import READ_AT_HOME, MissWays, miss_ways
from vkmoe.placement.pools import PoolRoom, host_pools
from vkmoe.placement.sizes import weight_bytes
from vkmoe.placement.words import in_mib

__all__ = [
    "DEFAULT_CTX_SIZE",
    "Decision",
    "Scratch",
    "context_size",
    "decide",
    "device_budget",
    "plan",
    "predictor_lines",
]


DEFAULT_CTX_SIZE = 8192
MIB, GIB = 1 << 20, 1 << 30
RESERVE_BYTES = {"integrated": 4 * GIB, "cpu": GIB}  # of host memory, for the rest of the machine
N_LANES = 2  # of staging, which gpu/transfer.py fills in turn


@dataclass(frozen=True)
class Decision:
    """How a model will run on a device."""

    tuning: Tuning
    attention_shape: AttentionShape | LatentShape
    attention_split: AttentionSplit
    workspace: Workspace
    plan: MemoryPlan
    ways: MissWays
    largest_span: int  # bytes of the largest expert
    pools: tuple[PoolSpec, ...]  # of expert slots; () without a cache
    host_pools: tuple[PoolSpec, ...]  # of places in host memory; () where there is one for each
    overlaps: bool  # experts are copied while tokens are computed
    cache_settings: CacheSettings


def decide(
    config: EngineConfig,
    spec: ModelSpec,
    tensors: ModelTensors,
    device: DeviceInfo,
    tuning: Tuning | None = None,
    link: LinkSpeed | None = None,
    overlaps: bool = False,
) -> Decision:
    """Decide with the host memory that is available now; `link` where it is measured.

    `overlaps`: experts are copied while tokens are computed (`copies_overlap`). Raises
    UsageError and OutOfMemoryError for the reasons that `plan` does.
    """
    tuning = tuning or choose_tuning(device)
    shape = attention_shape(spec, context_size(config, spec), config.kv_type)
    split = choose_split(shape, tuning)
    workspace = Workspace(spec, tuning, split, shape)
    sizes = weight_bytes(tensors)
    largest = max(sizes.spans, default=0)
    ways = miss_ways(config, device, link, largest)
    decided = plan(config, spec, device, sizes, _scratch(workspace), available_bytes(), ways)
    pools = cache_pools(config, spec, decided, sizes.spans)
    n_used = spec.experts.n_used if spec.experts else 0
    homes = host_pools(decided.host_places, sizes.spans, n_used)
    settings = cache_settings(config, spec.name, spec.experts, decided, overlaps)
    learning = predictor_lines(settings, spec, len(sizes.spans), device)
    decided = replace(decided, lines=(*decided.lines, *learning))
    return Decision(
        tuning, shape, split, workspace, decided, ways, largest, pools, homes, overlaps, settings
    )


def predictor_lines(
    settings: CacheSettings, spec: ModelSpec, n_layers: int, device: DeviceInfo
) -> tuple[PlanLine, ...]:
    """Make the line for a predictor that remembers pairs of experts in `n_layers` MoE layers.

    Other bookkeeping takes a few words for each expert and has no line.
    """
    if settings.predictor != "correlation" or spec.experts is None:
        return ()
    n_experts = spec.experts.n_experts
    n_bytes = 4 * n_layers * n_experts * (n_experts + 1)  # as experts/decide/predict.py has them
    reason = "how often each expert follows each other one"
    return (plan_line(device, "predictor, correlation", "host", n_bytes, reason),)


def _scratch(workspace: Workspace) -> Scratch:
    """List the workspace's tensors, and the host's buffers for what goes in and comes out."""
    return Scratch(
        tensors=tuple(tensor.n_bytes for tensor in workspace.tensors),
        params=workspace.params.n_bytes,
        results=workspace.log.n_bytes + workspace.candidates.n_bytes,
    )


@dataclass(frozen=True)
class Scratch:
    """Bytes of the small buffers of a token."""

    tensors: tuple[int, ...]  # of the workspace, each an allocation of its own
    params: int
    results: int  # routing log and candidates, read back after each token


def plan(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
    available_host_bytes: int,
    ways: MissWays = READ_AT_HOME,
) -> MemoryPlan:
    """Decide context, expert placement and every line of memory.

    `ways` are how misses will be served, which the speed of the link decides. Lines are upper
    bounds of what will be allocated, rounding included. Raises UsageError for a context the model
    cannot have and options that exclude each other here, OutOfMemoryError when it cannot fit.
    """
    try:
        return _plan(config, spec, device, weights, scratch, available_host_bytes, ways)
    except OutOfMemoryError as error:
        if growth := growth_words(weights.conversions):
            others = "; a file in a type that vkmoe runs as it is needs less"
            raise OutOfMemoryError(f"{error}; weights are {growth}", error.hint + others) from None
        raise


def _plan(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
    available_host_bytes: int,
    ways: MissWays,
) -> MemoryPlan:
    ctx_size = context_size(config, spec)
    reason = (
        "as --ctx-size"
        if config.ctx_size
        else f"the model's context, at most {DEFAULT_CTX_SIZE}; --ctx-size changes it"
    )
    fixed = _FixedLines(spec, device, weights, scratch)
    lines = list(fixed.all(ctx_size, config.kv_type, reason))
    budget = device_budget(device, available_host_bytes)
    room = _room(lines, device, budget, available_host_bytes)
    if room.device < 0:
        caches = spec.n_caches * spec.n_layers * _kv_bytes(spec, ctx_size, config.kv_type)
        raise OutOfMemoryError(
            f"{spec.name} needs {in_mib(budget - room.device)} of {device.name}'s memory without "
            f"its experts (weights {in_mib(weights.trunk)}, KV cache {in_mib(caches)}); "
            f"{in_mib(budget)} can be used",
            "lower --ctx-size" if caches > weights.trunk else "choose a smaller model",
        )
    made = place_experts(config, spec.experts, weights, device, room, ways)
    decided = {item.name: getattr(made, item.name) for item in fields(made)}
    decided["lines"] = (*lines, *made.lines)
    conversions = weights.conversions
    return MemoryPlan(ctx_size, config.kv_type, **decided, conversions=conversions)


def _room(
    lines: list[PlanLine], device: DeviceInfo, budget: int, available_host_bytes: int
) -> Room:
    """Find what the budgets leave for experts; below 0 where not even these lines fit."""
    on_device = sum(line.n_bytes for line in lines if line.place == "device")
    on_host = sum(line.n_bytes for line in lines if line.place == "host")
    free = budget - on_device
    if device.is_uma:
        free -= on_host
        unasked = min(free, available_host_bytes * 70 // 100 - on_device - on_host)
        return Room(free, PoolRoom(unasked, free), shared=True)
    heaps = [heap.size for heap in device.heaps if not heap.device_local]
    unasked, most = (
        min(n_bytes, max(heaps, default=available_host_bytes)) - on_host
        for n_bytes in (available_host_bytes * 70 // 100, available_host_bytes)
    )
    return Room(free, PoolRoom(unasked, most), shared=False)


def device_budget(device: DeviceInfo, available_host_bytes: int) -> int:
    """Count the bytes of device memory vkmoe may use; integrated and CPU devices share the host's.

    What an integrated device can use of it ends at its heaps, which can be smaller than RAM. A CPU
    device has no other limit than the host's: Mesa 22.3 reports 2 GiB of heap on any machine.
    """
    if device.is_uma:
        shared = max(0, available_host_bytes - RESERVE_BYTES[device.type])
        return shared if device.is_cpu else min(shared, _heaps_in_use(device))
    local = [heap for heap in device.heaps if heap.device_local]
    heap = max(local or device.heaps, key=lambda item: item.size)
    free = heap.size - 512 * MIB
    if heap.budget:
        free = min(free, heap.budget - (heap.usage or 0))
    return max(0, free * 95 // 100)


def _heaps_in_use(device: DeviceInfo) -> int:
    """Count the bytes free, less 5 %, in the heaps that `device` memory falls back through."""
    types = memory_type_candidates(device, "device")
    heaps = [device.heaps[index] for index in {device.memory_types[item].heap for item in types}]
    return sum(max(0, heap.size - (heap.usage or 0)) for heap in heaps) * 95 // 100


def context_size(config: EngineConfig, spec: ModelSpec) -> int:
    """Choose how many tokens the KV cache holds. Raises UsageError for more than can be."""
    ctx_size = min(spec.context_length, config.ctx_size or DEFAULT_CTX_SIZE)
    if config.ctx_size is not None and config.ctx_size > spec.context_length:
        raise UsageError(
            f"--ctx-size {config.ctx_size} is more than the {spec.context_length} tokens "
            f"{spec.name} was trained for",
            f"use at most {spec.context_length}",
        )
    row_bytes = _kv_bytes(spec, 1, config.kv_type)
    largest = (MAX_CACHE_BYTES - 1) // row_bytes
    if ctx_size > largest:
        raise UsageError(
            f"a context of {ctx_size} tokens makes the KV cache of a layer larger than 4 GiB",
            f"use --ctx-size {largest} or less",
        )
    return ctx_size


def _kv_bytes(spec: ModelSpec, ctx_size: int, kv_type: str) -> int:
    """Count the bytes of one of the caches of a layer."""
    return ctx_size * spec.cache_row * (2 if kv_type == "f16" else 4)


def _table_bytes(spec: ModelSpec, weights: WeightBytes) -> int:
    """Count the bytes of a version of the expert table, with its places to land in.

    A dense model has one entry.
    """
    per_layer = spec.experts.n_experts + spec.experts.n_used if spec.experts else 1
    return 8 * max(1, len(weights.spans)) * per_layer


class _FixedLines:
    """The lines for all that a model needs whatever is decided about its experts."""

    def __init__(
        self, spec: ModelSpec, device: DeviceInfo, weights: WeightBytes, scratch: Scratch
    ) -> None:
        self._spec, self._device = spec, device
        self._weights, self._scratch = weights, scratch

    def all(self, ctx_size: int, kv_type: str, reason: str) -> Iterator[PlanLine]:
        spec, scratch = self._spec, self._scratch
        rope_bytes = round_up(ctx_size * spec.rope.dim * 4)
        table = _table_bytes(spec, self._weights)
        yield self._line(
            "weights used by every token", "device", self._trunk(rope_bytes), "read for each token"
        )
        yield self._line(
            f"KV cache, {ctx_size} tokens, {kv_type}",
            "device",
            self._kv(_kv_bytes(spec, ctx_size, kv_type)),
            reason,
        )
        yield self._line("rotary table", "device", rope_bytes, "one entry per position")
        # One more: the placeholder of kernels without tensors.
        tensors = sum(allocated(n_bytes) for n_bytes in (*scratch.tensors, 4))
        heap = tensor_heap(self._device)
        yield PlanLine("activations", "device", tensors, "one token at a time", heap)
        yield self._line("expert table", "bar", allocated(N_VERSIONS * table), "two versions")
        yield self._line("parameters", "host", allocated(scratch.params), "written for each token")
        yield self._line(
            "results", "readback", allocated(scratch.results), "read back after each token"
        )
        logits = allocated(4 * spec.n_vocab)
        yield self._line("logits", "readback", logits, "read back when asked for")
        if staging := self._staging(table):
            yield self._line("staging", "host", staging, "device memory is not mapped")
        if found := self._weights.conversions:
            reason = growth_words(found) or "for a moment"
            yield self._line("converting weights", "host", CONVERTING_BYTES, reason)

    def _trunk(self, rope_bytes: int) -> int:
        """Bound the arena of the trunk and the rotary table, without the table."""
        weights = self._weights
        pieces = (*weights.pieces, rope_bytes) if weights.pieces else (weights.trunk + rope_bytes,)
        return arena_bytes(self._device, pieces, weights.trunk + rope_bytes) - rope_bytes

    def _kv(self, n_bytes: int) -> int:
        n_caches = self._spec.n_caches * self._spec.n_layers
        return arena_bytes(self._device, [n_bytes] * n_caches, n_caches * n_bytes)

    def _staging(self, table: int) -> int:
        """Count the loader's lanes, and those of the table's writes."""
        lanes = [] if is_mapped(self._device, "device") else [STAGING_BYTES] * N_LANES
        lanes += [] if is_mapped(self._device, "bar") else [table] * N_LANES
        return sum(allocated(n_bytes) for n_bytes in lanes)

    def _line(self, item: str, intent: Intent, n_bytes: int, reason: str) -> PlanLine:
        return plan_line(self._device, item, intent, n_bytes, reason)
