"""The injected link: how long it takes, alone and shared."""

from __future__ import annotations

import threading
import time

import pytest

from bench import slow_link
from bench.slow_link import SlowLink, SlowUploads
from tests.experts.held_uploads import HeldUploads, copies, names


class Clock:
    """Stands for `time`; each sleep lasts `late` longer than asked for."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self._late = 100.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + (self._late if seconds else 0.0)


@pytest.mark.parametrize("late", [0.0, 0.0005, 0.003])
def test_bytes_take_their_time_even_if_sleeping_takes_longer(
    monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """50 slices of a millisecond; only the last one's lateness shows."""
    clock, link = Clock(late), SlowLink(10e6)
    monkeypatch.setattr(slow_link, "time", clock)
    link.carry(0)
    assert clock.now == 100.0
    link.carry(500_000)
    assert 0.05 <= clock.now - 100.0 + 1e-9 <= 0.05 + late + 1e-6
    assert link.n_bytes == 500_000


def test_an_idle_link_saves_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link = Clock(), SlowLink(10e6)
    monkeypatch.setattr(slow_link, "time", clock)
    link.carry(10_000)
    clock.now += 5.0
    began = clock.now
    link.carry(10_000)
    assert clock.now - began == pytest.approx(0.001)


def test_two_who_share_it_take_the_time_of_both() -> None:
    link = SlowLink(10e6)
    other = threading.Thread(target=link.carry, args=[200_000])
    began = time.perf_counter()
    other.start()
    link.carry(200_000)
    other.join()
    assert time.perf_counter() - began >= 0.04 and link.n_bytes == 400_000


def test_copies_arrive_when_the_link_has_carried_them() -> None:
    inner, link = HeldUploads(), SlowLink(10e6)
    upload = SlowUploads(inner, link).start(copies("a", "b"))
    assert not upload.done()
    upload.wait()
    assert link.n_bytes == 200 and names(inner.arrived) == "ab"
