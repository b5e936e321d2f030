"""Memory that is only borrowed goes before experts do, and is no reason for experts to go."""

from __future__ import annotations

import pytest

from vkmoe.experts.store import memory_watch
from vkmoe.experts.store.memory_watch import MemoryWatch

GIB = 1 << 30


class Host:
    """A host with memory for others, for a borrower, which this is, and for experts."""

    def __init__(self) -> None:
        self.free, self.n_bytes, self.of_experts = 16 * GIB, 0, 4 * GIB

    def borrow(self, n_bytes: int) -> None:
        self.n_bytes, self.free = self.n_bytes + n_bytes, self.free - n_bytes

    def missing(self) -> int:
        return 2 * GIB - self.free if self.n_bytes and self.free < GIB else 0

    def give_back(self, n_bytes: int) -> int:
        n_bytes = min(n_bytes, self.n_bytes)
        self.borrow(-n_bytes)
        return n_bytes

    def give_experts(self, n_bytes: int) -> tuple[int, int]:
        n_bytes = min(n_bytes, self.of_experts)
        self.of_experts, self.free = self.of_experts - n_bytes, self.free + n_bytes
        return 1, n_bytes

    def take_experts(self, n_bytes: int) -> tuple[int, int]:
        return 1, self.give_experts(-n_bytes)[1] and n_bytes


def test_experts_leave_when_nothing_borrowed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(memory_watch, "available_bytes", lambda: host.free)
    monkeypatch.setattr(memory_watch, "WATCH_SECONDS", 0.0)
    missing = memory_watch._host_watched(host)
    watch = MemoryWatch(
        "host memory", "place there", missing, host.give_experts, host.take_experts, host
    )

    def look(n_times: int) -> None:
        for _ in range(n_times):
            watch.look()

    host.borrow(14 * GIB)
    look(5)
    assert (host.n_bytes, host.of_experts) == (14 * GIB, 4 * GIB), "what is borrowed counts as free"
    host.free -= 3 * GIB // 2  # others
    look(2)
    assert (host.n_bytes, host.free, host.of_experts) == (25 * GIB // 2, 2 * GIB, 4 * GIB)
    look(3)
    assert host.n_bytes == 25 * GIB // 2, "others have what is theirs"
    host.free, host.n_bytes = 3 * GIB, 4 * GIB
    look(2)
    assert host.of_experts == 4 * GIB and host.n_bytes == 0, "others have more than half"
    look(1)
    assert host.of_experts == 0
