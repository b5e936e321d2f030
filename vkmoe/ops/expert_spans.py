"""This module lays out an expert: how its tensors lie in a span, which moves as a whole.

Owns no kernel; expert_gate_up and expert_down read spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.quants.types import TYPES

__all__ = ["ExpertShape", "SpanBiases", "SpanMatrix", "kept_bytes"]


@dataclass(frozen=True)
class SpanMatrix:
    """Describes one matrix of an expert: where it starts in the span, and its form."""

    type: str
    offset: int
    n_rows: int
    n_columns: int
    row_bytes: int

    @property
    def n_blocks(self) -> int:
        return self.n_columns // BLOCK_WEIGHTS[self.type]

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


class SpanBiases(NamedTuple):
    """Says where the biases start in a span, in bytes: f32 vectors, one number for each row."""

    gate: int
    up: int
    down: int


@dataclass(frozen=True)
class ExpertShape:
    """Lays out one expert's span, the same for all experts of a layer."""

    gate: SpanMatrix
    up: SpanMatrix
    down: SpanMatrix
    span_bytes: int
    biases: SpanBiases | None = None


def kept_bytes(shape: ExpertShape) -> NDArray[np.bool_]:
    """Mark the bytes of a span [span_bytes] that kernels read, and so store in landing places.

    They are all of its biases and matrices but the padding at the end of rows.
    """
    kept = np.zeros(shape.span_bytes, np.bool_)
    for matrix in (shape.gate, shape.up, shape.down):
        row_bytes = TYPES[matrix.type].row_bytes(matrix.n_columns)
        rows = kept[matrix.offset : matrix.offset + matrix.n_bytes]
        rows.reshape(matrix.n_rows, matrix.row_bytes)[:, : -(-row_bytes // 4) * 4] = True
    if biases := shape.biases:
        starts = ((biases.gate, shape.gate), (biases.up, shape.up), (biases.down, shape.down))
        for start, matrix in starts:
            kept[start : start + 4 * matrix.n_rows] = True
    return kept
