"""Knows how many rows each region of the KV caches has, and at which positions it can stop.

It takes regions back, and copies the beginning of one to another region, to host memory or to a
file and back. The bits of rows and states stay those that were computed. Which tokens the rows are
of is the scheduler's subject (generate/regions/regions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TextForm
from vkmoe.closing import Closing
from vkmoe.execute.state_copies import COPIED_EVERY, StateCopies
from vkmoe.facts import MemoryPlan, ModelSpec
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.models.kept import Kept, oldest_start
from vkmoe.models.kv_caches import KvCaches, Span

if TYPE_CHECKING:
    from vkmoe.gpu._native import Buffer

Bytes = NDArray[np.uint8]
FILE_BLOCK = 8 << 20  # bytes that go to or from a file at a time


class Piece(NamedTuple):
    """Says where bytes of a text lie on the device, from its byte `begin` on."""

    begin: int
    span: Span


class RegionRows(Closing):
    """Owns the ends of regions, and the copies of states with which they go back."""

    def __init__(self, device: Device, spec: ModelSpec, caches: KvCaches, plan: MemoryPlan) -> None:
        self._device, self._spec, self._caches = device, spec, caches
        self._kept = Kept.by(plan, plan.ctx_size)
        self.ends = [0] * plan.n_regions  # positions of each region that are filled
        # The first position to which each can go back without copies.
        self._oldest = [0] * plan.n_regions
        self._copies = StateCopies(device, caches, plan.n_state_copies)

    def close(self) -> None:
        """Free the copies of states."""
        self._copies.close()

    def append(self, region: int, last: int) -> None:
        """Note that rows up to the position `last` are about to run, whatever becomes of that."""
        self.ends[region] = last + 1
        oldest = oldest_start(self._spec, self._kept, last)
        self._oldest[region] = max(self._oldest[region], oldest)

    def copy_states(self, spans: Iterable[tuple[int, int, int]], wants: dict[int, bool]) -> None:
        """Copy the state before the last row of a prompt, and now and then one within a prompt.

        `spans` are the regions that ran with their first and last positions, `wants` says for which
        the last row wants logits. Nothing is copied where texts can go back without.
        """
        if not self._copies.n_most:
            return
        for region, first, last in spans:
            end = last if wants[region] else last + 1
            is_due = wants[region] or end - self._copies.last(region, end) >= COPIED_EVERY
            if is_due and max(self._oldest[region], first, 1) <= end:
                self._copies.take(region, end)

    def go_back(self, region: int, position: int) -> int:
        """Have a region stop at a position, or before it; return where. Mutates."""
        position = min(position, self.ends[region])
        if position < self._oldest[region]:
            position = self._copies.last(region, position)
            if position:
                self._copies.restore(region, position, region)
            self._oldest[region] = position
        self._copies.forget(region, position)
        self.ends[region] = position
        return position

    def copy(self, source: int, target: int, n_positions: int, n_least: int) -> int:
        """Make the first positions of one region those of another. Mutates.

        Returns how many: fewer where the state cannot stop there. Nothing is copied, and 0
        returned, if they are fewer than `n_least`. Must hold: no submit is in flight.
        """
        whole = self._oldest[source] <= n_positions
        if not whole:
            n_positions = self._copies.last(source, n_positions)
        if n_positions < n_least:
            return 0
        self._caches.copy(source, target, n_positions)
        self._copies.forget(target, 0)
        if not whole and n_positions:
            self._copies.restore(source, n_positions, target)
        self._oldest[target] = self._oldest[source] if whole else n_positions
        self.ends[target] = n_positions
        return n_positions

    # ----- texts as bytes -----

    def form(self, region: int, n_positions: int, most_stops: int | None = None) -> TextForm:
        """Say what the first positions of a region are as bytes, with the last `most_stops` states.

        They are fewer where the state cannot stop just there, perhaps none.
        """
        if not self._caches.saved_bytes:
            return TextForm(n_positions)
        stops = {position for position in self._copies.of(region) if position <= n_positions}
        if n_positions > 0 and self._oldest[region] <= n_positions:
            stops.add(n_positions)
        found = sorted(stops)[-(most_stops or len(stops)) :]
        return TextForm(max(stops, default=0), tuple(found))

    def is_sound(self, form: TextForm) -> bool:
        """Say whether a text of the model may have a form."""
        if not self._caches.saved_bytes:
            return not form.stops
        rising = all(before < stop for before, stop in pairwise((0, *form.stops)))
        return bool(form.stops) and rising and form.stops[-1] == form.n_positions

    def n_bytes(self, form: TextForm) -> int:
        """Count the bytes of a text in a form."""
        return self._begins(form)[-1]

    def pieces(self, region: int, form: TextForm) -> list[Piece]:
        """List where a region's text lies now, in the order of its bytes."""
        copies, begins = self._copies.of(region), iter(self._begins(form)[:-1])
        found = list(map(Piece, begins, self._caches.row_spans(region, form.n_positions)))
        for stop, (begin, end) in zip(form.stops, self._states(form), strict=True):
            if stop in copies:
                found.append(Piece(begin, Span(copies[stop], 0, end - begin)))
            else:
                found += self._live(region, stop, begin)
        return found

    def places(self, region: int, form: TextForm, n_positions: int) -> list[Piece]:
        """Empty a region for the first positions of a text; list where its bytes are to be put.

        They come in their order. Must hold: the text can stop there, and there is room for so many
        positions. `landed` is to follow.
        """
        self._copies.forget(region, 0)
        self.ends[region] = self._oldest[region] = 0
        spans = self._caches.row_spans(region, n_positions)
        found = list(map(Piece, self._begins(form), spans))
        states = {
            stop: begin_end
            for stop, begin_end in zip(form.stops, self._states(form), strict=True)
            if stop <= n_positions
        }
        for stop in list(states)[-self._copies.n_most :]:
            self._copies.put(region, stop)
        for stop, buffer in sorted(self._copies.of(region).items()):
            begin, end = states[stop]
            found.append(Piece(begin, Span(buffer, 0, end - begin)))
        if states:
            found += self._live(region, n_positions, states[n_positions][0])
        return found

    def landed(self, region: int, form: TextForm, n_positions: int) -> None:
        """Note that a region has the first positions of a text. Mutates."""
        self.ends[region] = n_positions
        self._oldest[region] = n_positions if form.stops else 0

    def write(self, region: int, form: TextForm, write: Callable[[Bytes], object]) -> None:
        """Pass the bytes of a region's text to `write`, a block at a time.

        Raises GpuErrors. Must hold: no submit is in flight.
        """
        pieces, n_bytes = self.pieces(region, form), self.n_bytes(form)
        with _Staging(self._device, n_bytes) as staging:
            for size, parts in blocks_of(pieces, n_bytes, FILE_BLOCK):
                with self._device.recorded("copying rows out of the KV cache") as recorder:
                    for offset, (buffer, first, n) in parts:
                        recorder.copy(buffer, first, staging.buffer, offset, n)
                with translate_errors("reading rows of the KV cache"):
                    staging.buffer.invalidate(0, size)
                write(staging.view[:size])

    def read(self, region: int, form: TextForm, read: Callable[[Bytes], object]) -> None:
        """Fill a region with a text, whose bytes `read` puts into a block at a time. Mutates.

        Where `read` raises, the region is left empty. Raises GpuErrors. Must hold: no submit is in
        flight, and there is room for so many positions.
        """
        pieces, n_bytes = self.places(region, form, form.n_positions), self.n_bytes(form)
        with _Staging(self._device, n_bytes) as staging:
            try:
                for size, parts in blocks_of(pieces, n_bytes, FILE_BLOCK):
                    read(staging.view[:size])
                    with self._device.recorded("copying rows into the KV cache") as recorder:
                        staging.buffer.flush(0, size)
                        for offset, (buffer, first, n) in parts:
                            recorder.copy(staging.buffer, offset, buffer, first, n)
            except BaseException:
                self._copies.forget(region, 0)
                raise
        self.landed(region, form, form.n_positions)

    def _begins(self, form: TextForm) -> list[int]:
        """List where each part of a text begins, and where the last one ends."""
        sizes = [*self._caches.row_sizes(form.n_positions)] if form.n_positions else []
        states = [self._state_bytes(stop) for stop in form.stops]
        return [0, *accumulate([*sizes, *states])]

    def _states(self, form: TextForm) -> list[tuple[int, int]]:
        """List the first byte of each state of a text, and the one behind its last."""
        ends = self._begins(form)[-1 - len(form.stops) :]
        return list(pairwise(ends))

    def _state_bytes(self, position: int) -> int:
        return sum(span.n_bytes for span in self._caches.state_spans(0, position))

    def _live(self, region: int, position: int, begin: int) -> list[Piece]:
        """List where a region has the state with which it stops at a position."""
        spans = list(self._caches.state_spans(region, position))
        begins = accumulate((span.n_bytes for span in spans[:-1]), initial=begin)
        return list(map(Piece, begins, spans))


