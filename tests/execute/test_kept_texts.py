"""The memory of kept texts: who leaves, what is used again, and what others need first."""

from __future__ import annotations

from typing import Any

import pytest

from vkmoe.batch import TextForm
from vkmoe.errors import OutOfMemoryError
from vkmoe.execute import kept_texts
from vkmoe.execute.kept_texts import LEAST_BLOCK, KeptText, KeptTexts

GIB = 1 << 30


class Machine:
    """A device and regions of which nothing is used but memory; a row fills a block."""

    def __init__(self, n_buffers: int = 99) -> None:
        self.n_left, self.n_open, self.n_made = n_buffers, 0, 0

    def allocate(self, intent: str, n_bytes: int, name: str) -> Machine.Buffer:
        assert n_bytes == LEAST_BLOCK
        if self.n_left == self.n_open:
            raise OutOfMemoryError("out of memory", "")
        self.n_open, self.n_made = self.n_open + 1, self.n_made + 1
        return Machine.Buffer(self)

    def form(self, region: int, n_positions: int, most_stops: int) -> TextForm:
        return TextForm(n_positions)

    def n_bytes(self, form: TextForm) -> int:
        return form.n_positions * LEAST_BLOCK

    def pieces(self, region: int, form: TextForm) -> list[Any]:
        return []

    class Buffer:
        def __init__(self, machine: Machine) -> None:
            self.machine = machine

        def close(self) -> None:
            self.machine.n_open -= 1


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the host has free."""
    found = [64 * GIB]
    monkeypatch.setattr(kept_texts, "available_bytes", lambda: found[0])
    monkeypatch.setattr(KeptTexts, "_copy", lambda *given, back: None)
    return found


def opened(machine: Any, n_blocks: int) -> KeptTexts:
    return KeptTexts(machine, machine, n_blocks * LEAST_BLOCK)


def kept(texts: KeptTexts, n_positions: int) -> KeptText:
    found = texts.keep(0, n_positions)
    assert found is not None
    return found


def test_the_one_unused_for_longest_goes_first(free: list[int]) -> None:
    """Memory is taken as it is needed, and used again."""
    machine = Machine()
    texts = opened(machine, 10)
    first, second, third = (kept(texts, n) for n in (4, 3, 2))
    assert texts.n_bytes == 9 * LEAST_BLOCK and machine.n_open == 9
    fourth = kept(texts, 4)
    assert [x.is_there for x in (first, second, third, fourth)] == [False, True, True, True]
    assert machine.n_made == machine.n_open == 10
    second.is_spared = True
    assert kept(texts, 7).is_there and second.is_there and not fourth.is_there
    assert texts.keep(0, 8) is None, "there is never so much beside the one that is spared"
    assert second.is_there and texts.keep(0, 11) is None
    texts.close()
    assert machine.n_open == 0 and not second.is_there


def test_what_others_need_is_given_back(free: list[int]) -> None:
    """Down to half of what is left to them; then all of that, the texts unused for longest."""
    texts = opened(Machine(), 40)
    found = [kept(texts, 1) for _ in range(5)]
    free[0] = 3 * LEAST_BLOCK  # of 8, of which half is left to others
    assert texts.missing() == 0, "they may use a half of that"
    free[0] = LEAST_BLOCK
    assert texts.missing() == 2 * LEAST_BLOCK
    assert texts.give_back(2 * LEAST_BLOCK) == 2 * LEAST_BLOCK
    assert [x.is_there for x in found] == [False, False, True, True, True]
    texts.fit(LEAST_BLOCK)
    assert [x.is_there for x in found] == [False] * 4 + [True]
    assert texts.give_back(GIB) == LEAST_BLOCK and texts.missing() == 0


def test_no_more_is_taken_than_the_host_can_spare(free: list[int]) -> None:
    """By the rule of plans, whatever the limit says; memory that is there serves the next text."""
    free[0] = 4 * LEAST_BLOCK  # of which vkmoe takes half
    texts = opened(Machine(), 40)
    assert texts.keep(0, 3) is None and texts.n_bytes == 0
    first = kept(texts, 2)
    free[0] = 0
    assert kept(texts, 2).is_there and not first.is_there


def test_a_device_that_refuses_memory_is_not_asked_again(free: list[int]) -> None:
    machine = Machine(3)
    texts = opened(machine, 40)
    first = kept(texts, 2)
    assert texts.keep(0, 3) is None
    assert first.is_there and texts.n_bytes == 3 * LEAST_BLOCK
    assert kept(texts, 3).is_there and not first.is_there and machine.n_made == 3


def test_without_memory_nothing_is_kept(free: list[int]) -> None:
    assert opened(Machine(), 0).keep(0, 1) is None
