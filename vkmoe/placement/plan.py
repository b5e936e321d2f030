"""Decides how a model runs on a device before memory is allocated, and what lies where.

`decide` makes all decisions, for the engine and for `vkmoe info`. `plan` makes the memory plan and
is pure: tests call it with invented devices. Its lines are what is allocated: arenas are made of
the layouts in them, and tests/engine/test_memory_plan.py holds every buffer the device is asked for
against the line of its name. Where experts go is the subject of experts.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from vkmoe.choices import KvType
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.predict import Correlation
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.store.table import N_VERSIONS, TableShape
from vkmoe.facts import (
    ON_DEVICE,
    READ_IN_PLACE,
    Allocation,
    DeviceInfo,
    ExpertMode,
    MemoryPlan,
    ModelSpec,
    WeightBytes,
)
from vkmoe.gpu.arena import lay_out_spans, round_up
from vkmoe.gpu.device import memory_type_candidates
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.gpu.transfer import N_LANES, STAGING_BYTES
from vkmoe.models import ModelFile
from vkmoe.models.workspace import Workspace, attention_kernels
from vkmoe.ops.attention_shapes import MAX_CACHE_BYTES
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.placement.allocations import (
    allocation,
    buffer,
    is_mapped,
    layout_bytes,
    tensor_heap,
)
from vkmoe.placement.cache_choice import cache_pools, cache_settings
from vkmoe.placement.conversions import CONVERTING_BYTES, growth_words
from vkmoe.placement.experts import ExpertRoom, Room, all_on_device, place_experts
from vkmoe.placement.host import available_bytes
from vkmoe.placement.misses import cache_mode, promotes
from vkmoe.placement.pools import PoolRoom, host_pools
from vkmoe.placement.sizes import weight_bytes
from vkmoe.placement.words import in_mib

__all__ = [
    "DEFAULT_CTX_SIZE",
    "Decision",
    "Planner",
    "Scratch",
    "context_size",
    "decide",
    "device_budget",
    "plan",
    "predictor_lines",
]


log = logging.getLogger("vkmoe")
DEFAULT_CTX_SIZE = 8192
MIB, GIB = 1 << 20, 1 << 30
RESERVE_BYTES = {"integrated": 4 * GIB, "cpu": GIB}  # of host memory, for the rest of the machine


@dataclass(frozen=True)
class Decision:
    """Describes how a model will run on a device."""

    tuning: Tuning
    workspace: Workspace
    weights: WeightBytes
    plan: MemoryPlan
    link: LinkSpeed | None  # None where it was not measured: no expert crosses one
    table: TableShape  # of the expert table
    pools: tuple[PoolSpec, ...]  # of expert slots; () without a cache
    host_pools: tuple[PoolSpec, ...]  # of slots in host memory; () where all experts have a home
    overlaps: bool  # experts are copied while tokens are computed
    cache_settings: CacheSettings


def decide(
    config: EngineConfig,
    model: ModelFile,
    device: DeviceInfo,
    tuning: Tuning | None = None,
    measure_link: Callable[[], LinkSpeed | None] = lambda: None,
    overlaps: bool = False,
) -> Decision:
    """Decide with the host memory that is available now.

    `measure_link` is called where experts can miss. `overlaps`: experts are copied while tokens are
    computed (`copies_overlap`). Raises UsageError and OutOfMemoryError for the reasons that `plan`
    does, and what `measure_link` raises.
    """
    spec, tuning = model.spec, tuning or choose_tuning(device)
    ctx_size = context_size(config, spec)
    attention = attention_kernels(spec, ctx_size, config.kv_type, tuning)
    workspace = Workspace(spec, tuning, attention)
    sizes = weight_bytes(model.tensors)
    scratch = _scratch(workspace, spec.n_layers)
    planner = Planner(config, spec, device, sizes, scratch, available_bytes())
    link = measure_link() if planner.experts_miss else None
    mode = cache_mode(config, device, link, max(sizes.spans, default=0))
    decided = planner.plan(mode)
    if link is not None and decided.mode.in_cache:
        way = "gathered" if mode.gathers else "read in place"
        log.info("experts without a slot are %s: %s", way, mode.reason)
    pools = cache_pools(config, spec, decided, sizes.spans)
    n_used = spec.experts.n_used if spec.experts else 0
    homes = host_pools(decided.host_slots, sizes.spans, n_used)
    settings = cache_settings(config, spec.name, spec.experts, decided, overlaps)
    learning = predictor_lines(settings, spec, len(sizes.spans), device)
    decided = replace(decided, lines=(*decided.lines, *learning))
    return Decision(
        tuning=tuning,
        workspace=workspace,
        weights=sizes,
        plan=decided,
        link=link,
        table=table_shape(spec, sizes),
        pools=pools,
        host_pools=homes,
        overlaps=overlaps,
        cache_settings=settings,
    )


def predictor_lines(
    settings: CacheSettings, spec: ModelSpec, n_layers: int, device: DeviceInfo
) -> tuple[Allocation, ...]:
    """Make the line for a predictor that remembers pairs of experts in `n_layers` MoE layers.

    Other bookkeeping takes a few words for each expert and has no line.
    """
    if settings.predictor != "correlation" or spec.experts is None:
        return ()
    n_bytes = Correlation.n_bytes(KeySpace(n_layers, spec.experts.n_experts))
    reason = "how often each expert follows each other one"
    return (allocation(device, "predictor, correlation", "host", reason, n_bytes=n_bytes),)


def _scratch(workspace: Workspace, n_layers: int) -> Scratch:
    """List the workspace's tensors, and the host's buffers for what goes in and comes out."""
    serials = 4 * n_layers  # one for each piece but the last; pieces are whole layers and the head
    return Scratch(
        tensors=tuple(tensor.n_bytes for tensor in workspace.tensors),
        params=workspace.params.n_bytes,
        results=workspace.log.n_bytes + workspace.candidates.n_bytes + serials,
    )


@dataclass(frozen=True)
class Scratch:
    """Counts the bytes of the small buffers of a token."""

    tensors: tuple[int, ...]  # of the workspace, each an allocation of its own
    params: int
    results: int  # routing log, candidates and serials, read back after each token, at most


def plan(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
    available_host_bytes: int,
    mode: ExpertMode = READ_IN_PLACE,
) -> MemoryPlan:
    """Make the plan of a `Planner`, and raise what it raises."""
    return Planner(config, spec, device, weights, scratch, available_host_bytes).plan(mode)


class Planner:
    """Decides context, expert placement and every line of memory. Pure.

    Lines are upper bounds of what will be allocated, rounding included. Raises UsageError for a
    context the model cannot have and options that exclude each other here, OutOfMemoryError when it
    cannot fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        device: DeviceInfo,
        weights: WeightBytes,
        scratch: Scratch,
        available_host_bytes: int,
    ) -> None:
        self._conversions = weights.conversions
        ctx_size = context_size(config, spec)
        reason = (
            "as --ctx-size"
            if config.ctx_size
            else f"the model's context, at most {DEFAULT_CTX_SIZE}; --ctx-size changes it"
        )
        fixed = _FixedLines(spec, device, weights, scratch)
        lines = tuple(fixed.all(ctx_size, config.kv_type, reason))
        budget = device_budget(device, available_host_bytes)
        room = _room(lines, device, budget, available_host_bytes)
        base = MemoryPlan(
            ctx_size,
            config.kv_type,
            ON_DEVICE,
            lines,
            executor_reason="every expert is where the device can read it",
            conversions=weights.conversions,
        )
        self._given = ExpertRoom(config, spec.experts, weights, device, room, base)
        if room.device < 0:
            caches = sum(_cache_bytes(spec, ctx_size, config.kv_type))
            with self._with_growth():
                raise self._too_large(spec.name, budget, caches)

    @property
    def experts_miss(self) -> bool:
        """Say whether experts will be anywhere but on the device."""
        given = self._given
        return not all_on_device(given, promotes(given.config, given.device))

    def plan(self, mode: ExpertMode) -> MemoryPlan:
        """Decide; `mode` is that of the experts, should they come to lie in a cache."""
        with self._with_growth():
            return place_experts(self._given, mode)

    def _too_large(self, name: str, budget: int, caches: int) -> OutOfMemoryError:
        """Say that the `budget` does not even hold what is not an expert, `caches` a part of it."""
        given, trunk = self._given, self._given.weights.trunk
        return OutOfMemoryError(
            f"{name} needs {in_mib(budget - given.room.device)} of {given.device.name}'s memory "
            f"without its experts (weights {in_mib(trunk)}, KV cache {in_mib(caches)}); "
            f"{in_mib(budget)} can be used",
            "lower --ctx-size" if caches > trunk else "choose a smaller model",
        )

    @contextmanager
    def _with_growth(self) -> Iterator[None]:
        """Add to an error that weights without kernels take more than in the file."""
        try:
            yield
        except OutOfMemoryError as error:
            if growth := growth_words(self._conversions):
                others = "; a file in a type that vkmoe runs as it is needs less"
                raise OutOfMemoryError(
                    f"{error}; weights are {growth}", error.hint + others
                ) from None
            raise


