"""Blocks, loops and the path that a wave takes through a kernel.

A path goes from start to end and through each loop once. Where it branches it
takes one side: that with more bytes in loads of at least 8, then with more instructions. Shapes
that fit take the wide loads, early ends are for workgroups without work, and what is optional (a
bias) is on the path. AMD's code for lanes that differ leads through both sides in turn, and so
does the path; NVIDIA's and Intel's does not show which branches differ between lanes, and the path
takes one side of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

WIDE_BYTES = 8
_MUST = 1e12  # more than all bytes of a path are worth

Kind = Literal["alu", "scalar", "load", "scalar load", "shared", "store", "other"]


class Wait(NamedTuple):
    """Asks that all but the last `left` loads of a counter have arrived; "*": every counter."""

    counter: str
    left: int = 0


class Jump(NamedTuple):
    """Says where an instruction may lead besides, or instead of, to the next one."""

    target: str | None  # a label; None: the end
    falls_through: bool


@dataclass(frozen=True)
class Instruction:
    """Holds what counting needs to know of one instruction."""

    kind: Kind
    n_bytes: float = 0.0  # of a load, per lane of the wave
    binding: int | None = None  # of a load: the buffer; None: by address
    counter: str = ""  # of a load: what its arrival is awaited by
    waits: tuple[Wait, ...] = ()  # before it is issued
    jump: Jump | None = None
    text: str = ""  # where another pass over the blocks needs it


@dataclass
class Block:
    """Holds instructions that follow each other, and the numbers of the blocks behind them."""

    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    @property
    def worth(self) -> tuple[float, int]:
        """Weigh the block in the choice of a path."""
        loads = (i for i in self.instructions if i.kind == "load" and i.n_bytes >= WIDE_BYTES)
        return sum(load.n_bytes for load in loads), len(self.instructions)


@dataclass(frozen=True)
class Loop:
    """Names the blocks of a loop; every pass begins at `header`."""

    header: int
    blocks: frozenset[int]
    exits: frozenset[tuple[int, int]]  # edges that leave it


def blocks_of(lines: Iterable[str | Instruction]) -> list[Block]:
    """Make blocks of labels and instructions, in the order of the text."""
    blocks, labels = [Block()], {}
    ended = False
    for line in lines:
        if ended or (isinstance(line, str) and blocks[-1].instructions):
            blocks.append(Block())
            ended = False
        if isinstance(line, str):
            labels[line] = len(blocks) - 1
        else:
            blocks[-1].instructions.append(line)
            ended = line.jump is not None
    for number, block in enumerate(blocks):
        jump = block.instructions[-1].jump if block.instructions else None
        if (jump is None or jump.falls_through) and number + 1 < len(blocks):
            block.next.append(number + 1)
        if jump is not None and jump.target is not None:
            block.next.append(labels[jump.target])
    return blocks


def find_loops(blocks: Sequence[Block]) -> list[Loop]:
    """Find the loops, outer ones before those inside. Compilers enter each at one block only."""
    ends: dict[int, set[int]] = {}  # header -> the blocks that lead back to it
    for end, header in _back_edges(blocks):
        ends.setdefault(header, set()).add(end)
    before: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for follower in block.next:
            before.setdefault(follower, []).append(number)
    loops = []
    for header, open_ends in ends.items():
        inside, todo = {header}, list(open_ends)
        while todo:
            number = todo.pop()
            if number not in inside:
                inside.add(number)
                todo += before.get(number, [])
        exits = {(n, f) for n in inside for f in blocks[n].next if f not in inside}
        loops.append(Loop(header, frozenset(inside), frozenset(exits)))
    return sorted(loops, key=lambda loop: -len(loop.blocks))


def _back_edges(blocks: Sequence[Block]) -> set[tuple[int, int]]:
    """Find the edges that lead back to a block which leads to them."""
    found, open_blocks, closed = set(), {0}, set()
    stack = [(0, iter(blocks[0].next))]
    while stack:
        number, followers = stack[-1]
        follower = next(followers, None)
        if follower is None:
            stack.pop()
            open_blocks.remove(number)
            closed.add(number)
        elif follower in open_blocks:
            found.add((number, follower))
        elif follower not in closed:
            open_blocks.add(follower)
            stack.append((follower, iter(blocks[follower].next)))
    return found


def find_path(
    blocks: Sequence[Block], loops: Sequence[Loop], through: int | None = None
) -> list[int]:
    """Return the numbers of the blocks that a wave takes, each loop once.

    It leads through the block `through` if it can.
    """
    followers = _without_loops(blocks, loops)
    best: dict[int, tuple[tuple[float, int], int | None]] = {}
    for number in _last_first(followers):
        worths = [(best[follower][0], follower) for follower in followers[number]]
        behind, follower = max(worths, default=((0.0, 0), None), key=lambda one: one[0])
        own = blocks[number].worth
        own = own[0] + _MUST * (number == through), own[1]
        best[number] = (own[0] + behind[0], own[1] + behind[1]), follower
    path = [0]
    while (at := best[path[-1]][1]) is not None:
        path.append(at)
    return path


def _without_loops(blocks: Sequence[Block], loops: Sequence[Loop]) -> list[list[int]]:
    """Return what follows each block when the end of a loop leads out of it, not back."""
    of_header = {loop.header: loop for loop in loops}

    def forward(number: int, follower: int) -> set[int]:
        loop = of_header.get(follower)
        if loop is None or number not in loop.blocks:
            return {follower}
        return {out for leaving in loop.exits for out in forward(*leaving)}

    return [
        sorted({out for follower in block.next for out in forward(number, follower)})
        for number, block in enumerate(blocks)
    ]


def _last_first(followers: Sequence[Sequence[int]]) -> list[int]:
    """Return the blocks that can be reached, each behind all that follow it."""
    order, seen, stack = [], {0}, [(0, iter(followers[0]))]
    while stack:
        follower = next(stack[-1][1], None)
        if follower is None:
            order.append(stack.pop()[0])
        elif follower not in seen:
            seen.add(follower)
            stack.append((follower, iter(followers[follower])))
    return order
