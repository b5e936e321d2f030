"""Lowers programs for the CPU: each command is resolved and checked once, when it is recorded.

Owns nothing: the memory behind names is the caller's, and so is what addresses lead to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import Copy, Program, Range

if TYPE_CHECKING:
    from vkmoe.cpu import _native

__all__ = ["record"]

Words = NDArray[np.uint32]


def record(
    program: Program, memory: Mapping[str, Words], recording: _native.Recording
) -> _native.Recording:
    """Append a program to a recording; `memory` is what its tensors and buffers are, by name.

    Commands wait for those before them only where the plan of barriers says so. Raises ValueError
    for a kernel that CPUs have none of, and for what leads out of a tensor or out of all memory.
    """
    barriers = plan_barriers(program.commands)
    for command, waits in zip(program.commands, barriers, strict=True):
        if isinstance(command, Copy):
            source, target = (_part(memory, item) for item in (command.source, command.target))
            recording.copy(source, target, waits)
            continue
        spec = KERNELS[command.kernel]
        tensors = {
            binding.name: memory[tensor.name]
            for binding, tensor in zip(spec.bindings, command.tensors, strict=True)
        }
        numbers = spec.numbers(command)
        recording.dispatch(command.kernel, command.variant, numbers, tensors, command.groups, waits)
    return recording


def _part(memory: Mapping[str, Words], item: Range) -> Words:
    """Return the words of a range, which is of whole ones."""
    assert item.start % 4 == item.end % 4 == 0, item
    return memory[item.resource][item.start // 4 : item.end // 4]
