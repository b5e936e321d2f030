"""Owns what a model keeps of positions: the KV caches, and the rotary tables that fill them.

Their memory follows the longest sequence: it grows and shrinks between submits. What lies where in
a cache is the subject of kv_types.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vkmoe.closing import Closing
from vkmoe.facts import (
    ArenaLayout,
    AttentionSpec,
    DeltaNetSpec,
    DeviceInfo,
    MemoryPlan,
    Mixer,
    ModelSpec,
    RopeSpec,
)
from vkmoe.gpu.arena import Arena, lay_out_spans
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer
from vkmoe.models.kept import Kept, copied_bytes, holds_all, state_bytes
from vkmoe.models.layers.rope import rope_table
from vkmoe.models.workspace import MixerKernels

if TYPE_CHECKING:
    from vkmoe.gpu._native import Buffer, Recorder


class Span(NamedTuple):
    """Says where some bytes lie."""

    buffer: Buffer
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class KvAddresses:
    """Says where a layer has what it keeps of sequences."""

    context: int  # positions of a region
    n_regions: int  # one for each sequence, behind one another
    rope_table: int  # of at least as many positions; 0: the layer has none
    caches: tuple[int, ...]  # keys and values, the rows that are both, or what is recurrent


def cache_layouts(
    device: DeviceInfo, spec: ModelSpec, kept: Kept, n_regions: int
) -> list[tuple[ArenaLayout, int]]:
    """Lay out each rotary table, then the caches of a layer with each mixer; count those alike.

    Every table and every layer has memory of its own.
    """
    n_rows = rope_rows(spec, kept.n_positions)
    found = [([n_rows * rope_row_bytes(rope)], 1) for rope in spec.ropes]
    for mixer, n_layers in spec.n_layers_of.items():
        sizes = [n_bytes * n_regions for n_bytes in state_bytes(mixer, kept)]
        found.append((sizes, n_layers))
    return [(lay_out_spans(device, spans), n_alike) for spans, n_alike in found]


def rope_row_bytes(rope: RopeSpec) -> int:
    """Count the bytes of a position's row in a rotary table: cosine and sine of each pair, f32."""
    return rope.dim * 4


def rope_rows(spec: ModelSpec, n_positions: int) -> int:
    """Count the rows of a rotary table: drafters turn queries as those of the position behind."""
    return n_positions + (spec.drafter is not None)


