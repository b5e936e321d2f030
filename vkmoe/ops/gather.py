"""Copies the missed experts of a layer from their homes to landing places, in the same submit.

Shader: gather.comp. Twin: vkmoe/reference/memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef

__all__ = ["GROUP_BYTES", "LandingMemory", "gather"]

GATHER = kernel(
    "gather", "r:routing w:log", "u32:n_slots u32:n_units u32:first_filled", "workgroup_size"
)
WORKGROUP_SIZE, UNITS_PER_LANE, UNIT_BYTES = 64, 8, 16
GROUP_BYTES = WORKGROUP_SIZE * UNITS_PER_LANE * UNIT_BYTES  # what a workgroup copies


@dataclass(frozen=True)
class LandingMemory:
    """Describes the memory of a layer's landing places, and where what was stored is noted.

    `filled` are the layer's words of `log`, see `RoutingLog`.
    """

    ranges: tuple[Range, ...]
    log: TensorRef
    filled: Range

    @property
    def n_used(self) -> int:
        """Count the slots that may have a place, which are the routed ones."""
        return (self.filled.end - self.filled.start) // 8

    @property
    def first_word(self) -> int:
        """Find the word of the log at which `filled` begins."""
        return self.filled.start // 4


def gather(
    program: Program,
    routing: TensorRef,
    landing: LandingMemory,
    span_bytes: int,
    homes: tuple[Range, ...],
    label: str,
) -> None:
    """Copy the span of each used slot that has a partner from there to the slot's address.

    `homes` are the bytes the partners may lie in. Notes both words of a copied slot.
    """
    assert span_bytes % UNIT_BYTES == 0
    program.append(
        GATHER.dispatch(
            "gather",
            {"workgroup_size": WORKGROUP_SIZE},
            {"routing": routing, "log": landing.log},
            {
                "n_slots": landing.n_used,
                "n_units": span_bytes // UNIT_BYTES,
                "first_filled": landing.first_word,
            },
            (-(-span_bytes // GROUP_BYTES), landing.n_used, 1),
            label,
            ranges={"log": landing.filled},
            memory_reads=homes,
            memory_writes=landing.ranges,
        )
    )
