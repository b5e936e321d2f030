"""Appends gather.comp, which copies missed experts to their landing places."""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Bound, Range, TensorRef, workgroup_lines
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.router.operations import RoutingLog

GATHER = kernel(
    "gather",
    "r:routing r:params w:log",
    "u32:n_slots u32:n_units u32:first_filled u32:routing_pitch",
    "workgroup_size",
)
GATHER_WORKGROUP, UNITS_PER_LANE, UNIT_BYTES = 64, 8, 16
GROUP_BYTES = GATHER_WORKGROUP * UNITS_PER_LANE * UNIT_BYTES  # what a workgroup gathers


@dataclass(frozen=True)
class LandingMemory:
    """Describes the memory of a layer's landing places, and where what was stored is noted.

    That is in the layer's filled words of `log`, MoE layers counted as the log does.
    """

    ranges: tuple[Range, ...]
    log: RoutingLog
    layer: int

    @property
    def n_used(self) -> int:
        """Count the used experts of a row, each of which may have a place."""
        return self.log.n_used

    @property
    def first_word(self) -> int:
        """Find the word of the log at which the layer's filled words begin."""
        return self.log.filled(self.layer).start // 4

    @property
    def bound(self) -> Bound:
        return Bound(self.log.tensor, self.log.filled(self.layer))


def gather(
    op: OpContext,
    routing: TensorRef,
    params: TensorRef,
    landing: LandingMemory,
    span_bytes: int,
    homes: tuple[Range, ...],
) -> None:
    """Copy the span of each used expert that has a partner from there to the expert's address.

    Only those of one row of the batch do. `homes` are the bytes the partners may lie in. Notes both
    words of a copied expert, and zeros for the others of all rows.
    """
    assert span_bytes % UNIT_BYTES == 0 and op.n_rows <= landing.log.n_tokens
    op.append(
        GATHER.dispatch(
            "gather",
            {
                "workgroup_size": GATHER_WORKGROUP,
                "n_slots": landing.n_used,
                "n_units": span_bytes // UNIT_BYTES,
                "first_filled": landing.first_word,
                "routing_pitch": routing.row_words,
            },
            {"routing": routing.rows(op.n_rows), "params": params, "log": landing.bound},
            (*workgroup_lines(-(-span_bytes // GROUP_BYTES)), landing.n_used),
            op.label,
            reads=homes,
            writes=landing.ranges,
        )
    )
