"""Counts what the main loop of a kernel with matrix units does, and estimates its cycles.

The main loop is the innermost one that has a matrix instruction and a barrier: a step of all sums.
The path through it takes one side of each branch (see flow); a loop inside it is passed once, and
must multiply no matrices, as nothing says how often it runs. The estimate is of one SIMD unit (AMD)
or vector engine (Intel), with no overlap between what its parts do:

    cycles = matrix instructions * cycles of one
           + vector instructions * ceil(lanes / lanes of the unit)
           + bytes of shared memory / the unit's share of its bytes per cycle

Scalar instructions and waits are left out; loads of memory, and registers that are spilled to it,
are counted without a price: two kernels that differ in those alone are taken for equal. Sources of
the rates:
AMD: 512 operations of f16 or int8 per cycle and compute unit, of two SIMD units of 32 lanes (96
units at 2.5 GHz are the 123 TFLOPS of the data sheet of the RX 7900 XTX); WMMA of 16x16x16 has
8,192, in a wave of either size; shared memory gives 128 bytes to a compute unit (RDNA3 ISA).
Intel: 2,048 operations of f16 per cycle and Xe core, of int8 twice as many. Xe2's cores have eight
engines of 16 lanes (eight cores at 2.05 GHz are Lunar Lake's 67 TOPS of int8, Intel's Tech Tour of
2024), where DPAS 8x8 has 4,096 of f16; those of Xe-HPG have 16 engines of 8 lanes, where it has
2,048. That shared memory gives 128 bytes to a core is assumed: Intel does not say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tools.assembly.flow import Block, Instruction, Loop, find_loops, find_path

_WMMA = re.compile(r"v_wmma_\w+?_16x16x16_(f16|bf16|iu8)\b")
_DPAS = re.compile(r"dpas\.8x8\((\d+)\)(.*)")
_DEPTHS = {r">[HB]F\b": 16, r">U?B\b": 32}  # of products, by what is multiplied
_DS = re.compile(r"ds_\w*?_(2addr\w*?_)?[bui](\d+)")
_MESSAGE = re.compile(r"MsgDesc: \( (?:load|store|atomic)\w*, \w+, d(\d+)\w*, V(\d+)")
_SPILL = re.compile(r"scratch_(?:load|store)_[bui](\d+)|send.*MsgDesc: \(.*, ss \)")
_INTEL_LANES = re.compile(r"\((\d+)\)\s")


class Rates(NamedTuple):
    """What a unit does in a cycle."""

    lanes: int
    matrix_cycles: int  # of an instruction
    shared_bytes: int


AMD = Rates(32, 32, 64)
INTEL = {16: Rates(16, 16, 16), 8: Rates(8, 16, 8)}  # by the lanes of its matrix instructions


class Work(NamedTuple):
    """Holds the counts of one pass of the main loop, of one wave; bytes are those of all lanes."""

    multiply_adds: int
    matrix: int
    vector: int
    shared: int
    shared_bytes: float
    loads: int
    load_bytes: float
    spill_bytes: float
    barriers: int
    matrix_cycles: float
    vector_cycles: float
    shared_cycles: float
    inner_loops: int

    @property
    def cycles(self) -> float:
        """Sum the parts of the estimate."""
        return self.matrix_cycles + self.vector_cycles + self.shared_cycles

    def per_thousand(self, number: float) -> float:
        """Return a number per 1,000 multiply-adds."""
        return 1000 * number / self.multiply_adds


def main_loop_work(blocks: Sequence[Block], wave_lanes: int, passes: int = 1) -> Work:
    """Count the main loop of a kernel whose waves have `wave_lanes`.

    With `passes` above 1 all matrices may be multiplied by a loop inside it, which runs so often.
    Raises ValueError where nothing multiplies matrices in a loop, or otherwise a loop inside does.
    """
    loops = find_loops(blocks)
    main = _main_loop(blocks, loops)
    inner = [loop for loop in loops if loop.blocks < main.blocks]
    multiplying = [loop for loop in inner if _has(blocks, loop, is_matrix)]
    if multiplying and (passes == 1 or len(multiplying) > 1):
        raise ValueError("a loop inside the main loop multiplies matrices: nothing says how often")
    path = [n for n in find_path(blocks, loops, main.header) if n in main.blocks]
    again = [n for loop in multiplying for n in path if n in loop.blocks] * (passes - 1)
    instructions = [i for n in (*path, *again) for i in blocks[n].instructions]
    if not any(map(is_matrix, instructions)):
        raise ValueError("the path through the main loop multiplies no matrices")
    return _count(instructions, wave_lanes, len(inner))


def is_matrix(instruction: Instruction) -> bool:
    """Say whether an instruction multiplies matrices."""
    return instruction.text.startswith(("v_wmma", "v_swmmac", "dpas"))


def is_barrier(instruction: Instruction) -> bool:
    """Say whether an instruction waits for the workgroup."""
    return instruction.text.startswith("s_barrier") or "(barrier msg)" in instruction.text


def _main_loop(blocks: Sequence[Block], loops: Sequence[Loop]) -> Loop:
    if not any(is_matrix(i) for block in blocks for i in block.instructions):
        raise ValueError("there is no matrix instruction")
    found = [loop for loop in loops if _has(blocks, loop, is_matrix)]
    if not found:
        raise ValueError("no loop multiplies matrices")
    steps = [loop for loop in found if _has(blocks, loop, is_barrier)]
    if not steps:
        raise ValueError("no loop that multiplies matrices has a barrier")
    return steps[-1]  # outer loops come first


def _has(blocks: Sequence[Block], loop: Loop, is_sought: Callable[[Instruction], bool]) -> bool:
    return any(is_sought(i) for n in loop.blocks for i in blocks[n].instructions)


def _count(instructions: Sequence[Instruction], wave_lanes: int, inner_loops: int) -> Work:
    matrix = [i for i in instructions if is_matrix(i)]
    vector = [i for i in instructions if i.kind == "alu" and not is_matrix(i)]
    shared = [i for i in instructions if _is_shared(i)]
    loads = [i for i in instructions if i.kind == "load"]
    multiply_adds = sum(map(_multiply_adds, matrix))
    rates = AMD if matrix[0].text.startswith("v_") else INTEL[_lanes(matrix[0], wave_lanes)]
    shared_bytes = sum(_shared_bytes(i, wave_lanes) for i in shared)
    return Work(
        multiply_adds=multiply_adds,
        matrix=len(matrix),
        vector=len(vector),
        shared=len(shared),
        shared_bytes=shared_bytes,
        loads=len(loads),
        load_bytes=sum(i.n_bytes for i in loads) * wave_lanes,
        spill_bytes=sum(_spill_bytes(i, wave_lanes) for i in instructions),
        barriers=sum(map(is_barrier, instructions)),
        matrix_cycles=len(matrix) * rates.matrix_cycles,
        vector_cycles=sum(-(-_lanes(i, wave_lanes) // rates.lanes) for i in vector),
        shared_cycles=shared_bytes / rates.shared_bytes,
        inner_loops=inner_loops,
    )


def _multiply_adds(instruction: Instruction) -> int:
    """Count them in a matrix instruction. Raises ValueError for one of no known rate."""
    if _WMMA.match(instruction.text):
        return 16 * 16 * 16
    match = _DPAS.match(instruction.text)
    if match is None or int(match[1]) not in INTEL:
        raise ValueError(f"no rate is known of {instruction.text.split()[0]}")
    depths = [depth for types, depth in _DEPTHS.items() if re.search(types, match[2])]
    if not depths:
        raise ValueError(f"no rate is known of {instruction.text}")
    return 8 * int(match[1]) * depths[0]


def _lanes(instruction: Instruction, wave_lanes: int) -> int:
    """Return how many lanes an instruction is for: Intel's state it, AMD's are for all."""
    if instruction.text.startswith("v_"):
        return wave_lanes
    match = _INTEL_LANES.search(instruction.text)
    if match is None:
        raise ValueError(f"how many lanes has {instruction.text}")
    return int(match[1])


def _is_shared(instruction: Instruction) -> bool:
    """Say whether an instruction accesses shared memory, also in words that nothing reads yet."""
    text = instruction.text
    return instruction.kind == "shared" or (" slm MsgDesc" in text and "fence" not in text)


def _shared_bytes(instruction: Instruction, wave_lanes: int) -> float:
    """Return what an access to shared memory reads or writes in all lanes."""
    text = instruction.text
    if match := _DS.match(text):
        return int(match[2]) / 8 * (2 if match[1] else 1) * wave_lanes
    if text.startswith("ds_"):
        raise ValueError(f"how many bytes has {text}")
    return _message_bytes(instruction)


def _spill_bytes(instruction: Instruction, wave_lanes: int) -> float:
    """Return what an instruction writes of registers to memory, or reads back."""
    match = _SPILL.match(instruction.text)
    if match is None:
        return 0.0
    return int(match[1]) / 8 * wave_lanes if match[1] else _message_bytes(instruction)


def _message_bytes(instruction: Instruction) -> float:
    """Return the bytes of all lanes of a message of Intel's."""
    match = _MESSAGE.search(instruction.text)
    if match is None:
        raise ValueError(f"how many bytes has {instruction.text}")
    return int(match[1]) / 8 * int(match[2]) * _lanes(instruction, 0)
