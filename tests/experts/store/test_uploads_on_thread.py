"""Copies on the device by way of the prefetcher's thread, beside submits of the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from tests.experts.conftest import nothing_left
from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.experts.store.copies import Copy, Prefetcher, Uploads
from vkmoe.gpu import _native as native
from vkmoe.gpu.arena import Arena, Placement, lay_out_spans
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer

__all__ = ["nothing_left"]

pytestmark = pytest.mark.timeout(10)
SPAN, N_SPANS = 4096, 32


class Memory:
    """Spans in host memory, span n full of n + 1, and as many on the device."""

    def __init__(self, device: Device) -> None:
        self._transfer = Transfer(device, 1 << 16)
        layout = lay_out_spans(device.info, [SPAN] * N_SPANS)
        self._arenas = [Arena(device, "host", "homes", layout)]
        self._arenas.append(Arena(device, "device", "slots", layout))
        self.homes, self.slots = (
            [arena.place(SPAN) for _ in range(N_SPANS)] for arena in self._arenas
        )
        for number, home in enumerate(self.homes):
            view = home.buffer.view()
            view[home.offset : home.offset + SPAN] = number + 1

    def copy(self, home: int, slot: int) -> list[Copy]:
        return [(self.homes[home], self.slots[slot], SPAN)]

    def read(self, slot: Placement) -> int:
        """The byte that all of a slot consists of."""
        found = np.unique(self._transfer.read(slot.buffer, slot.offset, SPAN))
        assert found.size == 1, found
        return int(found[0])

    def close(self) -> None:
        self._transfer.close()
        for arena in self._arenas:
            arena.close()


@pytest.fixture
def memory(device: Device, nothing_left: None) -> Iterator[Memory]:
    made = Memory(device)
    yield made
    made.close()


@pytest.fixture
def worker(device: Device, memory: Memory) -> Iterator[Prefetcher]:
    with Prefetcher(Uploads(device)) as made:
        yield made


def test_bytes_arrive_while_the_engine_submits(
    device: Device, memory: Memory, worker: Prefetcher
) -> None:
    """Every slot is overwritten many times, in order, between submits of another thread."""
    random, holds = np.random.default_rng(1), {}
    for _ in range(20):
        jobs = []
        for slot in random.choice(N_SPANS, 8, replace=False).tolist():
            holds[slot] = int(random.integers(N_SPANS))
            jobs.append(worker.start(memory.copy(holds[slot], slot), urgent=True))
        for slot in list(holds)[:3]:
            if all(job.done() for job in jobs):
                assert memory.read(memory.slots[slot]) == holds[slot] + 1
            else:
                memory.read(memory.homes[slot])
        for job in jobs:
            job.wait()
    for slot, home in holds.items():
        assert memory.read(memory.slots[slot]) == home + 1
    assert worker.n_jobs == 160 and worker.n_failed == 0


@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkResetFences", "vkWaitForFences"])
def test_a_failed_call_fails_its_job_alone(memory: Memory, worker: Prefetcher, call: str) -> None:
    """Where waiting fails, the copy has ended all the same before anybody is told."""
    worker.start(memory.copy(0, 0)).wait()
    native.inject_failure(call, 0, "VK_ERROR_OUT_OF_HOST_MEMORY")
    with pytest.raises(GpuError, match=call):
        worker.start(memory.copy(1, 1)).wait()
    worker.start(memory.copy(2, 1)).wait()
    assert memory.read(memory.slots[1]) == 3
    assert (worker.n_jobs, worker.n_failed) == (2, 1)


def test_a_device_lost_while_copying_is_told_and_closed() -> None:
    with Device() as device:
        memory = Memory(device)
        with Prefetcher(Uploads(device)) as worker:
            native.inject_failure("vkQueueSubmit", 0, "VK_ERROR_DEVICE_LOST")
            job = worker.start(memory.copy(0, 0))
            with pytest.raises(DeviceLostError):
                job.wait()
            with pytest.raises(DeviceLostError):
                worker.start(memory.copy(1, 1))
        with suppress(GpuError):
            memory.close()


def test_on_one_queue_copies_are_timed_in_their_order(
    device: Device, memory: Memory, worker: Prefetcher
) -> None:
    if not device.native.has_timestamps("upload"):
        assert worker.start(memory.copy(0, 0)).interval() is None
        return
    jobs = [worker.start(memory.copy(n, n)) for n in range(8)]
    times: list[int] = []
    for job in jobs:
        job.wait()
        interval = job.interval()
        assert interval is not None
        times += interval
    assert times == sorted(times)