class _Staging(Closing):
    """Owns a block of host memory on the way to or from a file."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self.buffer: Buffer = device.allocate("readback", min(FILE_BLOCK, n_bytes) or 1, "staging")
        self.view = self.buffer.view()

    def close(self) -> None:
        del self.view
        self.buffer.close()


def blocks_of(
    pieces: Sequence[Piece], n_bytes: int, block_bytes: int
) -> Iterator[tuple[int, list[tuple[int, Span]]]]:
    """Cut pieces at the borders of blocks; yield each block's bytes and its parts by offset."""
    found: dict[int, list[tuple[int, Span]]] = {}
    for begin, span in _cut(pieces, block_bytes):
        found.setdefault(begin // block_bytes, []).append((begin % block_bytes, span))
    for index in range(-(-n_bytes // block_bytes)):
        yield min(block_bytes, n_bytes - index * block_bytes), found.get(index, [])


def _cut(pieces: Iterable[Piece], block_bytes: int) -> Iterator[Piece]:
    for begin, (buffer, offset, n_bytes) in pieces:
        while n_bytes:
            n = min(n_bytes, block_bytes - begin % block_bytes)
            yield Piece(begin, Span(buffer, offset, n))
            begin, offset, n_bytes = begin + n, offset + n, n_bytes - n
