"""`plan`: what lies where, decided before anything is allocated.

Pure: tests call it with invented devices. Rules and figures: gpu-facts.md, part A (9-12, 19).
"""

from __future__ import annotations

from dataclasses import fields

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec, PlanLine, WeightBytes
from vkmoe.gpu.memory_types import memory_type_candidates
from vkmoe.placement.conversions import growth_words
from vkmoe.placement.expert_facts import PoolRoom, Room
from vkmoe.placement.expert_plan import place_experts
from vkmoe.placement.fixed_lines import Scratch, fixed_lines, kv_bytes
from vkmoe.placement.slots import READ_AT_HOME, MissWays
from vkmoe.placement.words import in_mib

__all__ = ["DEFAULT_CTX_SIZE", "context_size", "device_budget", "plan"]

DEFAULT_CTX_SIZE = 8192
MIB, GIB = 1 << 20, 1 << 30
RESERVE_BYTES = {"integrated": 4 * GIB, "cpu": GIB}  # of host memory, for the rest of the machine
MAX_CACHE_BYTES = 1 << 32  # of each of a layer's caches, as ops/attention.py asserts


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
    kv = (ctx_size, config.kv_type, reason)
    lines = fixed_lines(spec, device, weights, scratch, kv)
    budget = device_budget(device, available_host_bytes)
    room = _room(lines, device, budget, available_host_bytes)
    if room.device < 0:
        caches = spec.n_caches * spec.n_layers * kv_bytes(spec, ctx_size, config.kv_type)
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
    """What the budgets leave for experts; less than nothing where not even these lines fit."""
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
    """Bytes of device memory vkmoe may use; integrated and CPU devices share the host's.

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
    """Bytes free in the heaps that allocations of `device` memory fall back through, less 5 %."""
    types = memory_type_candidates(device, "device")
    heaps = [device.heaps[index] for index in {device.memory_types[item].heap for item in types}]
    return sum(max(0, heap.size - (heap.usage or 0)) for heap in heaps) * 95 // 100


def context_size(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens the KV cache will hold. Raises UsageError for more than the model can have."""
    ctx_size = min(spec.context_length, config.ctx_size or DEFAULT_CTX_SIZE)
    if config.ctx_size is not None and config.ctx_size > spec.context_length:
        raise UsageError(
            f"--ctx-size {config.ctx_size} is more than the {spec.context_length} tokens "
            f"{spec.name} was trained for",
            f"use at most {spec.context_length}",
        )
    row_bytes = spec.cache_row * (2 if config.kv_type == "f16" else 4)
    largest = (MAX_CACHE_BYTES - 1) // row_bytes
    if ctx_size > largest:
        raise UsageError(
            f"a context of {ctx_size} tokens makes the KV cache of a layer larger than 4 GiB",
            f"use --ctx-size {largest} or less",
        )
    return ctx_size