def caching_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Name for each kept layer the one whose caches it sees: itself, or the last alike before it.

    Must hold: one without keys and values of its own has such a layer before it.
    """
    last: dict[Mixer, int] = {}
    found = []
    for index, layer in enumerate(spec.kept_layers):
        mixer = layer.mixer
        kind = mixer.cached if isinstance(mixer, AttentionSpec) else mixer
        if not isinstance(mixer, AttentionSpec) or mixer.own_kv:
            last[kind] = index
        found.append(last[kind])
    return tuple(found)


def growth_bytes(device: DeviceInfo, spec: ModelSpec, plan: MemoryPlan, n_positions: int) -> int:
    """Count the bytes that the caches of a plan take more once they have so many positions.

    While they grow the largest layer has two places.
    """
    if n_positions <= plan.first_positions:
        return 0
    first, grown = (
        cache_layouts(device, spec, Kept.by(plan, n), plan.n_regions)
        for n in (plan.first_positions, n_positions)
    )
    return sum(_total_and_largest(grown)) - _total_and_largest(first)[0]


def _total_and_largest(layouts: Iterable[tuple[ArenaLayout, int]]) -> tuple[int, int]:
    sizes = [(sum(layout.buffers), n_alike) for layout, n_alike in layouts]
    return sum(n_bytes * n_alike for n_bytes, n_alike in sizes), max(sizes)[0]


class KvCaches(Closing):
    """Owns the caches of every layer, cleared: a region of each for every sequence.

    Each layer has memory of its own, so that it can move to a larger or a smaller place while the
    others stay where they are.
    """

    def __init__(
        self,
        device: Device,
        spec: ModelSpec,
        kernels: Mapping[Mixer, MixerKernels],
        plan: MemoryPlan,
        longest: int,
    ) -> None:
        """Allocate the caches of each layer, keys and values or one of both, and rotary tables.

        They begin with as many positions as the plan says. Angles are those of texts of up to
        `longest` positions, which is the model's number or the user's: memory has no say in them.
        Raises OutOfMemoryError with none left allocated.
        """
        self._device, self._spec, self._plan, self._longest = device, spec, plan, longest
        self.n_regions, n_positions = plan.n_regions, plan.first_positions
        self._ropes: dict[RopeSpec, _RopeTable] = {}
        self._layers: list[_LayerCaches] = []
        self._n_positions: int | None = None  # None: caches have moved, count anew
        try:
            for rope in spec.ropes:
                self._ropes[rope] = self._rope_table(rope, n_positions)
            for layer in spec.kept_layers:
                kernel = kernels[layer.mixer].of_context(n_positions)
                self._layers.append(_LayerCaches(device, kernel, plan.n_regions))
        except BaseException:
            self.close()
            raise

    @property
    def n_positions(self) -> int:
        """Count the positions of a region that every layer has room for."""
        if self._n_positions is None:
            found = [held.n_positions for held in self._ropes.values()]
            found += [held.n_positions for held in self._layers if held.n_positions]
            self._n_positions = min(found, default=self._plan.ctx_size)
        return self._n_positions

    @property
    def addresses(self) -> tuple[KvAddresses, ...]:
        """Return where the caches of each layer are now, of those that guess behind the others."""
        return tuple(
            KvAddresses(
                self._layers[index].n_positions,
                self.n_regions,
                self._rope_of(layer),
                self._layers[index].addresses,
            )
            for layer, index in enumerate(caching_layers(self._spec))
        )

    def _rope_of(self, layer: int) -> int:
        """Return where rows of angles begin for a kept layer; 0: it needs none."""
        spec = self._spec
        mixer = spec.kept_layers[layer].mixer
        if isinstance(mixer, DeltaNetSpec):
            return 0
        is_drafting = spec.drafter is not None and layer >= spec.n_layers
        return self._ropes[mixer.rope].address + is_drafting * rope_row_bytes(mixer.rope)

    @property
    def n_bytes(self) -> int:
        """Count the bytes that are allocated."""
        ropes = sum(held.n_bytes for held in self._ropes.values())
        return ropes + sum(held.n_bytes for held in self._layers)

    def bytes_to_resize(self, n_positions: int) -> int:
        """Count the bytes that `resize` takes more, with the largest layer in two places."""
        kept = Kept.by(self._plan, n_positions)
        layouts = cache_layouts(self._device.info, self._spec, kept, self.n_regions)
        return sum(_total_and_largest(layouts)) - self.n_bytes

    def resize(self, n_positions: int, filled: Sequence[int]) -> None:
        """Move the first `filled` positions of each region to caches with so many positions.

        One layer after the other has two places for a moment. Must hold: no submit is in flight.
        Raises DeviceLostError; OutOfMemoryError, after which layers differ in their positions, and
        another call goes on where this one ended.
        """
        assert max(filled) <= n_positions, (filled, n_positions)
        grows, self._n_positions = n_positions > self.n_positions, None
        for change in (self._resize_ropes, self._resize_layers)[:: 1 if grows else -1]:
            change(n_positions, filled)

    def _resize_ropes(self, n_positions: int, _: Sequence[int]) -> None:
        for rope, held in self._ropes.items():
            if held.n_positions != n_positions:
                self._ropes[rope] = self._rope_table(rope, n_positions)
                held.close()

    def _rope_table(self, rope: RopeSpec, n_positions: int) -> _RopeTable:
        n_more = rope_rows(self._spec, n_positions) - n_positions
        return _RopeTable(self._device, rope, n_positions, n_more, self._longest)

    def _resize_layers(self, n_positions: int, filled: Sequence[int]) -> None:
        for index, held in enumerate(self._layers):
            if held.n_positions in (0, n_positions) or held.takes(n_positions):
                continue
            self._layers[index] = held.moved(n_positions, filled)
            held.close()

    def copy(self, source: int, target: int, n_positions: int) -> None:
        """Make the first positions of one region those of another. Raises DeviceLostError.

        Must hold: no submit is in flight.
        """
        with self._device.recorded("copying a part of the KV cache") as recorder:
            for held in self._layers:
                held.record_copy(recorder, held, source, target, n_positions)

    @property
    def saved_bytes(self) -> int:
        """Count the bytes of `state_spans`, at most; 0: all holds for every position."""
        return copied_bytes(self._spec, Kept.by(self._plan, self._plan.ctx_size))

    def save_state(self, region: int, position: int, target: Buffer) -> None:
        """Copy what holds for a region's last positions alone, when this is its next one.

        Raises DeviceLostError. Must hold: no submit is in flight.
        """
        end = 0
        with self._device.recorded("copying recurrent states") as recorder:
            for span in self.state_spans(region, position):
                recorder.copy(span.buffer, span.offset, target, end, span.n_bytes)
                end += span.n_bytes

    def restore_state(self, region: int, position: int, source: Buffer) -> None:
        """Copy what `save_state` copied at a position back, into any region, as that does."""
        end = 0
        with self._device.recorded("copying recurrent states") as recorder:
            for span in self.state_spans(region, position):
                recorder.copy(source, end, span.buffer, span.offset, span.n_bytes)
                end += span.n_bytes

    def state_spans(self, region: int, position: int) -> Iterator[Span]:
        """Yield where a region has what holds before a position alone."""
        for held in self._layers_with(all_rows=False):
            yield from held.state_spans(region, position)

    def row_spans(self, region: int, n_positions: int) -> Iterator[Span]:
        """Yield where a region has its first positions, in the layers that keep all of them.

        Must hold: there is room for so many.
        """
        for held in self._layers_with(all_rows=True):
            yield from held.row_spans(region, n_positions)

    def row_sizes(self, n_positions: int) -> Iterator[int]:
        """Yield the bytes of each of the `row_spans`, also of more positions than there are.

        There are as many spans of one position as of more.
        """
        for held in self._layers_with(all_rows=True):
            yield from held.row_sizes(n_positions)

    def _layers_with(self, all_rows: bool) -> Iterator[_LayerCaches]:
        """Yield the layers whose rows stay for every position, or the others."""
        kept = Kept.by(self._plan, self._plan.ctx_size)
        for held, layer in zip(self._layers, self._spec.kept_layers, strict=True):
            if holds_all(layer.mixer, kept) == all_rows:
                yield held

    def close(self) -> None:
        for held in (*self._ropes.values(), *self._layers):
            held.close()


class _RopeTable(Closing):
    """Owns a rotary table, with `n_more` rows than positions. Raises OutOfMemoryError,
    DeviceLostError."""

    def __init__(
        self, device: Device, rope: RopeSpec, n_positions: int, n_more: int, most: int
    ) -> None:
        table = rope_table(rope, n_positions + n_more, most).view(np.uint8).reshape(-1)
        self.n_positions = n_positions
        layout = lay_out_spans(device.info, [table.size])
        self._arena = Arena(device, "device", "KV cache", layout)
        with ExitStack() as failing:
            failing.callback(self.close)
            place = self._arena.place(table.size)
            with Transfer(device) as transfer:
                transfer.write(place.buffer, place.offset, table)
                transfer.flush()
            failing.pop_all()
        self.address, self.n_bytes = place.address, self._arena.n_bytes

    def close(self) -> None:
        self._arena.close()


class _LayerCaches(Closing):
    """Owns the caches of one layer, cleared. Raises OutOfMemoryError, DeviceLostError."""

    def __init__(self, device: Device, layer: MixerKernels, n_regions: int) -> None:
        self._device, self.kernels = device, layer
        self.n_positions = layer.n_positions
        sizes = [n_bytes * n_regions for n_bytes in layer.state_bytes]
        layout = lay_out_spans(device.info, sizes)
        self._arena = Arena(device, "device", "KV cache", layout)
        with ExitStack() as failing:
            failing.callback(self.close)
            self._places = [self._arena.place(n_bytes) for n_bytes in sizes]
            with device.recorded("clearing the KV cache") as recorder:
                for place, n_bytes in zip(self._places, sizes, strict=True):
                    recorder.fill(place.buffer, place.offset, n_bytes, 0)
            failing.pop_all()
        self.addresses = tuple(place.address for place in self._places)
        self.n_bytes = self._arena.n_bytes

    def moved(self, n_positions: int, filled: Sequence[int]) -> _LayerCaches:
        """Make caches with so many positions that hold the first `filled` of each region."""
        other = _LayerCaches(self._device, self.kernels.of_context(n_positions), len(filled))
        with ExitStack() as failing:
            failing.callback(other.close)
            with self._device.recorded("moving the KV cache") as recorder:
                for region, n_filled in enumerate(filled):
                    other.record_copy(recorder, self, region, region, n_filled)
            failing.pop_all()
        return other

    def takes(self, n_positions: int) -> bool:
        """Return whether there is room for so many positions as it is; then have it. Mutates."""
        kernels = self.kernels.of_context(n_positions)
        if kernels.state_bytes != self.kernels.state_bytes:
            return False
        self.kernels, self.n_positions = kernels, n_positions
        return True

    def state_spans(self, region: int, position: int) -> Iterator[Span]:
        """Yield the parts of a region that hold before a position alone."""
        for cache in range(len(self._places)):
            yield from self._spans(cache, region, self.kernels.last_pieces(cache, position))

    def row_spans(self, region: int, n_positions: int) -> Iterator[Span]:
        """Yield the parts of a region that hold its first positions."""
        for cache in range(len(self._places)):
            yield from self._spans(cache, region, self.kernels.pieces(cache, n_positions))

    def row_sizes(self, n_positions: int) -> Iterator[int]:
        """Yield the bytes of each of the `row_spans` of so many positions."""
        kernels = self.kernels.of_context(n_positions)
        for cache in range(len(self._places)):
            yield from (n_bytes for _, n_bytes in kernels.pieces(cache, n_positions))

    def _spans(self, cache: int, region: int, pieces: Iterable[tuple[int, int]]) -> Iterator[Span]:
        place, begin = self._places[cache], region * self.kernels.state_bytes[cache]
        for first, n_bytes in pieces:
            yield Span(place.buffer, place.offset + begin + first, n_bytes)

    def record_copy(
        self, recorder: Recorder, held: _LayerCaches, source: int, target: int, n_positions: int
    ) -> None:
        """Record that the first positions of a region become those of `source` in other caches."""
        for cache, (ours, theirs) in enumerate(zip(self._places, held._places, strict=True)):
            before = theirs.offset + held.kernels.state_bytes[cache] * source
            after = ours.offset + self.kernels.state_bytes[cache] * target
            of_both = (kept.kernels.pieces(cache, n_positions) for kept in (held, self))
            for (first, n_bytes), (there, _) in zip(*of_both, strict=True):
                recorder.copy(theirs.buffer, before + first, ours.buffer, after + there, n_bytes)

    def close(self) -> None:
        self._arena.close()
