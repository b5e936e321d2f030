"""`plan`: what lies where, decided before anything is allocated.

Pure: tests call it with invented devices. Rules and figures: gpu-facts.md, part A (9-12, 19).
"""

from __future__ import annotations

from typing import Literal

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec, PlanLine, WeightBytes
from vkmoe.gpu.memory_types import memory_type_candidates

__all__ = ["DEFAULT_CTX_SIZE", "context_size", "device_budget", "plan"]

DEFAULT_CTX_SIZE = 8192
MIB, GIB = 1 << 20, 1 << 30
RESERVE_BYTES = {"integrated": 4 * GIB, "cpu": GIB}  # of host memory, for the rest of the machine
MAX_CACHE_BYTES = 1 << 32  # of one layer's keys or values, as ops/attention.py asserts


def plan(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch_bytes: int,
    available_host_bytes: int,
) -> MemoryPlan:
    """Decide context, expert placement and every line of memory.

    Raises UsageError for a context the model cannot have, OutOfMemoryError when it cannot fit.
    """
    ctx_size = context_size(config, spec)
    kv_bytes = (
        2
        * spec.n_layers
        * spec.n_kv_heads
        * ctx_size
        * spec.head_dim
        * (2 if config.kv_type == "f16" else 4)
    )
    rope_bytes = ctx_size * spec.rope.dim * 4
    fixed = weights.trunk + kv_bytes + rope_bytes + scratch_bytes
    budget = device_budget(device, available_host_bytes)
    if fixed > budget:
        raise OutOfMemoryError(
            f"{spec.name} needs {_mib(fixed)} of {device.name}'s memory without its experts "
            f"(weights {_mib(weights.trunk)}, KV cache {_mib(kv_bytes)}); "
            f"{_mib(budget)} can be used",
            "lower --ctx-size" if kv_bytes > weights.trunk else "choose a smaller model",
        )
    experts_in, reason = _expert_place(weights, device, budget - fixed, available_host_bytes)
    lines = [
        PlanLine("weights used by every token", "device", weights.trunk, "read for each token"),
        PlanLine(
            f"KV cache, {ctx_size} tokens, {config.kv_type}",
            "device",
            kv_bytes,
            "as --ctx-size"
            if config.ctx_size
            else f"the model's context, at most {DEFAULT_CTX_SIZE}; --ctx-size changes it",
        ),
        PlanLine("rotary table", "device", rope_bytes, "one entry per position"),
        PlanLine("activations", "device", scratch_bytes, "one token at a time"),
    ]
    if weights.experts:
        lines.append(PlanLine("experts", experts_in, weights.experts, reason))
    return MemoryPlan(ctx_size, config.kv_type, experts_in, tuple(lines))


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
    head_bytes = spec.n_kv_heads * spec.head_dim * (2 if config.kv_type == "f16" else 4)
    largest = (MAX_CACHE_BYTES - 1) // head_bytes
    if ctx_size > largest:
        raise UsageError(
            f"a context of {ctx_size} tokens makes the KV cache of a layer larger than 4 GiB",
            f"use --ctx-size {largest} or less",
        )
    return ctx_size


def _expert_place(
    weights: WeightBytes,
    device: DeviceInfo,
    free: int,
    available_host_bytes: int,
) -> tuple[Literal["device", "host"], str]:
    if device.is_uma and weights.experts <= free:
        return "device", "the device shares the host's memory: read in place"
    if weights.experts <= free:
        return "device", f"all fit in the {_mib(free)} that are free"
    host_heaps = [heap.size for heap in device.heaps if not heap.device_local]
    host_free = min(available_host_bytes * 70 // 100, max(host_heaps, default=available_host_bytes))
    if not device.is_uma and weights.experts <= host_free:
        return "host", f"{_mib(free)} are free on the device: read in place over the bus"
    raise OutOfMemoryError(
        f"the experts need {_mib(weights.experts)}; {_mib(free)} of {device.name}'s memory and "
        f"{_mib(host_free)} of host memory can be used",
        "close other programs, or choose a smaller model or quantisation",
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f} MiB"
