"""Counts the loads of weights that are in flight at once on the path of a kernel.

Weights are read by address. The path leads through the main loop: the outermost one that reads at
least half of all weights, each loop passed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tools.assembly.flow import Block, Instruction, Loop, find_loops, find_path


def loads_in_flight(blocks: Sequence[Block]) -> int:
    """Count the most loads of weights that are issued and not yet waited for at any time.

    Raises ValueError where no weight is read on the path.
    """
    loops = find_loops(blocks)
    main = main_loop(blocks, loops)
    path = find_path(blocks, loops, main.header if main else None)
    if not _bytes_read(blocks, path):
        raise ValueError("no weights are read on this path")
    return _most_in_flight([i for number in path for i in blocks[number].instructions])


def _is_weight(instruction: Instruction) -> bool:
    return instruction.kind == "load" and instruction.binding is None


def _bytes_read(blocks: Sequence[Block], numbers: Iterable[int]) -> float:
    """Sum the bytes of weights that some blocks read."""
    return sum(i.n_bytes for n in numbers for i in blocks[n].instructions if _is_weight(i))


def main_loop(blocks: Sequence[Block], loops: Sequence[Loop]) -> Loop | None:
    """Find the main loop; None: what reads weights is no loop."""
    every = find_path(blocks, loops)
    whole = _bytes_read(blocks, every)
    for loop in loops:
        if 2 * _bytes_read(blocks, [n for n in every if n in loop.blocks]) >= whole > 0:
            return loop
    return None


def _most_in_flight(path: Sequence[Instruction]) -> int:
    """Follow which loads have not been waited for."""
    open_loads: dict[str, list[Instruction]] = {}  # by counter, in the order of issue
    most = 0
    for instruction in path:
        for counter, left in instruction.waits:
            for name in list(open_loads) if counter == "*" else [counter]:
                queue = open_loads.get(name, [])
                open_loads[name] = queue[max(0, len(queue) - left) :]
        if instruction.counter:
            open_loads.setdefault(instruction.counter, []).append(instruction)
        if _is_weight(instruction):
            flying = sum(_is_weight(i) for queue in open_loads.values() for i in queue)
            most = max(most, flying)
    return most
