"""Reads the assembly that NVK prints of NAK's code.

          r8 p0   = iadd3 r7 c[0x1][0x20] rZ              // delay=13
          r4      = ld.global.a64.constant.b128 [r8..10]  // delay=1 wr:0
    @!p0            bra L1                                // delay=1 wt=000001

`wr:N` names the scoreboard that a load frees when it arrives; `wt=` is a mask of those an
instruction waits for, the lowest on the right. Buffers are read by address too: the address of
binding N stands at c[0x1][16 * N], so what is computed from there belongs to that binding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tools.assembly.flow import Block, Instruction, Jump, Kind, Wait, blocks_of

_BLOCK = re.compile(r"block\S* \d+ (L\d+) ")
_LINE = re.compile(
    r"^(?P<predicate>@\S+)?\s*(?:(?P<to>\S[^=]*?)\s+= )?\s*(?P<name>[a-z]\S*)"
    r"(?P<rest>.*?)// (?P<marks>.*)$"
)
_REGISTERS = re.compile(r"\b(u?r)(\d+)(?:\.\.(\d+))?")
_DESCRIPTOR = re.compile(r"c\[0x1\]\[(?:\+)?(0x[0-9a-f]+)\]")
_NO_ARITHMETIC = "bra exit bssy bsync bclear nop bar membar warpsync vote s2r cs2r shfl ldc kill"
_BITS = re.compile(r"\.[bui](\d+)$")


def read(text: str) -> list[Block]:
    """Read a kernel."""
    blocks = blocks_of(_lines(text))
    _find_bindings(blocks)
    return blocks


def _lines(text: str) -> Iterator[str | Instruction]:
    """Yield labels and instructions."""
    for line in text.splitlines():
        if block := _BLOCK.match(line):
            yield block[1]
        elif match := _LINE.match(line):
            yield _instruction(line, match)


def _instruction(line: str, match: re.Match[str]) -> Instruction:
    """Read one instruction, but for its binding."""
    name, marks = match["name"], match["marks"]
    waits = tuple(_waits(marks))
    counter = found[1] if (found := re.search(r"\bwr:(\d)", marks)) else ""
    base, _, form = name.partition(".")
    if base in ("ld", "atom") and "global" in form:
        n_bytes = int(bits[1]) / 8 if (bits := _BITS.search(name)) else 4.0
        return Instruction("load", n_bytes=n_bytes, counter=counter, waits=waits, text=line)
    if base in ("ld", "ldc"):
        kind: Kind = "shared" if base == "ld" else "scalar load"
        return Instruction(kind, n_bytes=4.0, counter=counter, waits=waits, text=line)
    if base in ("st", "red"):
        return Instruction("shared" if "shared" in form else "store", waits=waits, text=line)
    if base in ("bra", "exit"):
        target = match["rest"].split()[-1] if base == "bra" else None
        jump = Jump(target, bool(match["predicate"]))
        return Instruction("other", waits=waits, jump=jump, text=line)
    if base in _NO_ARITHMETIC.split():
        return Instruction("other", waits=waits, text=line)
    to = _registers(match["to"] or "")
    scalar = bool(to) and all(register.startswith("u") for register in to)
    return Instruction("scalar" if scalar else "alu", waits=waits, text=line)


def _find_bindings(blocks: list[Block]) -> None:
    """Follow addresses of buffers through registers, in the order of execution, to the loads."""
    todo: list[tuple[int, dict[str, int]]] = [(0, {})]
    seen = {0}
    while todo:
        number, held = todo.pop()  # held: register -> the buffer whose address it is part of
        instructions = blocks[number].instructions
        for at, instruction in enumerate(instructions):
            match = _LINE.match(instruction.text)
            assert match is not None, instruction
            binding = _binding(match["rest"], held)
            if instruction.kind == "load":
                instructions[at] = replace(instruction, binding=binding)
            for register in _registers(match["to"] or ""):
                held.pop(register, None)
                if binding is not None and instruction.kind == "alu":
                    held[register] = binding
        for follower in blocks[number].next:
            if follower not in seen:
                seen.add(follower)
                todo.append((follower, dict(held)))


def _binding(operands: str, held: dict[str, int]) -> int | None:
    """Find the buffer to which operands lead."""
    if match := _DESCRIPTOR.search(operands):
        return int(match[1], 16) // 16
    return next((held[name] for name in _registers(operands) if name in held), None)


def _registers(operands: str) -> list[str]:
    """List the registers that operands name; r8..10 are r8 and r9."""
    return [
        f"{bank}{number}"
        for bank, first, end in _REGISTERS.findall(operands)
        for number in range(int(first), int(end or int(first) + 1))
    ]


def _waits(marks: str) -> Iterator[Wait]:
    """Yield the scoreboards that an instruction waits for."""
    if match := re.search(r"wt=([01]+)", marks):
        for number, bit in enumerate(reversed(match[1])):
            if bit == "1":
                yield Wait(str(number))
