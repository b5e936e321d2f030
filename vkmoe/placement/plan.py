"""Plans what lies where before memory is allocated: every line of memory that a model takes.

`plans` makes a plan of each way in which experts can be placed, `ranked` orders them by what is
predicted. Both are pure: tests call them with invented devices. A plan's lines are what is
allocated: arenas are made of the layouts in them, and tests/engine/test_memory_plan.py holds every
buffer the device is asked for against the line of its name. Where experts go is the subject of
experts.py, what programs need besides that of decide.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vkmoe.choices import BufferName
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.store.table import N_VERSIONS, TableShape
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.facts import (
    Allocation,
    ArenaLayout,
    DeviceInfo,
    LatentSpec,
    MemoryPlan,
    ModelSpec,
    WeightBytes,
    in_mib,
)
from vkmoe.gpu.arena import chunk_cap, lay_out_spans, round_up
from vkmoe.gpu.device import Intent
from vkmoe.gpu.transfer import N_LANES, STAGING_BYTES
from vkmoe.kv_types import KvTypes, both
from vkmoe.models.workspace import FEW_ROWS, RowSizes
from vkmoe.modes import RESIDENT, Cache
from vkmoe.ops.attention_shapes import MAX_CACHE_BYTES
from vkmoe.ops.handover import HANDED, JOINED
from vkmoe.placement.experts import ExpertRoom, Way, place_experts, ways
from vkmoe.placement.forecast.cost import Prediction, TokenBytes, predict
from vkmoe.placement.forecast.speeds import Machine
from vkmoe.placement.memory import (
    allocation,
    device_budget,
    host_budget,
    is_mapped,
    layout_bytes,
    option_of,
)
from vkmoe.placement.pools import PoolRoom
from vkmoe.weights.sizes import CONVERTING_BYTES, growth_words

__all__ = [
    "DEFAULT_CTX_SIZE",
    "Candidate",
    "Scratch",
    "context_size",
    "kv_types",
    "plans",
    "ranked",
    "row_sizes",
    "table_shape",
]

DEFAULT_CTX_SIZE, LEAST_CTX_SIZE = 8192, 512  # the least that is chosen unasked
PROMPT_ROWS = (32, 64, 128, 256, 512, 1024)  # sizes of programs below the largest
CPU_UBATCH, GPU_UBATCH = 128, 512
LEAST_ROWS = 64  # of the longest chunks that are planned unasked


@dataclass(frozen=True)
class Candidate:
    """Holds a complete plan in one way, and what is predicted of it."""

    way: Way
    plan: MemoryPlan
    prediction: Prediction


def ranked(
    found: Sequence[tuple[Way, MemoryPlan]],
    spec: ModelSpec,
    reads: Callable[[MemoryPlan], TokenBytes],
    machine: Machine,
    curve: HitCurve,
    measured: bool,
) -> tuple[Candidate, ...]:
    """Order plans by what is predicted of them, the fastest first."""
    read, gather = machine.speeds.link / 1e9, machine.speeds.gather / 1e9
    reason = f"{read:.1f} GB/s read in place, {gather:.1f} gathered"
    reason = reason if measured else "the link was not measured"
    candidates = []
    for way, made in found:
        if isinstance(made.mode, Cache) and not made.mode.reason:
            made = replace(made, mode=replace(made.mode, reason=reason))
        candidates.append(Candidate(way, made, predict(made, spec, reads(made), machine, curve)))
    return tuple(sorted(candidates, key=lambda each: each.prediction.seconds))


@dataclass(frozen=True)
class Scratch:
    """Counts the bytes of the small buffers of a token."""

    tensors: tuple[int, ...]  # of the workspace, each an allocation of its own
    params: int
    results: int  # routing log and candidates, read back after each token, at most
    logits: tuple[int, ...]  # of each row that may want some, read back on its own
    rows: int = 0  # of a prompt that are processed at once
    brings: bool = True  # some program brings experts of prompts to the device
    handed: int = 0  # rows that the CPU computes experts from, all of them
    joined: int = 0  # what it adds to them
    of_cpu: int = 0  # its own tensors


def plans(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
    available_host_bytes: int,
    curve: HitCurve = MEAN_CURVE,
) -> list[tuple[Way, MemoryPlan]]:
    """Make every plan that options leave: with experts of the CPU if `weights` count those. Pure.

    [] where options rule the CPU out. Slots are split by `curve`, if that is one of single layers.
    Lines are upper bounds of what will be allocated, rounding included. Raises UsageError for a
    context the model cannot have and options that exclude each other here, OutOfMemoryError when
    it cannot fit.
    """
    try:
        given = _expert_room(config, spec, device, weights, scratch, available_host_bytes)
        given = replace(given, curve=curve)
        found, error = list[tuple[Way, MemoryPlan]](), None
        for way in ways(given):
            try:
                made = place_experts(given, way)
                _check_host(made, spec, device, available_host_bytes)
            except (OutOfMemoryError, UsageError) as refusal:
                error = refusal
                continue
            if config.mode == "auto" and way.mode == "hybrid" and not made.mode.has_slots:
                continue  # without a slot it is what another way is
            found.append((way, replace(made, notes=(*_notes(config, weights), *made.notes))))
        if error is not None and not found:
            raise error
        return found
    except OutOfMemoryError as error:
        if growth := growth_words(weights.conversions):
            others = "; a file in a type that vkmoe runs as it is needs less"
            raise OutOfMemoryError(f"{error}; weights are {growth}", error.hint + others) from None
        raise


def _expert_room(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
    available_host_bytes: int,
) -> ExpertRoom:
    """Plan all but experts; find the room that is left to these.

    Raises OutOfMemoryError where there is none.
    """
    ctx_size = context_size(config, spec)
    lines = tuple(_fixed_lines(config, spec, device, weights, scratch))
    base = MemoryPlan(
        ctx_size,
        kv_types(config, spec),
        RESIDENT,
        lines,
        chunk_rows=scratch.rows,
        n_regions=config.parallel,
        host_layers=_host_layers(config, weights),
    )
    budget = device_budget(device, available_host_bytes, config.vram_margin_bytes)
    free = budget - base.total("device") - (base.total("host") if device.is_uma else 0)
    if free < 0:
        parts = {
            "weights": sum(weights.trunk_pieces(base.host_layers)[0]),
            "KV cache": config.parallel * sum(_cache_bytes(spec, ctx_size, base.kv_types)),
            "activations": sum(scratch.tensors),
        }
        listed = ", ".join(f"{name} {in_mib(n_bytes)}" for name, n_bytes in parts.items())
        raise OutOfMemoryError(
            f"{spec.name} needs {in_mib(budget - free)} of {device.name}'s memory "
            f"without its experts ({listed}); {in_mib(budget)} can be used",
            "lower --vram-margin"
            if config.vram_margin_bytes
            else _hint(config, max(parts, key=parts.__getitem__)),
        )
    pool = _pool_room(base, device, free, available_host_bytes)
    return ExpertRoom(config, spec.experts, weights, device, free, pool, base, scratch.brings)


def _host_layers(config: EngineConfig, weights: WeightBytes) -> int:
    """Count the layers whose trunk is to be in host memory."""
    n_layers = len(weights.layer_pieces)
    return n_layers - min(n_layers, n_layers if config.gpu_layers is None else config.gpu_layers)


def _notes(config: EngineConfig, weights: WeightBytes) -> tuple[str, ...]:
    if config.gpu_layers is None or weights.layer_pieces:
        return ()
    return (f"the CPU reads weights in the file: --gpu-layers {config.gpu_layers} has no effect",)


def _check_host(
    made: MemoryPlan, spec: ModelSpec, device: DeviceInfo, available_host_bytes: int
) -> None:
    """Refuse a plan for which the host would have to swap. Raises OutOfMemoryError."""
    needed = made.total("host") + (made.total("device") if device.is_uma else 0)
    if needed <= available_host_bytes:
        return
    places = ("host", "device") if device.is_uma else ("host",)
    counted = (line for line in made.lines if line.place in places)
    largest = max(counted, key=lambda line: line.n_bytes)
    option = option_of(largest)
    raise OutOfMemoryError(
        f"{spec.name} needs {in_mib(needed)} of host memory, most of it for {largest.item} "
        f"({in_mib(largest.n_bytes)}); {in_mib(available_host_bytes)} are free",
        f"close other programs, {f'change {option}, ' if option else ''}or choose a smaller model",
    )


def _hint(config: EngineConfig, largest: str) -> str:
    """Say what makes a plan smaller that has no room for any expert, by its largest part."""
    if largest == "KV cache":
        less = "lower --ctx-size or --parallel" if config.parallel > 1 else "lower --ctx-size"
        return less if config.cache_type_k == "q8_0" else f"{less}, or try --cache-type-k q8_0"
    return "lower --ubatch-size" if largest == "activations" else "choose a smaller model"


def _chunks(config: EngineConfig, device: DeviceInfo, n_rows: int) -> str:
    """Say what the size of the activations goes by."""
    most = n_rows or row_sizes(config, device).prompt[-1]
    asked = "as --ubatch-size" if config.ubatch_size else "--ubatch-size changes it"
    return f"prompts in chunks of up to {most} tokens; {asked}"


def row_sizes(config: EngineConfig, device: DeviceInfo, n_rows: int = 0) -> RowSizes:
    """Choose how many rows programs have: to decode, and of a prompt, `n_rows` at most if given.

    More than one row is decoded where there are several sequences, or guesses to verify.
    """
    most = CPU_UBATCH if device.is_cpu and device.is_vulkan else GPU_UBATCH
    most = n_rows or config.ubatch_size or most
    prompt = [size for size in PROMPT_ROWS if size < most]
    several = config.parallel > 1 or config.draft != "none"
    return RowSizes(FEW_ROWS if several else (1,), (*prompt, most))


def _pool_room(
    base: MemoryPlan, device: DeviceInfo, free: int, available_host_bytes: int
) -> PoolRoom:
    """Find what is left of host memory; where it is shared, all that is `free` on the device."""
    on_host, unasked = base.total("host"), host_budget(available_host_bytes)
    if device.is_uma:
        return PoolRoom(min(free, unasked - base.total("device") - on_host), free)
    heaps = [heap.size for heap in device.heaps if not heap.device_local]
    heap = max(heaps, default=available_host_bytes)
    return PoolRoom(min(unasked, heap) - on_host, min(available_host_bytes, heap) - on_host)


def context_size(config: EngineConfig, spec: ModelSpec) -> int:
    """Choose how many tokens the KV cache holds. Raises UsageError for more than can be."""
    ctx_size = min(spec.context_length, config.ctx_size or DEFAULT_CTX_SIZE)
    if config.ctx_size is not None and config.ctx_size > spec.context_length:
        raise UsageError(
            f"--ctx-size {config.ctx_size} is more than the {spec.context_length} tokens "
            f"{spec.name} was trained for",
            f"use at most {spec.context_length}",
        )
    few = 4  # rows of as many positions fill whole words of 16 bytes
    most_bytes = max(_cache_bytes(spec, few, kv_types(config, spec)))
    largest = (MAX_CACHE_BYTES - 1) * few // most_bytes
    if ctx_size > largest:
        raise UsageError(
            f"a context of {ctx_size} tokens makes the KV cache of a layer larger than 4 GiB",
            f"use --ctx-size {largest} or less",
        )
    return ctx_size


def kv_types(config: EngineConfig, spec: ModelSpec) -> KvTypes:
    """Choose what the KV cache holds.

    Raises UsageError for values unlike keys where a model caches them as one.
    """
    keys, values = config.cache_type_k, config.cache_type_v
    if not any(isinstance(mixer, LatentSpec) for mixer in spec.mixers):
        return KvTypes(keys, values or "f16")
    if values not in (None, keys):
        raise UsageError(
            f"--cache-type-v {values} contradicts --cache-type-k {keys}: {spec.name} caches keys "
            "and values as one row",
            f"leave out --cache-type-v; --cache-type-k {values} makes the rows {values}",
        )
    return both(keys)


def _cache_bytes(spec: ModelSpec, ctx_size: int, types: KvTypes) -> list[int]:
    """Count the bytes of each cache of each layer, in the order in which they are placed."""
    layers = (layer.mixer.state_bytes(ctx_size, types) for layer in spec.layers)
    return [n_bytes for sizes in layers for n_bytes in sizes]


def table_shape(spec: ModelSpec, weights: WeightBytes) -> TableShape:
    """Find the shape of the expert table, with its entries to land in.

    A dense model has one entry.
    """
    if spec.experts is None:
        return TableShape(1, 1, 0)
    return TableShape(max(1, len(weights.spans)), spec.experts.n_experts, spec.experts.n_used)


def _one(n_bytes: int) -> list[int]:
    """List a buffer, if it is any."""
    return [n_bytes] if n_bytes else []


def _fixed_lines(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
) -> Iterator[Allocation]:
    """Make the lines for all that a model needs whatever is decided about its experts."""
    ctx_size, types = context_size(config, spec), kv_types(config, spec)
    ropes = [round_up(ctx_size * rope.dim * 4) for rope in spec.ropes]
    n_host = _host_layers(config, weights)
    on_device, on_host = weights.trunk_pieces(n_host)
    trunk = lay_out_spans(device, [*on_device, *ropes])  # rotary tables are behind weights
    n_bytes = layout_bytes([trunk]) - sum(ropes)
    item, reason = "weights used by every token", "read for each token"
    if weights.mapped:
        yield Allocation("weights", "file", weights.mapped, "read where the file is mapped")
        item, reason = "addresses of blocks", "where weights are in the file"
    yield allocation(device, item, "device", reason, "weights", [trunk], n_bytes)
    if on_host:
        item = f"weights of the last {n_host} of {spec.n_layers} layers"
        layouts = [lay_out_spans(device, list(on_host))]
        yield allocation(device, item, "host", "as --gpu-layers", "host weights", layouts)
    if weights.copied:
        item, reason = "other weights", "kernels cannot read them as they are in the file"
        yield allocation(device, item, "host", reason, n_bytes=weights.copied)
    of_each = f" for each of {config.parallel}" if config.parallel > 1 else ""
    item = f"KV cache, {ctx_size} tokens{of_each}, {types}"
    default = f"the model's context, at most {DEFAULT_CTX_SIZE}; --ctx-size changes it"
    reason = "as --ctx-size" if config.ctx_size else default
    sizes = [config.parallel * n_bytes for n_bytes in _cache_bytes(spec, ctx_size, types)]
    if max(sizes) > chunk_cap(device):
        raise OutOfMemoryError(
            f"the KV cache of a layer needs {in_mib(max(sizes))} in one piece, {device.name} "
            f"allocates at most {in_mib(chunk_cap(device))}",
            _hint(config, "KV cache"),
        )
    caches = [lay_out_spans(device, sizes)]
    yield allocation(device, item, "device", reason, "KV cache", caches)
    item, reason = "rotary table", "one entry per position"
    yield allocation(device, item, "device", reason, "weights", n_bytes=sum(ropes))
    table_bytes = table_shape(spec, weights).n_bytes
    lanes = [] if is_mapped(device, "device") else [STAGING_BYTES] * N_LANES  # of the loader
    lanes += [] if is_mapped(device, "bar") else [table_bytes] * N_LANES
    whole: tuple[tuple[str, Intent, str, BufferName, Sequence[int]], ...] = (
        # One more: the placeholder of kernels without tensors.
        (
            "activations",
            "device",
            _chunks(config, device, scratch.rows),
            "tensors",
            (*scratch.tensors, 4),
        ),
        ("expert table", "bar", "two versions", "expert table", [N_VERSIONS * table_bytes]),
        ("parameters", "host", "written for each token", "params", [scratch.params]),
        ("results", "readback", "read back after each token", "readback", [scratch.results]),
        ("logits", "readback", "read back when asked for", "readback", scratch.logits),
        ("staging", "host", "device memory is not mapped", "staging", lanes),
        (HANDED, "readback", "what the CPU computes experts from", HANDED, _one(scratch.handed)),
        (JOINED, "host", "what the CPU adds to them", JOINED, _one(scratch.joined)),
    )
    for item, intent, reason, name, buffers in whole:
        if buffers:
            yield allocation(device, item, intent, reason, name, [ArenaLayout(tuple(buffers))])
    if scratch.of_cpu:
        item, reason = "activations of the CPU", "for the experts that it computes"
        yield allocation(device, item, "host", reason, n_bytes=scratch.of_cpu)
    if found := weights.conversions:
        reason = growth_words(found) or "for a moment"
        yield allocation(device, "converting weights", "host", reason, n_bytes=CONVERTING_BYTES)
