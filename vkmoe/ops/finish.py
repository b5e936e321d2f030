"""Appends the last dispatch of every program: it leaves the submit's serial number in the log.

Shader: finish.comp. Twin: vkmoe/reference/logits.py.
"""

from __future__ import annotations

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, TensorRef

__all__ = ["finish"]

FINISH = kernel("finish", "r:params w:log", "", "workgroup_size")
WORKGROUP_SIZE = 8


def finish(program: Program, params: TensorRef, log: TensorRef, label: str = "finish") -> None:
    """Append log word 0 = params.serial, after everything before it in the program.

    It claims to read all that was written, so that the hazard plan puts a barrier before it.
    """
    written = dict.fromkeys(r for command in program.commands for r in command.writes)
    program.append(
        FINISH.dispatch(
            "finish",
            {"workgroup_size": WORKGROUP_SIZE},
            {"params": params, "log": log},
            {},
            (1, 1, 1),
            label,
            ranges={"log": log.words(0, 1)},
            memory_reads=tuple(written),
        )
    )
