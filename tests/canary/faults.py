"""Faults that a driver's compiler might have, made in copies of SPIR-V modules.

Each changes one instruction. None makes an address or a loop's bound another, so that a kernel
ends and touches its own memory alone. Facts of the binary form: SPIR-V specification 1.6, sections
2.3 and 3.49.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
HEADER_WORDS = 5
# Opcodes.
TYPE_FLOAT, CONSTANT, NOP = 22, 43, 0
F_ADD, F_SUB, F_MUL, F_DIV = 129, 131, 133, 136
SELECT, CONTROL_BARRIER = 169, 224
F_LESS, F_GREATER = (184, 185), (186, 187)  # ordered and unordered
SWAPPED = {F_ADD: F_SUB, F_SUB: F_ADD, F_MUL: F_ADD, F_DIV: F_MUL}
SWAPPED |= {184: 186, 185: 187, 186: 184, 187: 185}


class Fault(NamedTuple):
    """Names what is changed in a module, from which word on, and what is there then."""

    what: str
    start: int
    words: tuple[int, ...]

    def planted(self, module: bytes) -> bytes:
        """The module with the fault."""
        words = np.frombuffer(module, "<u4").copy()
        words[self.start : self.start + len(self.words)] = self.words
        return words.tobytes()


class Instruction(NamedTuple):
    opcode: int
    start: int
    words: tuple[int, ...]


def instructions(module: bytes) -> Iterator[Instruction]:
    words = np.frombuffer(module, "<u4").tolist()
    at = HEADER_WORDS
    while at < len(words):
        n_words = words[at] >> 16
        yield Instruction(words[at] & 0xFFFF, at, tuple(words[at : at + n_words]))
        at += n_words


def faults(module: bytes) -> list[Fault]:
    """All that can be planted in a module."""
    found = list(instructions(module))
    floats = {each.words[1] for each in found if each.opcode == TYPE_FLOAT}
    return [fault for each in found for fault in _of_instruction(each, floats)]


def _of_instruction(each: Instruction, floats: set[int]) -> Iterator[Fault]:
    first, *rest = each.words
    if each.opcode in SWAPPED:
        swapped = first & 0xFFFF0000 | SWAPPED[each.opcode]
        yield Fault(f"opcode {each.opcode} swapped", each.start, (swapped, *rest))
    elif each.opcode == SELECT and rest[0] in floats:
        kind, result, condition, one, other = rest
        words = (first, kind, result, condition, other, one)
        yield Fault("choice the other way round", each.start, words)
    elif each.opcode == CONSTANT and rest[0] in floats and len(rest) == 3:
        value = np.array(rest[2], np.uint32).view(np.float32)
        if np.isfinite(value) and value != 0:
            altered = int((value * np.float32(0.75)).view(np.uint32))
            yield Fault(f"constant {value} altered", each.start, (first, *rest[:2], altered))
    elif each.opcode == CONTROL_BARRIER:
        yield Fault("barrier gone", each.start, (1 << 16 | NOP,) * len(each.words))


def chosen(modules: dict[str, bytes], n: int, seed: int) -> list[tuple[str, Fault]]:
    """So many faults in different modules, as long as there are some, of all kinds in turns."""
    rng, found = random.Random(seed), list[tuple[str, Fault]]()
    kinds = ("opcode", "constant", "choice", "barrier")
    names = sorted(modules)
    while len(found) < n:
        rng.shuffle(names)
        for name in names:
            kind = kinds[len(found) % len(kinds)]
            of_module = faults(modules[name])
            wanted = [fault for fault in of_module if fault.what.startswith(kind)] or of_module
            if wanted and len(found) < n:
                found.append((name, rng.choice(wanted)))
    return found
