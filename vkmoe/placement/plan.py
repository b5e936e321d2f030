"""Decides how a model runs on a device before memory is allocated, and what lies where.

`decide` makes all decisions, for the engine and for `vkmoe info`. `plan` makes the memory plan and
is pure: tests call it with invented devices. Its lines are what is allocated: arenas are made of
the layouts in them, and tests/engine/test_memory_plan.py holds every buffer the device is asked for
against the line of its name. Where experts go is the subject of experts.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from vkmoe.choices import BufferName
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import cpu_info
from vkmoe.cpu.variants import variant
from vkmoe.errors import NoDeviceError, OutOfMemoryError, UsageError
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.predict import Correlation
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.decide.token_table import n_rows_of, row_bytes
from vkmoe.experts.store.table import N_VERSIONS, TableShape
from vkmoe.facts import (
    ON_DEVICE,
    Allocation,
    ArenaLayout,
    DeviceInfo,
    ExpertMode,
    LatentSpec,
    MemoryPlan,
    ModelSpec,
    WeightBytes,
)
from vkmoe.gpu.arena import chunk_cap, lay_out_spans, round_up
from vkmoe.gpu.device import Intent
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.gpu.transfer import N_LANES, STAGING_BYTES
from vkmoe.kv_types import KvTypes, both
from vkmoe.models import ModelFile
from vkmoe.models.cpu_experts import CpuTensors
from vkmoe.models.workspace import FEW_ROWS, RowSizes, Workspace, attention_kernels
from vkmoe.ops.attention_shapes import MAX_CACHE_BYTES
from vkmoe.ops.handover import HANDED, JOINED
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.placement.cache_choice import cache_mode, cache_pools, cache_settings
from vkmoe.placement.experts import ExpertRoom, place_experts
from vkmoe.placement.mapped import mapped_bytes, spans_in_file
from vkmoe.placement.memory import (
    allocation,
    available_bytes,
    device_budget,
    host_budget,
    in_mib,
    is_mapped,
    layout_bytes,
    margin_for,
    option_of,
)
from vkmoe.placement.pools import PoolRoom, host_pools
from vkmoe.placement.sizes import CONVERTING_BYTES, growth_words, weight_bytes

__all__ = [
    "DEFAULT_CTX_SIZE",
    "MOST_ATTEMPTS",
    "Decision",
    "Scratch",
    "context_size",
    "decide",
    "plan",
    "predictor_lines",
    "row_sizes",
    "table_shape",
    "with_less",
]


log = logging.getLogger("vkmoe")
DEFAULT_CTX_SIZE, LEAST_CTX_SIZE = 8192, 512  # the least that is chosen unasked
PROMPT_ROWS = (32, 64, 128, 256, 512, 1024)  # sizes of programs below the largest
CPU_UBATCH, GPU_UBATCH = 128, 512


@dataclass(frozen=True)
class Decision:
    """Describes how a model will run on a device."""

    tuning: Tuning
    workspace: Workspace
    weights: WeightBytes
    plan: MemoryPlan
    cpu: CpuTensors | None  # what the CPU works on, if it computes experts beside the device
    link: LinkSpeed | None  # None where it was not measured: no expert crosses one
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
    available_host_bytes: int | None = None,
) -> Decision:
    """Decide with `available_host_bytes` of host memory, by default those available now.

    `measure_link` is called where experts can miss. `overlaps`: experts are copied while tokens are
    computed (`copies_overlap`). Where the default context does not fit and none was asked for, it
    is halved until it does; where the trunk does not fit even so, layers of it go to host memory.
    Raises what `plan` and `measure_link` raise.
    """
    free = available_bytes() if available_host_bytes is None else available_host_bytes
    given = _Given(model, device, tuning or choose_tuning(device), measure_link, overlaps, free)
    try:
        return _decided(config, given)
    except OutOfMemoryError:
        if config.expert_slots or config.expert_cache or config.n_cpu_moe:
            raise  # what was asked for does not fit: a shorter context is not the first to try
        for less in _smaller(config, model.spec, device):
            with suppress(OutOfMemoryError):
                return _reduced(_decided(less, given), config, model.spec)
        raise


def _smaller(config: EngineConfig, spec: ModelSpec, device: DeviceInfo) -> Iterator[EngineConfig]:
    """Yield what may be tried in place of defaults that do not fit: first a shorter context.

    Then fewer layers on the device, one after another.
    """
    if config.ctx_size is None:
        n_tokens = context_size(config, spec)
        while n_tokens > LEAST_CTX_SIZE:
            n_tokens = max(LEAST_CTX_SIZE, n_tokens // 2)
            config = replace(config, ctx_size=n_tokens)
            yield config
    if config.gpu_layers is None and not device.is_uma:
        for n_layers in range(spec.n_layers - 1, -1, -1):
            yield replace(config, gpu_layers=n_layers)


def _reduced(decision: Decision, asked: EngineConfig, spec: ModelSpec) -> Decision:
    """Say of a decision what is less in it than was `asked`, which did not fit."""
    made, reasons, notes = decision.plan, dict[str, str](), list(decision.plan.notes)
    whole = context_size(asked, spec)
    if made.ctx_size < whole:
        reasons["KV cache"] = f"reduced from {whole}, which does not fit; --ctx-size changes it"
        notes.append(f"the context is {made.ctx_size} tokens, because {whole} do not fit")
    if made.host_layers and asked.gpu_layers is None:
        reasons["host weights"] = "the device has no room for them; --gpu-layers changes it"
        which = f"{made.host_layers} of {spec.n_layers} layers"
        notes.append(f"{which} are in host memory, because the device has no room for them")
    lines = tuple(
        replace(line, reason=reasons.get(line.name or "", line.reason)) for line in made.lines
    )
    return replace(decision, plan=replace(made, lines=lines, notes=tuple(notes)))


@dataclass(frozen=True)
class _Given:
    """Holds what decisions rest on besides what was asked."""

    model: ModelFile
    device: DeviceInfo
    tuning: Tuning
    measure_link: Callable[[], LinkSpeed | None]
    overlaps: bool
    available_host_bytes: int


def _decided(config: EngineConfig, given: _Given) -> Decision:
    """Decide with the context that was asked for, or the default."""
    model, device, tuning, overlaps = given.model, given.device, given.tuning, given.overlaps
    spec = model.spec
    find_bytes = weight_bytes if device.layout == "planes" else mapped_bytes
    sizes = find_bytes(model.tensors)
    cpu = _cpu_tuning(config, spec, device)
    if cpu is not None:
        sizes = replace(sizes, file_spans=spans_in_file(model.tensors))
    workspace = _workspace(config, spec, device, tuning, shares=cpu is not None)
    tensors = CpuTensors(spec, cpu, workspace) if cpu is not None else None
    link: LinkSpeed | None = None

    def mode_of_cache() -> ExpertMode:
        nonlocal link
        link = given.measure_link() if config.mode != "hybrid" else None
        return cache_mode(config, device, link, max(sizes.spans))

    scratch = _scratch(workspace, tensors)
    free = given.available_host_bytes
    made = plan(config, spec, device, sizes, scratch, free, mode_of_cache)
    if link is not None and made.mode.in_cache:
        way = "gathered" if made.mode.gathers else "read in place"
        log.info("experts without a slot are %s: %s", way, made.mode.reason)
    n_used = spec.experts.n_used if spec.experts else 0
    settings = cache_settings(config, spec.name, spec.experts, made, overlaps)
    learning = predictor_lines(settings, spec, len(sizes.spans), device)
    return Decision(
        tuning=tuning,
        workspace=workspace,
        weights=sizes,
        plan=replace(made, lines=(*made.lines, *learning)),
        cpu=tensors if made.cpu_layers else None,
        link=link,
        pools=cache_pools(config, spec, made, sizes.spans),
        host_pools=host_pools(made.host_slots, sizes.spans, n_used),
        overlaps=overlaps,
        cache_settings=settings,
    )


# ----- when a device refuses memory that the plan gave it -----
#
# Other programs take memory between plan and allocation, and drivers keep some for themselves. What
# is smaller first is the experts' share: fewer slots, then none. Then it is all the rest, as on a
# smaller device: a shorter context, and layers in host memory.

N_ATTEMPTS = 4  # which take away an eighth of the experts, a quarter, a half, and all
MOST_ATTEMPTS = 12  # each behind those: as much as a quarter of the layers that are still there
_REFUSED = "VK_ERROR_OUT_OF_DEVICE_MEMORY"
_OF_EXPERTS = ("experts", "expert slots")


def with_less(
    config: EngineConfig,
    decision: Decision,
    device: DeviceInfo,
    available_host_bytes: int,
    error: OutOfMemoryError,
    attempt: int,
) -> EngineConfig | None:
    """Ask for a plan with less on the device than that of a decision; None: there is none.

    `attempt` counts the plans that failed, from 1. Where a user asked for experts, or in how many
    layers the CPU has them, nothing is less; nor are there fewer layers than were asked for.
    """
    made, weights = decision.plan, decision.weights
    asked = config.expert_slots is not None or config.expert_cache is not None
    decided = asked or config.n_cpu_moe is not None or config.mode == "resident"
    of_experts = sum(
        line.n_bytes for line in made.lines if line.place == "device" and line.name in _OF_EXPERTS
    )
    if error.result != _REFUSED or decided or attempt > MOST_ATTEMPTS:
        return None
    taken = made.total("device") + (made.total("host") if device.is_uma else 0)
    if of_experts:
        less = of_experts >> max(0, N_ATTEMPTS - attempt)
    elif device.is_uma or config.gpu_layers is not None:
        return None
    else:
        host_layers = (made.host_layers, len(weights.layer_pieces))
        whole, least = (sum(weights.trunk_pieces(n)[0]) for n in host_layers)
        less = -(-(whole - least) // 4)
    most = taken - less
    return replace(config, vram_margin=str(margin_for(device, available_host_bytes, most)))


def predictor_lines(
    settings: CacheSettings, spec: ModelSpec, n_layers: int, device: DeviceInfo
) -> tuple[Allocation, ...]:
    """Make the line for a predictor that remembers much, in `n_layers` MoE layers.

    Other bookkeeping takes a few words for each expert and has no line.
    """
    if spec.experts is None:
        return ()
    if settings.predictor == "correlation":
        n_bytes = Correlation.n_bytes(KeySpace(n_layers, spec.experts.n_experts))
        reason = "how often each expert follows each other one"
    elif settings.predictor == "token":
        n_rows = min(spec.n_vocab, n_rows_of(n_layers, spec.experts.n_used))
        n_bytes = n_rows * row_bytes(n_layers, spec.experts.n_used)
        reason = f"which experts each token uses, of {n_rows} tokens at most"
    else:
        return ()
    name = f"predictor, {settings.predictor}"
    return (allocation(device, name, "host", reason, n_bytes=n_bytes),)


def _cpu_tuning(config: EngineConfig, spec: ModelSpec, device: DeviceInfo) -> Tuning | None:
    """Choose how kernels run on the CPU if it is to compute experts beside a device.

    Raises UsageError where vkmoe has no kernels for it.
    """
    if config.mode not in ("hybrid", "cpu") or spec.experts is None or not device.is_vulkan:
        return None
    try:
        variant()
    except NoDeviceError as error:
        hint = f"leave it out, or {error.hint}"
        raise UsageError(f"{config.mode_option} needs the CPU: {error}", hint) from error
    return choose_tuning(cpu_info())


def _workspace(
    config: EngineConfig, spec: ModelSpec, device: DeviceInfo, tuning: Tuning, shares: bool
) -> Workspace:
    """Describe the workspace, with chunks of prompts whose tensors the device can bind.

    Raises UsageError where those that were asked for are too long.
    """
    ctx_size, types = context_size(config, spec), kv_types(config, spec)
    attention = attention_kernels(spec, ctx_size, types, tuning)
    sizes, most = row_sizes(config, device), device.limits.max_storage_buffer_range
    while True:
        workspace = Workspace(spec, tuning, attention, sizes, shares)
        largest = max(workspace.tensors, key=lambda tensor: tensor.n_bytes)
        if largest.n_bytes <= most:
            return workspace
        if config.ubatch_size is not None or len(sizes.prompt) == 1:
            raise UsageError(
                f"{sizes.prompt[-1]} tokens at once need {in_mib(largest.n_bytes)} in one piece "
                f"({largest.name}), {device.name} allows {in_mib(most)}",
                "lower --ubatch-size",
            )
        sizes = replace(sizes, prompt=sizes.prompt[:-1])


def _scratch(workspace: Workspace, cpu: CpuTensors | None) -> Scratch:
    """List the workspace's tensors, and the host's buffers for what goes in and comes out."""
    return Scratch(
        tensors=tuple(tensor.n_bytes for tensor in workspace.tensors),
        params=workspace.params.n_bytes,
        results=workspace.log.n_bytes + workspace.candidates.n_bytes,
        logits=(4 * workspace.logits.row_words,) * workspace.logits.n_rows,
        brings=workspace.brings_experts,
        handed=cpu.handed.n_bytes if cpu else 0,
        joined=cpu.sums.n_bytes if cpu else 0,
        of_cpu=cpu.n_bytes if cpu else 0,
    )


@dataclass(frozen=True)
class Scratch:
    """Counts the bytes of the small buffers of a token."""

    tensors: tuple[int, ...]  # of the workspace, each an allocation of its own
    params: int
    results: int  # routing log and candidates, read back after each token, at most
    logits: tuple[int, ...]  # of each row that may want some, read back on its own
    brings: bool = True  # some program brings experts of prompts to the device
    handed: int = 0  # rows that the CPU computes experts from, all of them
    joined: int = 0  # what it adds to them
    of_cpu: int = 0  # its own tensors


def plan(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
    available_host_bytes: int,
    mode_of_cache: Callable[[], ExpertMode],
) -> MemoryPlan:
    """Decide context, expert placement and every line of memory. Pure.

    Lines are upper bounds of what will be allocated, rounding included. `mode_of_cache` is called
    where experts will be anywhere but on the device. Raises UsageError for a context the model
    cannot have and options that exclude each other here, OutOfMemoryError when it cannot fit.
    """
    ctx_size = context_size(config, spec)
    lines = tuple(_fixed_lines(config, spec, device, weights, scratch))
    base = MemoryPlan(
        ctx_size,
        kv_types(config, spec),
        ON_DEVICE,
        lines,
        n_regions=config.parallel,
        host_layers=_host_layers(config, weights),
    )
    budget = device_budget(device, available_host_bytes, config.vram_margin_bytes)
    free = budget - base.total("device") - (base.total("host") if device.is_uma else 0)
    try:
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
        given = ExpertRoom(config, spec.experts, weights, device, free, pool, base, scratch.brings)
        made = place_experts(given, mode_of_cache)
        made = replace(made, notes=(*_notes(config, weights), *made.notes))
        _check_host(made, spec, device, available_host_bytes)
        return made
    except OutOfMemoryError as error:
        if growth := growth_words(weights.conversions):
            others = "; a file in a type that vkmoe runs as it is needs less"
            raise OutOfMemoryError(f"{error}; weights are {growth}", error.hint + others) from None
        raise


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


def _chunks(config: EngineConfig, device: DeviceInfo) -> str:
    """Say what the size of the activations goes by."""
    most = row_sizes(config, device).prompt[-1]
    asked = "as --ubatch-size" if config.ubatch_size else "--ubatch-size changes it"
    return f"prompts in chunks of up to {most} tokens; {asked}"


def row_sizes(config: EngineConfig, device: DeviceInfo) -> RowSizes:
    """Choose how many rows programs have: to decode, and of a prompt.

    More than one row is decoded where there are several sequences, or guesses to verify.
    """
    most = config.ubatch_size or (CPU_UBATCH if device.is_cpu and device.is_vulkan else GPU_UBATCH)
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
        ("activations", "device", _chunks(config, device), "tensors", (*scratch.tensors, 4)),
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
