"""Counts on the path of a kernel: instructions, rounds of waiting, bytes in flight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tools.assembly.flow import Block, Instruction, Loop, find_loops, find_path

__all__ = ["Figures", "Question", "count"]


@dataclass(frozen=True)
class Question:
    """Says what in a kernel is a weight, and how often its loops are passed.

    `weights` is the binding that weights are read from; None: they are read by address. The main
    loop is the outermost one that reads at least half of all weights, each loop passed once; it
    takes `main_passes`, loops in it one pass. Of the others, one that reads a binding takes
    `passes` of that binding, all others one. The path goes round blocks that read a binding
    of `unused`, and with `main_only` round those that read weights beside the main loop:
    remainders, of which a whole pass of it is counted instead. The main loop is then the one that
    reads most weights in a pass, and of equal ones that with fewer rounds, then with less
    arithmetic: kernels have others for the last rows and for columns that do not fit.
    """

    weights: int | None = None
    main_passes: int = 1
    passes: Mapping[int | None, int] = field(default_factory=dict)
    unused: frozenset[int] = frozenset()
    main_only: bool = False


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
    has_main_loop    whether a loop reads weights
    """

    alu: float
    weight_bytes: float
    rounds: int
    main_rounds: int
    scalar_rounds: int
    loads_in_flight: int
    bytes_in_flight: float
    has_main_loop: bool


def count(blocks: Sequence[Block], question: Question) -> Figures:
    """Count what `Figures` names. Raises ValueError where no weight is read on the path."""
    loops = find_loops(blocks)
    found = [_count(blocks, loops, main, question) for main in _main_loops(blocks, loops, question)]
    return min(found, key=lambda one: (-one.weight_bytes, one.main_rounds, one.alu))


def _count(
    blocks: Sequence[Block], loops: Sequence[Loop], main: Loop | None, question: Question
) -> Figures:
    """Count with a loop taken for the main one."""

    def path(main_passes: int) -> list[int]:
        return _path(blocks, loops, main, replace(question, main_passes=main_passes))

    whole = _instructions(blocks, path(question.main_passes))
    once, twice = (_instructions(blocks, path(n)) for n in (1, 2))
    if not any(_is_weight(i, question) for i in once):
        raise ValueError("no weights are read on this path")
    stretch = once
    if main is not None:
        stretch = _instructions(blocks, [n for n in path(1) if n in main.blocks])
    in_flight = _most_in_flight(whole, question)
    return Figures(
        alu=sum(i.cost for i in stretch if i.kind == "alu"),
        weight_bytes=sum(i.n_bytes for i in stretch if _is_weight(i, question)),
        rounds=_rounds(whole, "load"),
        main_rounds=_rounds(twice, "load") - _rounds(once, "load"),
        scalar_rounds=_rounds(whole, "scalar load"),
        loads_in_flight=in_flight[0],
        bytes_in_flight=in_flight[1],
        has_main_loop=main is not None,
    )


def _path(
    blocks: Sequence[Block], loops: Sequence[Loop], main: Loop | None, question: Question
) -> list[int]:
    """Find the path on which loops are passed as asked."""

    def passes(loop: Loop) -> int:
        if loop is main:
            return question.main_passes
        if main is not None and loop.blocks < main.blocks:
            return 1
        return _passes(_instructions(blocks, loop.blocks), question)

    through = [main.header] if main else []
    return find_path(blocks, loops, passes, through, _avoided(blocks, question, main))


def _is_weight(instruction: Instruction, question: Question) -> bool:
    return instruction.kind == "load" and instruction.binding == question.weights


def _instructions(blocks: Sequence[Block], numbers: Iterable[int]) -> list[Instruction]:
    """List the instructions of some blocks."""
    return [instruction for number in numbers for instruction in blocks[number].instructions]


def _main_loops(
    blocks: Sequence[Block], loops: Sequence[Loop], question: Question
) -> list[Loop | None]:
    """List what may be the main loop; None: there is none, or what reads weights is no loop."""
    if question.main_only:
        reading = [loop for loop in loops if _read(blocks, loop.blocks, question)]
        outer = [one for one in reading if not any(one.blocks < other.blocks for other in reading)]
        return list(outer) or [None]
    every = find_path(blocks, loops, lambda _: 1, avoided=_avoided(blocks, question))
    whole = _read(blocks, every, question)
    for loop in loops:
        if 2 * _read(blocks, [n for n in every if n in loop.blocks], question) >= whole > 0:
            return [loop]
    return [None]


def _read(blocks: Sequence[Block], numbers: Iterable[int], question: Question) -> float:
    """Sum the bytes of weights that some blocks read."""
    return sum(i.n_bytes for i in _instructions(blocks, numbers) if _is_weight(i, question))


def _avoided(blocks: Sequence[Block], question: Question, main: Loop | None = None) -> set[int]:
    """Find the blocks that the path goes round."""

    def avoids(number: int, block: Block) -> bool:
        loads = [i for i in block.instructions if i.kind in ("load", "scalar load")]
        beside = question.main_only and main is not None and number not in main.blocks
        weights = beside and any(_is_weight(i, question) for i in loads)
        return weights or any(i.binding in question.unused for i in loads)

    return {number for number, block in enumerate(blocks) if avoids(number, block)}


def _passes(loop: Sequence[Instruction], question: Question) -> int:
    """Say how often a loop that is neither the main one nor in it is passed."""
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