def _room(
    lines: Sequence[Allocation], device: DeviceInfo, budget: int, available_host_bytes: int
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
    row_bytes = max(_cache_bytes(spec, 1, config.kv_type))
    largest = (MAX_CACHE_BYTES - 1) // row_bytes
    if ctx_size > largest:
        raise UsageError(
            f"a context of {ctx_size} tokens makes the KV cache of a layer larger than 4 GiB",
            f"use --ctx-size {largest} or less",
        )
    return ctx_size


def _cache_bytes(spec: ModelSpec, ctx_size: int, kv_type: KvType) -> list[int]:
    """Count the bytes of each cache of each layer, in the order in which they are placed."""
    layers = (layer.mixer.state_bytes(ctx_size, kv_type) for layer in spec.layers)
    return [n_bytes for sizes in layers for n_bytes in sizes]


def table_shape(spec: ModelSpec, weights: WeightBytes) -> TableShape:
    """Find the shape of the expert table, with its entries to land in.

    A dense model has one entry.
    """
    if spec.experts is None:
        return TableShape(1, 1, 0)
    return TableShape(max(1, len(weights.spans)), spec.experts.n_experts, spec.experts.n_used)


class _FixedLines:
    """Makes the lines for all that a model needs whatever is decided about its experts."""

    def __init__(
        self, spec: ModelSpec, device: DeviceInfo, weights: WeightBytes, scratch: Scratch
    ) -> None:
        self._spec, self._device = spec, device
        self._weights, self._scratch = weights, scratch

    def all(self, ctx_size: int, kv_type: KvType, reason: str) -> Iterator[Allocation]:
        spec, scratch, device = self._spec, self._scratch, self._device
        table = table_shape(spec, self._weights)
        ropes = [round_up(ctx_size * rope.dim * 4) for rope in spec.ropes]
        weights, rotary = self._trunk(ropes)
        yield weights
        item = f"KV cache, {ctx_size} tokens, {kv_type}"
        layout = [lay_out_spans(device, _cache_bytes(spec, ctx_size, kv_type))]
        yield allocation(device, item, "device", reason, "KV cache", layout)
        yield rotary
        # One more: the placeholder of kernels without tensors.
        tensors, why = buffer(*scratch.tensors, 4), "one token at a time"
        line = allocation(device, "activations", "device", why, "tensors", tensors)
        yield replace(line, heap=tensor_heap(device))
        versions = buffer(N_VERSIONS * table.n_bytes)
        yield allocation(device, "expert table", "bar", "two versions", "expert table", versions)
        params, why = buffer(scratch.params), "written for each token"
        yield allocation(device, "parameters", "host", why, "params", params)
        results, why = buffer(scratch.results), "read back after each token"
        yield allocation(device, "results", "readback", why, "readback", results)
        logits, why = buffer(4 * spec.n_vocab), "read back when asked for"
        yield allocation(device, "logits", "readback", why, "readback", logits)
        if lanes := self._staging(table.n_bytes):
            reason = "device memory is not mapped"
            yield allocation(device, "staging", "host", reason, "staging", buffer(*lanes))
        if found := self._weights.conversions:
            reason = growth_words(found) or "for a moment"
            yield allocation(device, "converting weights", "host", reason, n_bytes=CONVERTING_BYTES)

    def _trunk(self, ropes: Sequence[int]) -> tuple[Allocation, Allocation]:
        """Make the lines of the arena of the trunk, and of the rotary tables behind it."""
        device = self._device
        weights, rope_bytes = self._weights, sum(ropes)
        pieces = (*weights.pieces, *ropes) if weights.pieces else (weights.trunk + rope_bytes,)
        layout, why = lay_out_spans(device, pieces), "read for each token"
        n_bytes = layout_bytes([layout]) - rope_bytes
        item = "weights used by every token"
        trunk = allocation(device, item, "device", why, "weights", [layout], n_bytes)
        item, why = "rotary table", "one entry per position"
        return trunk, allocation(device, item, "device", why, "weights", n_bytes=rope_bytes)

    def _staging(self, table_bytes: int) -> list[int]:
        """List the loader's lanes, and those of the table's writes."""
        lanes = [] if is_mapped(self._device, "device") else [STAGING_BYTES] * N_LANES
        return lanes + ([] if is_mapped(self._device, "bar") else [table_bytes] * N_LANES)
