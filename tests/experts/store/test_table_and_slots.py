"""The expert table's versions, and the slots' memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from vkmoe.errors import OutOfMemoryError
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.experts.store.slots import SlotManager
from vkmoe.experts.store.table import AT_HOME, N_VERSIONS, ExpertTable
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer

POOLS = (PoolSpec((0,), 3, 0, 256), PoolSpec((1,), 2, 0, 1024), PoolSpec((2,), 4, 0, 256))


@pytest.fixture
def table(device: Device, nothing_left: None) -> Iterator[ExpertTable]:
    with ExpertTable(device, 3, 4) as made:
        yield made


@pytest.fixture
def slots(device: Device, nothing_left: None) -> Iterator[SlotManager]:
    with SlotManager(device, POOLS, poison=True) as made:
        yield made


def read(device: Device, table: ExpertTable, version: int) -> list[list[int]]:
    """A version as the GPU has it."""
    n_bytes = table.entries.nbytes
    with Transfer(device) as transfer:
        raw = transfer.read(table._buffer, version % N_VERSIONS * n_bytes, n_bytes)
    found: list[list[int]] = raw.view(np.uint64).reshape(3, 4).tolist()
    return found


def test_a_version_keeps_its_addresses_while_the_next_is_made(
    device: Device, table: ExpertTable
) -> None:
    for expert in range(4):
        table.set(1, expert, (1 << 40) + expert)
    table.publish()
    table.begin()
    first, first_address = table.version, table.address
    old = read(device, table, first)
    table.set(1, 2, 77)
    table.set(2, 0, 88)
    table.publish()
    assert read(device, table, first) == old, "a version in use was written"
    assert table.address != first_address
    new = read(device, table, table.version)
    assert new[1][2] == 77 and new[2][0] == 88 and new[1][3] == (1 << 40) + 3


def test_no_change_means_no_version_and_no_write(table: ExpertTable) -> None:
    table.publish()
    version, n_writes = table.version, table.n_writes
    for _ in range(3):
        table.publish()
    assert (table.version, table.n_writes) == (version, n_writes)


def test_many_addresses_are_set_by_number(device: Device, table: ExpertTable) -> None:
    table.set_all(np.array([11, 5, 0]), np.array([111, 55, 1 << 63], np.uint64))
    table.publish()
    found = read(device, table, table.version)
    assert found == table.entries.tolist()
    assert (found[2][3], found[1][1], found[0][0]) == (111, 55, 1 << 63)


def test_every_version_has_all_that_was_noted(device: Device, table: ExpertTable) -> None:
    """Also what was noted before the version that was in force between: it has another copy."""
    random = np.random.default_rng(1)
    for n in range(1, 60):
        for _ in range(random.integers(0, 3)):
            keys = random.permutation(table.entries.size)[: random.integers(0, 4)]
            table.set_all(keys, np.full(len(keys), n, np.uint64))
        table.publish()
        assert read(device, table, table.version) == table.entries.tolist(), n


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "staged"])
def test_landing_places_follow_the_entries_of_their_version(
    device: Device, mapped: bool, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    if not mapped:
        monkeypatch.setattr(Transfer, "view", lambda transfer, target: None)
    with ExpertTable(device, 3, 4, n_landing=2) as table, Transfer(device) as transfer:
        for step in range(4):
            table.set(step % 3, step, (1 << 40) | AT_HOME)
            table.set_landing(np.array([step % 3]), np.array([step % 2]), 256 * (step + 1))
            assert table.changed
            table.publish()
            offset = table.address - int(table._buffer.address)
            words = transfer.read(table._buffer, offset, 8 * 18).view(np.uint64)
            assert words[:12].tolist() == table.entries.reshape(-1).tolist()
            assert words[12:].tolist() == table.landing.reshape(-1).tolist()
            assert table.landing[step % 3, step % 2] == 256 * (step + 1)
        assert table.range.end - table.range.start == N_VERSIONS * 8 * 18
        with pytest.raises(IndexError):
            table.set_landing(np.array([0]), np.array([2]), 256)


def test_a_version_that_is_read_is_not_written_over(table: ExpertTable) -> None:
    table.publish()
    table.begin()
    table.set(0, 0, 1)
    table.publish()
    table.set(0, 0, 2)
    with pytest.raises(AssertionError, match="still reads"):
        table.publish()


def test_a_submit_needs_all_changes_published(table: ExpertTable) -> None:
    with pytest.raises(AssertionError, match="publish first"):
        table.begin()
    table.publish()
    table.set(0, 0, 1)
    with pytest.raises(AssertionError, match="publish first"):
        table.begin()


def test_a_slot_is_writable_when_its_last_reader_has_ended(
    table: ExpertTable, slots: SlotManager
) -> None:
    ours, another = np.array([3]), np.array([2])

    def is_writable() -> bool:
        assert slots.are_writable(another, table.oldest_read).all(), "it was never mapped"
        return bool(slots.are_writable(ours, table.oldest_read).all())

    assert is_writable(), "never mapped"
    table.publish()
    first = table.begin()
    slots.unmap(ours, table.version)
    table.set(1, 0, 5)  # leads elsewhere from the next version on
    assert not is_writable(), "the submit in flight reads it"
    table.publish()
    second = table.begin()
    assert not is_writable()
    table.end(first)
    table.end(first)
    assert is_writable(), "only a later version is read"
    table.end(second)
    slots.unmap(ours, table.version)
    assert is_writable(), "the next submit reads a later version"


def test_slots_are_cleared_or_poisoned_and_lie_in_the_stated_memory(
    device: Device, slots: SlotManager
) -> None:
    with SlotManager(device, POOLS) as clean, Transfer(device) as transfer:
        for manager, byte in ((clean, 0), (slots, 0xFF)):
            for slot in manager.all:
                n_bytes = POOLS[slot.pool].slot_bytes
                found = transfer.read(slot.memory.buffer, slot.memory.offset, n_bytes)
                assert (found == byte).all()
                layer = POOLS[slot.pool].layers[0]
                assert any(r.start <= slot.address and slot.address + n_bytes <= r.end
                           for r in manager.ranges(layer))  # fmt: skip


def test_slots_do_not_overlap(slots: SlotManager) -> None:
    spans = sorted((s.address, s.address + POOLS[s.pool].slot_bytes) for s in slots.all)
    assert len(spans) == 9
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_slots_come_in_chunks_of_what_the_device_allocates(
    device: Device, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    limits = replace(device.info.limits, max_memory_allocation_size=4096)
    monkeypatch.setattr(device, "info", replace(device.info, limits=limits))
    with SlotManager(device, (PoolSpec((0,), 9, 0, 1024),)) as many:
        assert len(many.ranges(0)) >= 3 and many.n_bytes >= 9 * 1024
        assert len(many.all) == len({slot.address for slot in many.all}) == 9


def test_no_memory_for_slots_leaves_nothing_behind(device: Device, nothing_left: None) -> None:
    native.inject_failure("vkAllocateMemory", 1)
    with pytest.raises(OutOfMemoryError, match="expert slots"):
        SlotManager(device, POOLS)
