"""This module says what the loop over tokens needs of a model, and runs an engine of one row.

Owns no memory: regions of the KV caches are the model's, and regions.py knows what is in them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import RunResult, TokenBatch

__all__ = ["BatchRunner", "RowByRow", "TokenRunner"]


class BatchRunner(Protocol):
    """Describes a model that runs batches of rows over several sequences.

    A batch is of one phase. Rows of a region come in order of positions, each right behind what is
    in the region; all rows of a region in one batch stand together.
    """

    @property
    def ctx_size(self) -> int:
        """Return how many positions each region has."""

    @property
    def n_regions(self) -> int:
        """Return how many sequences the KV caches hold at once."""

    @property
    def max_decode_rows(self) -> int:
        """Return the most rows of a decode batch, and the most of any batch that want logits."""

    @property
    def prompt_rows(self) -> int:
        """Return the most rows of a prompt batch now; it may change from batch to batch."""

    @property
    def rows_alike(self) -> bool:
        """Say whether a prompt row leaves the bits of a decode row in the KV caches."""

    def run(self, batch: TokenBatch) -> RunResult:
        """Process a batch; its result has the largest logits of each row that wants any."""

    def full_logits(self, index: int) -> NDArray[np.float32]:
        """Return all logits [n_vocab] of the index-th row of the last batch that wanted logits."""

    def rewind(self, region: int, position: int) -> int:
        """Go back to `position` in a region, or further where the state cannot stop just there.

        Returns the position from which tokens have to be run (again): at most `position`.
        """

    def copy_region(self, source: int, target: int, n_positions: int) -> None:
        """Make the first positions of one region those of another; it holds no others then."""


class TokenRunner(Protocol):
    """Describes a model that runs one row of one sequence."""

    @property
    def ctx_size(self) -> int: ...

    def run(self, batch: TokenBatch) -> RunResult: ...

    def rewind(self, position: int) -> int: ...

    def full_logits(self) -> NDArray[np.float32]: ...


class RowByRow:
    """Runs batches of one sequence row by row, as a `BatchRunner`."""

    n_regions = 1
    rows_alike = True

    def __init__(self, model: TokenRunner, max_decode_rows: int = 1, prompt_rows: int = 1) -> None:
        self.max_decode_rows, self.prompt_rows = max_decode_rows, prompt_rows
        self._model = model
        self._logits: list[NDArray[np.float32]] = []  # of the rows that wanted any, but the last

    @property
    def ctx_size(self) -> int:
        return self._model.ctx_size

    def run(self, batch: TokenBatch) -> RunResult:
        self._logits, results = [], []
        n_left = sum(batch.wants_logits)
        columns = batch.tokens, batch.positions, batch.sequences, batch.wants_logits
        for token, position, sequence, wants in zip(*columns, strict=True):
            row = TokenBatch((token,), (position,), (sequence,), (wants,), batch.phase)
            results.append(self._model.run(row))
            n_left -= wants
            if wants and n_left:  # the next row that wants logits overwrites them
                self._logits.append(self._model.full_logits().copy())
        filled = [result.filled for result in results if result.filled is not None]
        return RunResult(
            np.concatenate([result.routing for result in results]),
            np.concatenate(filled) if filled else None,
            tuple(top for result in results for top in result.tops),
        )

    def full_logits(self, index: int) -> NDArray[np.float32]:
        return self._logits[index] if index < len(self._logits) else self._model.full_logits()

    def rewind(self, region: int, position: int) -> int:
        return self._model.rewind(position)

    def copy_region(self, source: int, target: int, n_positions: int) -> None:
        raise AssertionError("there is one region")
