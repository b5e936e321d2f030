"""Just enough of a SPIR-V reader to check what a compiled shader declares and touches.

Reads the binary itself (Khronos, "SPIR-V Specification", 2.3), so that no disassembler is needed.
Owns no opinion about what is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

NAME, MEMBER_NAME, CAPABILITY = 5, 6, 17
TYPE_INT, TYPE_FLOAT, TYPE_VECTOR, TYPE_ARRAY, TYPE_STRUCT, TYPE_POINTER = 21, 22, 23, 28, 30, 32
CONSTANT, SPEC_CONSTANT, SPEC_COMPOSITE, SPEC_OP = 43, 50, 51, 52
TRUE, FALSE = 41, 42
VARIABLE, LOAD, STORE, COPY_MEMORY, COPY_MEMORY_SIZED = 59, 61, 62, 63, 64
DECORATE, MEMBER_DECORATE = 71, 72
ATOMICS = range(227, 243)
F_NEGATE, F_ADD, F_SUB, F_MUL, F_DIV, VECTOR_TIMES_SCALAR, DOT = 127, 129, 131, 133, 136, 142, 148
EXTENDED, FUSED = 12, 50  # an instruction of GLSL.std.450, and its a * b + c
NO_CONTRACTION = 42
SPEC_ID, BUILT_IN, NON_WRITABLE, NON_READABLE, BINDING, SET, OFFSET = 1, 11, 24, 25, 33, 34, 35
ALIGNED = 2  # memory operand
WORKGROUP, PUSH_CONSTANT, STORAGE_BUFFER, PHYSICAL = 4, 9, 12, 5349


class Instruction(NamedTuple):
    """One instruction: its opcode and the words behind it."""

    opcode: int
    words: tuple[int, ...]


class Variable(NamedTuple):
    """A module-scope variable: its id, storage class, and the type it points to."""

    id: int
    storage: int
    type: int


class Access(NamedTuple):
    """A load or store through a 64-bit address: pointee such as "v4u32", and its alignment."""

    opcode: int
    pointee: str
    alignment: int


@dataclass(frozen=True)
class Module:
    """A SPIR-V module as its instructions."""

    instructions: tuple[Instruction, ...]

    @classmethod
    def parse(cls, spirv: bytes) -> Module:
        words = np.frombuffer(spirv, "<u4").tolist()
        assert words[0] == 0x07230203, "not SPIR-V"
        found, at = [], 5
        while at < len(words):
            length = words[at] >> 16
            found.append(Instruction(words[at] & 0xFFFF, tuple(words[at + 1 : at + length])))
            at += length
        return cls(tuple(found))

    def of(self, *opcodes: int) -> Iterator[tuple[int, ...]]:
        """The operands of all instructions with one of these opcodes."""
        return (item.words for item in self.instructions if item.opcode in opcodes)

    @cached_property
    def capabilities(self) -> set[int]:
        return {words[0] for words in self.of(CAPABILITY)}

    @cached_property
    def built_ins(self) -> set[int]:
        """Every BuiltIn that decorates a variable or a member."""
        plain = {words[2] for words in self.of(DECORATE) if words[1] == BUILT_IN}
        return plain | {words[3] for words in self.of(MEMBER_DECORATE) if words[2] == BUILT_IN}

    @cached_property
    def names(self) -> dict[int, str]:
        return {words[0]: _text(words[1:]) for words in self.of(NAME)}

    @cached_property
    def types(self) -> dict[int, Instruction]:
        """Type declarations by id."""
        return {i.words[0]: i for i in self.instructions if TYPE_INT <= i.opcode <= TYPE_POINTER}

    @cached_property
    def variables(self) -> list[Variable]:
        made = []
        for words in self.of(VARIABLE):
            pointer = self.types[words[0]]
            made.append(Variable(words[1], words[2], pointer.words[2]))
        return made

    def decorations(self, target: int) -> dict[int, int]:
        """Decorations of an id with their first operand, 0 where there is none."""
        return {words[1]: (*words[2:], 0)[0] for words in self.of(DECORATE) if words[0] == target}

    def members(self, struct: int) -> list[tuple[str, str, dict[int, int]]]:
        """Name, type and decorations of each member of a struct."""
        names = {w[1]: _text(w[2:]) for w in self.of(MEMBER_NAME) if w[0] == struct}
        marks: dict[int, dict[int, int]] = {}
        for words in self.of(MEMBER_DECORATE):
            if words[0] == struct:
                marks.setdefault(words[1], {})[words[2]] = (*words[3:], 0)[0]
        kinds = self.types[struct].words[1:]
        return [(names[i], self.describe(kind), marks.get(i, {})) for i, kind in enumerate(kinds)]

    def describe(self, type_id: int) -> str:
        """A type in short: "u32", "f32", "v4u32", "v2u64"; other types by opcode."""
        opcode, words = self.types[type_id]
        if opcode == TYPE_INT:
            return f"{'i' if words[2] else 'u'}{words[1]}"
        if opcode == TYPE_FLOAT:
            return f"f{words[1]}"
        if opcode == TYPE_VECTOR:
            return f"v{words[2]}{self.describe(words[1])}"
        return f"type {opcode}"

    @cached_property
    def accesses(self) -> list[Access]:
        """Loads, stores and atomics through pointers into memory reached by address."""
        pointers = {i.words[1]: i.words[0] for i in self.instructions
                    if len(i.words) > 1 and i.words[0] in self.types
                    and self.types[i.words[0]].opcode == TYPE_POINTER}  # fmt: skip
        found = []
        for opcode, words in self.instructions:
            if opcode in (COPY_MEMORY, COPY_MEMORY_SIZED, STORE):
                targets, operands = [words[0]], words[2:]
            elif opcode == LOAD or opcode in ATOMICS:
                targets, operands = [words[2]], words[3:]
            else:
                continue
            if opcode in (COPY_MEMORY, COPY_MEMORY_SIZED):
                targets.append(words[1])
            for target in targets:
                kind = self.types.get(pointers.get(target, 0))
                if kind is None or kind.words[1] != PHYSICAL:
                    continue
                aligned = len(operands) > 1 and operands[0] & ALIGNED
                found.append(Access(opcode, self.describe(kind.words[2]),
                                    operands[1] if aligned else 0))  # fmt: skip
        return found

    @cached_property
    def float_operations(self) -> list[str]:
        """Arithmetic on floats, and calls of GLSL.std.450, in the order they stand in."""
        plain = (F_NEGATE, F_ADD, F_SUB, F_MUL, F_DIV, VECTOR_TIMES_SCALAR, DOT)
        return [
            f"{item.opcode}" if item.opcode != EXTENDED else f"{item.opcode}:{item.words[3]}"
            for item in self.instructions
            if item.opcode in plain or item.opcode == EXTENDED
        ]

    @cached_property
    def spec_ids(self) -> dict[int, int]:
        """Specialisation constant id -> result id."""
        return {words[2]: words[0] for words in self.of(DECORATE) if words[1] == SPEC_ID}

    def shared_bytes(self, constants: Sequence[int]) -> int:
        """Workgroup memory under the given specialisation constants, in id order."""
        values = self._constant_values(dict(enumerate(constants)))
        return sum(self._size(variable.type, values) for variable in self.variables
                   if variable.storage == WORKGROUP)  # fmt: skip

    def _constant_values(self, given: Mapping[int, int]) -> dict[int, int | tuple[int, ...]]:
        """Values of all integer and boolean constants, specialised and derived."""
        spec = {result: number for number, result in self.spec_ids.items()}
        values: dict[int, int | tuple[int, ...]] = {}
        for opcode, words in self.instructions:
            if opcode in (CONSTANT, SPEC_CONSTANT):
                values[words[1]] = given.get(spec.get(words[1], -1), words[2])
            elif opcode in (TRUE, FALSE):
                values[words[1]] = int(opcode == TRUE)
            elif opcode == SPEC_COMPOSITE:
                parts = [values[part] for part in words[2:]]
                assert all(isinstance(part, int) for part in parts)
                values[words[1]] = tuple(int(str(part)) for part in parts)
            elif opcode == SPEC_OP:
                values[words[1]] = _evaluate(words[2], words[3:], values)
        return values

    def _size(self, type_id: int, values: Mapping[int, int | tuple[int, ...]]) -> int:
        opcode, words = self.types[type_id]
        if opcode in (TYPE_INT, TYPE_FLOAT):
            return words[1] // 8
        if opcode == TYPE_VECTOR:
            return words[2] * self._size(words[1], values)
        if opcode == TYPE_ARRAY:
            length = values[words[2]]
            assert isinstance(length, int)
            return length * self._size(words[1], values)
        assert opcode == TYPE_STRUCT, opcode
        return sum(self._size(member, values) for member in words[1:])


def _text(words: Sequence[int]) -> str:
    return np.array(words, "<u4").tobytes().split(b"\0")[0].decode()


def _evaluate(
    opcode: int, operands: Sequence[int], values: Mapping[int, int | tuple[int, ...]]
) -> int:
    """OpSpecConstantOp for the operations our shaders use, on uint32."""
    if opcode == 81:  # CompositeExtract: the second operand is a literal
        composite = values[operands[0]]
        assert isinstance(composite, tuple)
        return composite[operands[1]]
    if opcode == 168:  # LogicalNot
        return int(not values[operands[0]])
    a, b, *rest = (values[operand] for operand in operands)
    assert isinstance(a, int) and isinstance(b, int)
    if opcode == 169:  # Select
        (c,) = rest
        assert isinstance(c, int)
        return b if a else c
    operations = {
        128: lambda: a + b, 130: lambda: a - b, 132: lambda: a * b, 134: lambda: a // b,
        137: lambda: a % b, 166: lambda: a | b, 167: lambda: a & b, 170: lambda: int(a == b),
        171: lambda: int(a != b), 172: lambda: int(a > b), 174: lambda: int(a >= b),
        176: lambda: int(a < b), 199: lambda: a & b,
    }  # fmt: skip
    return operations[opcode]() & 0xFFFFFFFF
