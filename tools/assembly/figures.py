"""Counts on the path of a kernel: instructions, rounds of waiting, bytes in flight."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.assembly.flow import Block, Instruction, Loop, find_loops, find_path

__all__ = ["Figures", "Question", "count"]


@dataclass(frozen=True)
class Question:
    """Says what in a kernel is a weight, and how often its loops are passed.

    `weights` is the binding that weights are read from; None: they are read by address. The main
    loop is the outermost one that reads at least half of all weights, each loop passed once; it
    takes `main_passes`. Loops in it take one pass. Of the others, one that reads a binding takes
    `passes` of that binding (0: only shapes that are not asked about pass it), all others one.
    """

    weights: int | None = None
    main_passes: int = 1
    passes: Mapping[int | None, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """Holds the figures of one kernel, per wave; see `flow` for the path they belong to.

    alu              arithmetic instructions of one pass through the main loop, inner loops once;
                     of the whole path where no loop reads weights. Two in one (RDNA 3) are two.
    weight_bytes     bytes of weights that a lane asks for on the same stretch
    rounds           how often the wave waits for memory in a row: the longest chain of loads of
                     lanes in which each was issued after the wait for the one before. A wait for
                     what was issued before the last wait adds nothing.
    main_rounds      what one more pass of the main loop adds to it; 0 without a main loop
    scalar_rounds    the same chain of scalar loads (AMD, Intel): descriptors, parameters
    loads_in_flight  the most loads of weights that are issued and not yet waited for at any time
    bytes_in_flight  the most bytes of them, per lane; lanes may ask for the same bytes
    scalar_bases     loads of weights that address memory by a scalar register and an offset (AMD)
    shared           instructions of shared memory on the path, barriers not counted
    has_main_loop    whether a loop reads weights
    instructions     of the path
    """

    alu: float
    weight_bytes: float
    rounds: int
    main_rounds: int
    scalar_rounds: int
    loads_in_flight: int
    bytes_in_flight: float
    scalar_bases: int
    shared: int
    has_main_loop: bool
    instructions: int


def count(blocks: Sequence[Block], question: Question) -> Figures:
    """Count what `Figures` names. Raises ValueError where no weight is read on the path."""
    loops = find_loops(blocks)
    main = _main_loop(blocks, loops, question)

    def path(main_passes: int) -> list[Instruction]:
        def passes(loop: Loop) -> int:
            if loop is main:
                return main_passes
            if main is not None and loop.blocks < main.blocks:
                return 1
            return _passes(_instructions(blocks, loop.blocks), question)

        return _instructions(blocks, find_path(blocks, loops, passes))

    whole = path(question.main_passes)
    weights = [i for i in whole if _is_weight(i, question)]
    if not weights:
        raise ValueError("no weights are read on this path")
    once, twice = path(1), path(2)
    stretch = once
    if main is not None:
        every = find_path(blocks, loops, lambda _: 1)
        stretch = _instructions(blocks, [number for number in every if number in main.blocks])
    in_flight = _most_in_flight(whole, question)
    return Figures(
        alu=sum(i.cost for i in stretch if i.kind == "alu"),
        weight_bytes=sum(i.n_bytes for i in stretch if _is_weight(i, question)),
        rounds=_rounds(whole, "load"),
        main_rounds=_rounds(twice, "load") - _rounds(once, "load"),
        scalar_rounds=_rounds(whole, "scalar load"),
        loads_in_flight=in_flight[0],
        bytes_in_flight=in_flight[1],
        scalar_bases=sum(i.scalar_base for i in weights),
        shared=sum(i.kind == "shared" for i in whole),
        has_main_loop=main is not None,
        instructions=len(whole),
    )


def _is_weight(instruction: Instruction, question: Question) -> bool:
    return instruction.kind == "load" and instruction.binding == question.weights


def _instructions(blocks: Sequence[Block], numbers: Iterable[int]) -> list[Instruction]:
    """List the instructions of some blocks."""
    return [instruction for number in numbers for instruction in blocks[number].instructions]


def _main_loop(blocks: Sequence[Block], loops: Sequence[Loop], question: Question) -> Loop | None:
    """Find the outermost loop that reads at least half of the weights; None where no loop does."""
    every = find_path(blocks, loops, lambda _: 1)

    def read(inside: Collection[int]) -> float:
        passed = _instructions(blocks, [number for number in every if number in inside])
        return sum(i.n_bytes for i in passed if _is_weight(i, question))

    whole = read(every)
    return next((loop for loop in loops if 2 * read(loop.blocks) >= whole > 0), None)


def _passes(loop: Sequence[Instruction], question: Question) -> int:
    """Say how often a loop beside the main one is passed."""
    read = [question.passes[i.binding] for i in loop if i.binding in question.passes]
    return max(read, default=1)


class _Waits:
    """Follows which loads have not been waited for; `rounds` is the chain that was waited for."""

    def __init__(self) -> None:
        self.open: dict[str, list[tuple[Instruction, int]]] = {}
        self.rounds = 0

    def issue(self, instruction: Instruction, kind: str) -> None:
        """Wait as the instruction asks, then count it among the open ones if it has a counter."""
        for counter, left in instruction.waits:
            for name in list(self.open) if counter == "*" else [counter]:
                queue = self.open.get(name, [])
                arrived = queue[: max(0, len(queue) - left)]
                self.rounds = max([self.rounds, *(depth for _, depth in arrived)])
                self.open[name] = queue[len(arrived) :]
        if instruction.counter:
            depth = self.rounds + (instruction.kind == kind)
            self.open.setdefault(instruction.counter, []).append((instruction, depth))


def _rounds(path: Sequence[Instruction], kind: str) -> int:
    """Count the longest chain of waits for loads of one kind."""
    waits = _Waits()
    for instruction in path:
        waits.issue(instruction, kind)
    return waits.rounds


def _most_in_flight(path: Sequence[Instruction], question: Question) -> tuple[int, float]:
    """Return the most loads of weights in flight at any time, and the most bytes of a lane."""
    waits, most = _Waits(), (0, 0.0)
    for instruction in path:
        waits.issue(instruction, "load")
        if _is_weight(instruction, question):
            flying = [i for queue in waits.open.values() for i, _ in queue]
            weights = [i.n_bytes for i in flying if _is_weight(i, question)]
            most = max(most[0], len(weights)), max(most[1], sum(weights))
    return most
