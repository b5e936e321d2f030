"""Recordings and work of the host in turns: who waits for whom, and what a failure leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.gpu.backend import Backend, Link, Recording
from vkmoe.gpu.device import Device


class Words:
    """Words of host memory: the host writes the first, and the device copies it to the second."""

    def __init__(self, device: Device) -> None:
        self._device, self._buffer = device, device.allocate("host", 16, "words")
        self.words: NDArray[np.uint32] = self._buffer.view().view(np.uint32)

    def copying(self) -> Recording:
        recorder = self._device.native.recorder()
        recorder.copy(self._buffer, 0, self._buffer, 4, 4)
        return recorder.finish()

    def storing(self, index: int, number: int) -> Recording:
        recorder = self._device.native.recorder()
        recorder.fill(self._buffer, 4 * index, 4, number)
        return recorder.finish()

    def close(self) -> None:
        del self.words
        self._buffer.close()


@pytest.fixture
def words(device: Device) -> Iterator[Words]:
    made = Words(device)
    made.words[:] = 0
    yield made
    made.close()


def test_what_the_host_writes_is_seen_by_the_next_that_waits(device: Device, words: Words) -> None:
    """And the host sees what the device wrote: a number goes back and forth."""
    seen: list[int] = []

    def answer() -> None:
        seen.append(int(words.words[1]))
        words.words[0] = seen[-1] + 1

    n = 20
    links = [Link(words.copying(), answer, waits=i > 0) for i in range(n)]
    backend = Backend(device)
    for _ in range(3):  # the same recordings again and again
        words.words[:2] = 0
        seen.clear()
        submissions = backend.run_chain([*links, Link(words.copying(), waits=True)])
        assert seen == [*range(n)] and words.words[1] == n and len(submissions) == n + 1


def test_one_that_does_not_wait_runs_beside_the_host(device: Device, words: Words) -> None:
    began: list[str] = []

    def work() -> None:
        began.append("work")
        deadline = time.monotonic() + 5
        while words.words[2] != 7 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert words.words[2] == 7 and words.words[3] == 0, "the second ran, the third has not"

    links = [Link(words.copying(), work), Link(words.storing(2, 7)),
             Link(words.storing(3, 9), waits=True)]  # fmt: skip
    Backend(device).run_chain(links, lambda: began.append("meanwhile"))
    assert words.words[3] == 9 and began == ["meanwhile", "work"]


def test_work_that_fails_ends_the_chain(device: Device, words: Words) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    backend = Backend(device)
    links = [Link(words.copying(), fail), Link(words.storing(2, 7)),
             Link(words.storing(3, 9), waits=True)]  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        backend.run_chain(links)
    assert words.words[2] == 7 and words.words[3] == 0, "what was queued has ended, no more was"
    backend.run_chain([Link(words.storing(3, 9))])
    assert words.words[3] == 9
