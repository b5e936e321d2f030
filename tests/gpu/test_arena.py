"""Arenas: chunks within the device's caps, aligned spans that never overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.gpu.invented import DISCRETE_12
from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import ArenaLayout, SpanRun
from vkmoe.gpu import _native as native
from vkmoe.gpu.arena import ALIGNMENT, Arena, Placement, chunk_cap, lay_out_spans, round_up
from vkmoe.gpu.device import Device

CAP = 64 << 10


@pytest.fixture
def capped(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device, as if it allocated at most CAP bytes at once; nothing larger is asked of it."""
    limits = replace(device.info.limits, max_memory_allocation_size=CAP, max_buffer_size=4 * CAP)
    monkeypatch.setattr(device, "info", replace(device.info, limits=limits))
    allocate = Device.allocate

    def checked(self: Device, intent: object, n_bytes: int, name: str) -> native.Buffer:
        assert n_bytes <= CAP, f"{n_bytes} bytes asked of a device that allocates {CAP}"
        return allocate(self, intent, n_bytes, name)  # type: ignore[arg-type]

    monkeypatch.setattr(Device, "allocate", checked)
    yield device


def arena_of(device: Device, sizes: list[int]) -> Arena:
    return Arena(device, "device", "experts", lay_out_spans(device.info, sizes))


def check_spans(spans: list[Placement], sizes: list[int]) -> None:
    """Aligned, inside their buffer, disjoint, and addressed as their place says."""
    taken: list[tuple[int, int]] = []
    for span, size in zip(spans, sizes, strict=True):
        assert span.address == span.buffer.address + span.offset
        assert span.address % ALIGNMENT == 0
        assert span.offset + size <= span.buffer.size
        taken.append((span.address, span.address + size))
    ordered = sorted(taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


def test_one_chunk_holds_what_was_expected(device: Device) -> None:
    sizes = [1, 255, 256, 257, 4096, 100_000]
    arena = arena_of(device, sizes)
    check_spans([arena.place(size) for size in sizes], sizes)
    assert len(arena.chunks) == 1
    assert arena.n_bytes <= sum(round_up(size) for size in sizes) + ALIGNMENT
    arena.close()


def test_spans_are_handed_out_as_they_were_laid_out(device: Device) -> None:
    """Another order or another size is our own error."""
    arena = arena_of(device, [5000, 300])
    with pytest.raises(AssertionError):
        arena.place(300)
    arena.close()


def test_a_layout_is_of_whole_spans_in_their_order() -> None:
    limits = replace(DISCRETE_12.limits, max_memory_allocation_size=1024, max_buffer_size=1024)
    layout = lay_out_spans(replace(DISCRETE_12, limits=limits), [256] * 4 + [512, 768, 0])
    assert layout == ArenaLayout(
        (768 + ALIGNMENT,) * 3,
        (SpanRun(0, 0, 256, 3), SpanRun(1, 0, 256, 1), SpanRun(1, 256, 512, 1),
         SpanRun(2, 0, 768, 1), SpanRun(2, 768, 0, 1)),
    )  # fmt: skip
    assert lay_out_spans(DISCRETE_12, []) == ArenaLayout()


def test_chunks_keep_to_the_cap(capped: Device) -> None:
    """Many spans, in random order of size, in many chunks, none of them too large."""
    sizes = [int(n) for n in np.random.default_rng(1).integers(1, CAP // 3, 60)]
    arena = arena_of(capped, sizes)
    spans = [arena.place(size) for size in sizes]
    check_spans(spans, sizes)
    assert len({span.buffer.address for span in spans}) > sum(sizes) // CAP
    assert arena.n_bytes < 2 * sum(sizes)
    arena.close()


@pytest.mark.parametrize("span_bytes", [5_000, 20_000, CAP * 5 // 8])
def test_equal_spans_leave_no_tails(capped: Device, span_bytes: int) -> None:
    """The planner counts spans; a chunk that ends in the middle of one would need more."""
    n_spans = 20
    arena = arena_of(capped, [span_bytes] * n_spans)
    spans = [arena.place(span_bytes) for _ in range(n_spans)]
    check_spans(spans, [span_bytes] * n_spans)
    n_chunks = len({id(span.buffer) for span in spans})
    assert n_chunks > 1
    assert arena.n_bytes <= n_spans * round_up(span_bytes) + n_chunks * ALIGNMENT
    arena.close()


def test_the_largest_span_that_fits_is_placed(capped: Device) -> None:
    """The cap is what a span may have; a byte more is an error that names both sizes."""
    largest = chunk_cap(capped.info)
    arena = arena_of(capped, [largest])
    assert CAP - 2 * ALIGNMENT <= largest <= CAP
    check_spans([arena.place(largest)], [largest])
    arena.close()
    with pytest.raises(OutOfMemoryError, match=r"experts needs .* allocates at most") as caught:
        arena_of(capped, [1, largest + 1])
    assert "--device" in caught.value.hint


def test_unaligned_addresses_are_rounded_up(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some drivers give addresses that are multiples of 16 only."""
    real = native.Buffer.address.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(native.Buffer, "address", property(lambda buffer: real(buffer) + 16))
    sizes = [300, 256, 10]
    arena = arena_of(device, sizes)
    check_spans([arena.place(size) for size in sizes], sizes)
    arena.close()


def test_an_arena_frees_its_chunks(device: Device) -> None:
    before = native.live_objects()
    arena = arena_of(device, [1 << 20])
    assert native.live_objects() != before
    arena.close()
    assert native.live_objects() == before


def test_rounding() -> None:
    assert [round_up(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert round_up(17, 16) == 32
