"""Places many spans into few large allocations, within the device's allocation caps.

`lay_out_spans` decides how: a pure function, so that a plan can be made without a device. An Arena
owns the buffers of such a layout. A span is never moved; it is freed with its chunk or the arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import ArenaLayout, DeviceInfo, SpanRun
from vkmoe.gpu.device import Device, Intent

if TYPE_CHECKING:
    from vkmoe.gpu import _native

ALIGNMENT = 256  # of every span: whole cache lines on all devices
PREFERRED_CHUNK = 1 << 30  # some drivers claim more than they can give in one piece
SLOT_CHUNK = 256 << 20  # so much is given back at once where other programs need memory


class Placement(NamedTuple):
    """Says where a span lies."""

    buffer: _native.Buffer
    offset: int
    address: int

    def in_chunk(self, chunk: _native.Buffer) -> Placement:
        """Return the same place in another chunk of an arena that was laid out alike."""
        behind_first = self.offset - _first_offset(self.address - self.offset)
        offset = behind_first + _first_offset(chunk.address)
        return Placement(chunk, offset, chunk.address + offset)


def _first_offset(address: int) -> int:
    """Return where the first span of a chunk at an address begins."""
    return -address % ALIGNMENT


def round_up(n_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up to whole multiples of `alignment`."""
    return -(-n_bytes // alignment) * alignment


def chunk_cap(device: DeviceInfo) -> int:
    """Find the largest span this device can hold: an allocation, less the room for aligning it."""
    limits = device.limits
    largest = min(limits.max_memory_allocation_size, limits.max_buffer_size)
    return largest // ALIGNMENT * ALIGNMENT - ALIGNMENT


def lay_out_slots(device: DeviceInfo, slot_bytes: int, n_slots: int) -> ArenaLayout:
    """Lay out slots of a size, in chunks that are small enough to be freed one by one."""
    return lay_out_alike(device, [(slot_bytes, n_slots)] if n_slots else [], SLOT_CHUNK)


def slot_chunks(device: DeviceInfo, slot_bytes: int, n_slots: int) -> tuple[tuple[int, int], ...]:
    """Count the chunks in which `lay_out_slots` lays slots out: the bytes of each, and how many."""
    span_bytes = round_up(slot_bytes)
    n_whole = max(1, min(SLOT_CHUNK, chunk_cap(device)) // max(span_bytes, 1))
    full, rest = divmod(n_slots, n_whole)
    chunks = ((n_whole * span_bytes + ALIGNMENT, full), (rest * span_bytes + ALIGNMENT, rest > 0))
    return tuple((n_bytes, int(n)) for n_bytes, n in chunks if n)


def lay_out_spans(device: DeviceInfo, spans: Iterable[int]) -> ArenaLayout:
    """Lay out spans of these bytes, one behind the other, as `lay_out_alike` does."""
    return lay_out_alike(
        device, [(n_bytes, sum(1 for _ in same)) for n_bytes, same in groupby(spans)]
    )


def lay_out_alike(
    device: DeviceInfo, spans: Iterable[tuple[int, int]], chunk_bytes: int = PREFERRED_CHUNK
) -> ArenaLayout:
    """Lay out spans, given as bytes and how many follow each other, in chunks that the device can
    allocate.

    Each is rounded up to ALIGNMENT, and so is each chunk's first address, for which a chunk has
    room to spare: where spans lie does not depend on a driver. A span that is larger than a chunk
    can be has one of its own, which an Arena refuses.
    """
    alike = [(round_up(n_bytes), n_spans) for n_bytes, n_spans in spans]
    cap, left = min(chunk_bytes, chunk_cap(device)), sum(size * n for size, n in alike)
    chunks: list[int] = []
    runs: list[SpanRun] = []
    used = room = 0
    for span_bytes, n_left in alike:
        while n_left:
            if not chunks or span_bytes > room - used:
                # Whole spans like this one, the usual case: a tail that none fits in would be lost.
                whole = cap // max(span_bytes, 1) * span_bytes
                used, room = 0, max(span_bytes, min(left, whole))
                chunks.append(room + ALIGNMENT)
            n_spans = min(n_left, (room - used) // span_bytes) if span_bytes else n_left
            runs.append(SpanRun(len(chunks) - 1, used, span_bytes, n_spans))
            n_left -= n_spans
            used += n_spans * span_bytes
            left -= n_spans * span_bytes
    return ArenaLayout(tuple(chunks), tuple(runs))


class Arena:
    """Allocates the chunks of a layout, all or none, and hands out its spans in their order."""

    def __init__(self, device: Device, intent: Intent, name: str, layout: ArenaLayout) -> None:
        self._device, self._intent, self._name = device, intent, name
        self._chunks: list[_native.Buffer] = []
        cap = chunk_cap(device.info)
        if max(layout.buffers, default=0) - ALIGNMENT > cap:
            largest = max(run.span_bytes for run in layout.runs)
            raise OutOfMemoryError(
                f"{name} needs {largest / 2**20:.0f} MiB in one piece, "
                f"{device.info.name} allocates at most {cap / 2**20:.0f} MiB",
                "choose another device with --device, or a smaller model",
            )
        try:
            for n_bytes in layout.buffers:
                self._chunks.append(device.allocate(intent, n_bytes, name))
        except BaseException:
            self.close()
            raise
        self._spans = self._placements(layout)

    @property
    def n_bytes(self) -> int:
        """Count the bytes allocated."""
        return sum(chunk.size for chunk in self._chunks)

    @property
    def chunks(self) -> tuple[_native.Buffer, ...]:
        """Return the allocations, oldest first."""
        return tuple(self._chunks)

    def free_last(self) -> None:
        """Free the last chunk. Must hold: nothing reads or writes its spans, none is handed out."""
        self._chunks.pop().close()

    def allocate_last(self, n_bytes: int) -> _native.Buffer:
        """Allocate a chunk like one that `free_last` freed. Raises OutOfMemoryError."""
        self._chunks.append(self._device.allocate(self._intent, n_bytes, self._name))
        return self._chunks[-1]

    def place(self, n_bytes: int) -> Placement:
        """Hand out the next span, which must have been laid out as one of these bytes."""
        span_bytes, place = next(self._spans)
        assert span_bytes == round_up(n_bytes), (self._name, span_bytes, n_bytes)
        return place

    def close(self) -> None:
        """Free all spans. May be called twice."""
        for chunk in self._chunks:
            chunk.close()
        self._chunks.clear()

    def _placements(self, layout: ArenaLayout) -> Iterator[tuple[int, Placement]]:
        for run in layout.runs:
            chunk = self._chunks[run.chunk]
            first = _first_offset(chunk.address) + run.offset
            for index in range(run.n_spans):
                offset = first + index * run.span_bytes
                yield run.span_bytes, Placement(chunk, offset, chunk.address + offset)
