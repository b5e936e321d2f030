"""Copies of recurrent states: which are kept, where a text goes on, and memory that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vkmoe.errors import OutOfMemoryError
from vkmoe.execute.state_copies import StateCopies


class Memory:
    """Caches and a device of which nothing is used but where states are copied to."""

    saved_bytes = 100

    def __init__(self, n_buffers: int = 99) -> None:
        self.n_left, self.held, self.now = n_buffers, dict[int, Any](), dict[int, Any]()
        self.n_open = 0

    def allocate(self, intent: str, n_bytes: int, name: str) -> Memory.Buffer:
        if not self.n_left:
            raise OutOfMemoryError("out of memory", "")
        self.n_left, self.n_open = self.n_left - 1, self.n_open + 1
        return Memory.Buffer(self)

    def save_state(self, region: int, position: int, target: Any) -> None:
        self.held[id(target)] = self.now[region]

    def restore_state(self, region: int, position: int, source: Any) -> None:
        self.now[region] = self.held[id(source)]

    class Buffer:
        def __init__(self, memory: Memory) -> None:
            self.memory = memory

        def close(self) -> None:
            self.memory.n_open -= 1


@pytest.mark.parametrize(("n_most", "n_buffers"), [(3, 99), (9, 3)])
def test_the_one_unused_for_longest_goes_first(n_most: int, n_buffers: int) -> None:
    """Where so many are allowed, or where memory has room for no more."""
    memory = Memory(n_buffers)
    copies = StateCopies(memory, memory, n_most)  # type: ignore[arg-type]
    for position in (10, 20, 30):
        memory.now[0] = f"state at {position}"
        copies.take(0, position)
    assert [copies.last(0, n) for n in (9, 10, 25, 99)] == [0, 10, 20, 30]
    assert copies.last(1, 99) == 0
    copies.restore(0, 10, 1)
    assert memory.now[1] == "state at 10"
    memory.now[1] = "another text"
    copies.take(1, 15)
    assert [copies.last(0, n) for n in (10, 29, 30)] == [10, 10, 30], "20 was unused for longest"
    copies.forget(0, 10)
    assert copies.last(0, 99) == 10 and copies.last(1, 99) == 15
    copies.take(0, 12)
    assert copies.last(0, 99) == 12 and memory.n_open == 3, "memory of 30 is used again"
    copies.close()
    assert memory.n_open == 0


def test_without_memory_texts_begin_anew() -> None:
    memory = Memory(0)
    copies = StateCopies(memory, memory, 4)  # type: ignore[arg-type]
    memory.now[0] = "state"
    copies.take(0, 10)
    assert copies.last(0, 99) == 0
