"""Owns what a model keeps of positions: the KV caches, and the rotary tables that fill them.

Their memory follows the longest sequence: it grows and shrinks between submits. What lies where in
a cache is the subject of kv_types.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vkmoe.closing import Closing
from vkmoe.facts import ArenaLayout, DeviceInfo, MemoryPlan, Mixer, ModelSpec, RopeSpec
from vkmoe.gpu.arena import Arena, lay_out_spans
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.gpu.transfer import Transfer
from vkmoe.kv_types import KvTypes
from vkmoe.models.rope import rope_table
from vkmoe.models.workspace import AttentionKernels

if TYPE_CHECKING:
    from vkmoe.gpu._native import Recorder


@dataclass(frozen=True)
class KvAddresses:
    """Says where the K and V caches of a layer are; if latent, the compressed rows alone."""

    context: int  # positions of a region
    n_regions: int  # one for each sequence, behind one another
    rope_table: int  # of at least as many positions
    keys: int
    values: int = 0


def cache_layouts(
    device: DeviceInfo, spec: ModelSpec, n_positions: int, types: KvTypes, n_regions: int
) -> list[ArenaLayout]:
    """Lay out the rotary tables, then the caches of each layer: each has memory of its own."""
    ropes = [[n_positions * rope.dim * 4] for rope in spec.ropes]
    layers = [
        [n_bytes * n_regions for n_bytes in layer.mixer.state_bytes(n_positions, types)]
        for layer in spec.layers
    ]
    return [lay_out_spans(device, spans) for spans in (*ropes, *layers)]


def growth_bytes(device: DeviceInfo, spec: ModelSpec, plan: MemoryPlan, n_positions: int) -> int:
    """Count the bytes that the caches of a plan take more once they have so many positions.

    While they grow the largest layer has two places.
    """
    if n_positions <= plan.first_positions:
        return 0
    types, n_regions = plan.kv_types, plan.n_regions
    first, grown = (
        [sum(layout.buffers) for layout in cache_layouts(device, spec, n, types, n_regions)]
        for n in (plan.first_positions, n_positions)
    )
    return sum(grown) + max(grown) - sum(first)


class KvCaches(Closing):
    """Owns the caches of every layer, cleared: a region of each for every sequence.

    Each layer has memory of its own, so that it can move to a larger or a smaller place while the
    others stay where they are.
    """

    def __init__(
        self,
        device: Device,
        spec: ModelSpec,
        kernels: Mapping[Mixer, AttentionKernels],
        plan: MemoryPlan,
        longest: int,
    ) -> None:
        """Allocate the caches of each layer, keys and values or one of both, and rotary tables.

        They begin with as many positions as the plan says. Angles are those of texts of up to
        `longest` positions, which is the model's number or the user's: memory has no say in them.
        Raises OutOfMemoryError with none left allocated.
        """
        self._device, self._spec, self._types = device, spec, plan.kv_types
        self._longest, self.n_regions = longest, plan.n_regions
        n_positions = plan.first_positions
        self._ropes: dict[RopeSpec, _RopeTable] = {}
        self._layers: list[_LayerCaches] = []
        try:
            for rope in spec.ropes:
                self._ropes[rope] = _RopeTable(device, rope, n_positions, self._longest)
            for layer in spec.layers:
                kernel = kernels[layer.mixer].of_context(n_positions)
                self._layers.append(_LayerCaches(device, kernel, plan.n_regions))
        except BaseException:
            self.close()
            raise

    @property
    def n_positions(self) -> int:
        """Count the positions of a region that every layer has room for."""
        ropes = (held.n_positions for held in self._ropes.values())
        return min(*ropes, *(held.n_positions for held in self._layers))

    @property
    def addresses(self) -> tuple[KvAddresses, ...]:
        """Return where the caches of each layer are now."""
        layers = zip(self._layers, self._spec.layers, strict=True)
        return tuple(
            KvAddresses(
                held.n_positions,
                self.n_regions,
                self._ropes[layer.mixer.rope].address,
                *held.addresses,
            )
            for held, layer in layers
        )

    @property
    def n_bytes(self) -> int:
        """Count the bytes that are allocated."""
        ropes = sum(held.n_bytes for held in self._ropes.values())
        return ropes + sum(held.n_bytes for held in self._layers)

    def bytes_to_resize(self, n_positions: int) -> int:
        """Count the bytes that `resize` takes more, with the largest layer in two places."""
        types, n_regions = self._types, self.n_regions
        layouts = cache_layouts(self._device.info, self._spec, n_positions, types, n_regions)
        sizes = [sum(layout.buffers) for layout in layouts]
        return sum(sizes) + max(sizes) - self.n_bytes

    def resize(self, n_positions: int, filled: Sequence[int]) -> None:
        """Move the first `filled` positions of each region to caches with so many positions.

        One layer after the other has two places for a moment. Must hold: no submit is in flight.
        Raises DeviceLostError; OutOfMemoryError, after which layers differ in their positions, and
        another call goes on where this one ended.
        """
        assert max(filled) <= n_positions, (filled, n_positions)
        grows = n_positions > self.n_positions
        for change in (self._resize_ropes, self._resize_layers)[:: 1 if grows else -1]:
            change(n_positions, filled)

    def _resize_ropes(self, n_positions: int, _: Sequence[int]) -> None:
        for rope, held in self._ropes.items():
            if held.n_positions != n_positions:
                self._ropes[rope] = _RopeTable(self._device, rope, n_positions, self._longest)
                held.close()

    def _resize_layers(self, n_positions: int, filled: Sequence[int]) -> None:
        for index, held in enumerate(self._layers):
            if held.n_positions != n_positions:
                self._layers[index] = held.moved(n_positions, filled)
                held.close()

    def copy(self, source: int, target: int, n_positions: int) -> None:
        """Make the first positions of one region those of another. Raises DeviceLostError.

        Must hold: no submit is in flight.
        """
        with translate_errors("copying a part of the KV cache"):
            recorder = self._device.native.recorder()
            for held in self._layers:
                held.record_copy(recorder, held, source, target, n_positions)
            self._device.native.submit(recorder.finish()).wait()

    def close(self) -> None:
        for held in (*self._ropes.values(), *self._layers):
            held.close()


class _RopeTable(Closing):
    """Owns a rotary table. Raises OutOfMemoryError, DeviceLostError."""

    def __init__(self, device: Device, rope: RopeSpec, n_positions: int, most: int) -> None:
        table = rope_table(rope, n_positions, most).view(np.uint8).reshape(-1)
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

    def __init__(self, device: Device, layer: AttentionKernels, n_regions: int) -> None:
        self._device, self._layer = device, layer
        self.n_positions = layer.shape.context
        sizes = [n_bytes * n_regions for n_bytes in layer.state_bytes]
        layout = lay_out_spans(device.info, sizes)
        self._arena = Arena(device, "device", "KV cache", layout)
        with ExitStack() as failing, translate_errors("clearing the KV cache"):
            failing.callback(self.close)
            self._places = [self._arena.place(n_bytes) for n_bytes in sizes]
            recorder = device.native.recorder()
            for place, n_bytes in zip(self._places, sizes, strict=True):
                recorder.fill(place.buffer, place.offset, n_bytes, 0)
            device.native.submit(recorder.finish()).wait()
            failing.pop_all()
        self.addresses = [place.address for place in self._places]
        self.n_bytes = self._arena.n_bytes

    def moved(self, n_positions: int, filled: Sequence[int]) -> _LayerCaches:
        """Make caches with so many positions that hold the first `filled` of each region."""
        other = _LayerCaches(self._device, self._layer.of_context(n_positions), len(filled))
        with ExitStack() as failing, translate_errors("moving the KV cache"):
            failing.callback(other.close)
            recorder = self._device.native.recorder()
            for region, n_filled in enumerate(filled):
                other.record_copy(recorder, self, region, region, n_filled)
            self._device.native.submit(recorder.finish()).wait()
            failing.pop_all()
        return other

    def record_copy(
        self, recorder: Recorder, held: _LayerCaches, source: int, target: int, n_positions: int
    ) -> None:
        """Record that the first positions of a region become those of `source` in other caches."""
        for cache, (ours, theirs) in enumerate(zip(self._places, held._places, strict=True)):
            before = theirs.offset + held._layer.state_bytes[cache] * source
            after = ours.offset + self._layer.state_bytes[cache] * target
            strips = zip(held._layer.strips(cache), self._layer.strips(cache), strict=True)
            for (first, position_bytes), (there, _) in strips if n_positions else ():
                n_bytes = position_bytes * n_positions
                recorder.copy(theirs.buffer, before + first, ours.buffer, after + there, n_bytes)

    def close(self) -> None:
        self._arena.close()
