"""This module fills the memory that workgroups share, in front of each dispatch of a program.

What a workgroup finds there is what another has left. A kernel that reads it too early may find
zeros, or the right values of an earlier run, and seem right. Filled, it finds what no sum bears.
"""

from __future__ import annotations

from vkmoe.facts import DeviceInfo
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Dispatch, Program, TensorRef

FILL_SHARED = kernel("fill_shared", "w:seen", "u32:value u32:first", "workgroup_size")
# As float32 2.7e36, as two float16 infinities, as an integer above all counts. Not NaN: comparisons
# and maxima pass over that.
FILLED = 0x7C007C00
WORKGROUP_SIZE = 64
# The largest GPUs run some 2,000 workgroups with this much memory at once, CPUs one on each thread.
# In one dispatch a thread of lavapipe may take all workgroups: the others wake for the next ones.
N_FILLS, N_GROUPS, N_GROUPS_CPU = 8, 512, 64


def fill_shared(program: Program, seen: TensorRef, value: int = FILLED, first: int = 0) -> None:
    """Let workgroups fill their memory with a value, one for each WORKGROUP_SIZE words of `seen`.

    Each lane leaves there what it finds in a unit of 16 bytes; `first` is that of the first lane.
    """
    n_groups = seen.n_words // WORKGROUP_SIZE
    program.append(
        FILL_SHARED.dispatch(
            "fill_shared",
            {"workgroup_size": WORKGROUP_SIZE, "value": value, "first": first},
            {"seen": seen},
            (n_groups, 1, 1),
            "fill shared memory",
        )
    )


def with_filled_shared(program: Program, info: DeviceInfo) -> Program:
    """Return a program that fills shared memory in front of each dispatch of another."""
    n_groups = N_GROUPS_CPU if info.is_cpu else N_GROUPS
    seen, filled = (
        TensorRef("seen of shared memory", n_groups * WORKGROUP_SIZE),
        Program(program.name),
    )
    for command in program.commands:
        if isinstance(command, Dispatch):
            for _ in range(N_FILLS):
                fill_shared(filled, seen)
        filled.commands.append(command)
    return filled
