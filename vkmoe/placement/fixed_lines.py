"""The plan's lines for all that a model needs whatever is decided about its experts.

One line for each allocation of the engine, or for several of a kind, as bytes of a heap: a guard
compares the plan with what the device counts. Who allocates: engine.py, placement/loader.py,
models/kv_cache.py, experts/store/table.py, gpu/token_io.py, gpu/transfer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vkmoe.facts import DeviceInfo, ModelSpec, PlanLine, WeightBytes
from vkmoe.gpu.arena import round_up
from vkmoe.gpu.memory_types import Intent
from vkmoe.placement.allocations import (
    allocated,
    arena_bytes,
    heap_of,
    is_mapped,
    tensor_heap,
)
from vkmoe.placement.conversions import CONVERTING_BYTES, growth_words

__all__ = ["Scratch", "fixed_lines", "kv_bytes", "table_bytes"]

N_TABLES = 2  # versions of the expert table in memory: one is read, the next is written
N_LANES, LANE_BYTES = 2, 16 << 20  # of staging, as gpu/transfer.py has them


@dataclass(frozen=True)
class Scratch:
    """Bytes of the small buffers of a token."""

    tensors: tuple[int, ...]  # of the workspace, each an allocation of its own
    params: int
    results: int  # routing log and candidates, read back after each token


def kv_bytes(spec: ModelSpec, ctx_size: int, kv_type: str) -> int:
    """Bytes of one of the caches of a layer."""
    return ctx_size * spec.cache_row * (2 if kv_type == "f16" else 4)


def table_bytes(spec: ModelSpec, weights: WeightBytes) -> int:
    """Bytes of one version of the expert table, with its places to land in; a dense model has one
    entry.
    """
    per_layer = spec.experts.n_experts + spec.experts.n_used if spec.experts else 1
    return 8 * max(1, len(weights.spans)) * per_layer


def fixed_lines(
    spec: ModelSpec,
    device: DeviceInfo,
    weights: WeightBytes,
    scratch: Scratch,
    kv: tuple[int, Literal["f16", "f32"], str],
) -> list[PlanLine]:
    """All lines but the experts'. `kv` is the context, its number format and why that context."""
    return list(_Lines(spec, device, weights, scratch).all(*kv))


class _Lines:
    """Lines of one model on one device."""

    def __init__(
        self, spec: ModelSpec, device: DeviceInfo, weights: WeightBytes, scratch: Scratch
    ) -> None:
        self._spec, self._device = spec, device
        self._weights, self._scratch = weights, scratch

    def all(self, ctx_size: int, kv_type: str, reason: str) -> Iterator[PlanLine]:
        spec, scratch = self._spec, self._scratch
        rope_bytes = round_up(ctx_size * spec.rope.dim * 4)
        table = table_bytes(spec, self._weights)
        yield self._line(
            "weights used by every token", "device", self._trunk(rope_bytes), "read for each token"
        )
        yield self._line(
            f"KV cache, {ctx_size} tokens, {kv_type}",
            "device",
            self._kv(kv_bytes(spec, ctx_size, kv_type)),
            reason,
        )
        yield self._line("rotary table", "device", rope_bytes, "one entry per position")
        # One more: the placeholder of kernels without tensors.
        tensors = sum(allocated(n_bytes) for n_bytes in (*scratch.tensors, 4))
        heap = tensor_heap(self._device)
        yield PlanLine("activations", "device", tensors, "one token at a time", heap)
        yield self._line("expert table", "bar", allocated(N_TABLES * table), "two versions")
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
        """The arena of the trunk and the rotary table, without the table."""
        weights = self._weights
        pieces = (*weights.pieces, rope_bytes) if weights.pieces else (weights.trunk + rope_bytes,)
        return arena_bytes(self._device, pieces, weights.trunk + rope_bytes) - rope_bytes

    def _kv(self, n_bytes: int) -> int:
        n_caches = self._spec.n_caches * self._spec.n_layers
        return arena_bytes(self._device, [n_bytes] * n_caches, n_caches * n_bytes)

    def _staging(self, table: int) -> int:
        """The loader's lanes, and those of the table's writes."""
        lanes = [] if is_mapped(self._device, "device") else [LANE_BYTES] * N_LANES
        lanes += [] if is_mapped(self._device, "bar") else [table] * N_LANES
        return sum(allocated(n_bytes) for n_bytes in lanes)

    def _line(self, item: str, intent: Intent, n_bytes: int, reason: str) -> PlanLine:
        place: Literal["device", "host"] = "device" if intent in ("device", "bar") else "host"
        return PlanLine(item, place, n_bytes, reason, heap_of(self._device, intent))
