"""Typed face of the native extension that adds up what experts are worth: sums, no decisions.

Each sum has a fixed order. Functions raise TypeError for arrays of another type (those that are
written to must be contiguous too), ValueError for shapes and ids that do not fit; then nothing was
written.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def learn(
    pairs: NDArray[np.float32],
    seen: NDArray[np.float32],
    before: NDArray[np.uint32],
    after: NDArray[np.uint32],
    first: int,
    weight: float,
) -> None:
    """Count that in layers from `first` on each of `after` [n, n_used] followed each of `before`.

    *Mutates* `pairs` [n_layers, n_experts, n_experts] and `seen` [n_layers, n_experts].
    """

def follow(
    pairs: NDArray[np.float32],
    seen: NDArray[np.float32],
    ids: NDArray[np.uint32],
    first: int,
    weight: float,
) -> NDArray[np.float64]:
    """Return the share of the uses of an expert of `ids` [n, n_used] that each expert followed.

    It is averaged over those ids: [n, n_experts]. `weight` is what was never seen counts.
    """

def learn_token(
    experts: NDArray[np.uint16],
    shares: NDArray[np.uint16],
    row: int,
    ids: NDArray[np.uint32],
    n: int,
) -> None:
    """Count in a row that its token used `ids` [n_layers, n_used], as one part in `n`.

    *Mutates* `experts` and `shares` [n_rows, n_layers, width]: which experts a token used, and in
    what share of its occurrences, from 0 (no entry) to 65535. An expert without an entry takes that
    of the smallest share, if that is smaller than its own.
    """

def expect(
    experts: NDArray[np.uint16],
    shares: NDArray[np.uint16],
    rows: Sequence[int],
    factors: Sequence[float],
    n_experts: int,
) -> NDArray[np.float64]:
    """Return the sum of the shares in `rows`, from 0 to 1 and each times its row's factor.

    It is [n_layers, n_experts]; `experts` and `shares` are those of `learn_token`.
    """

def blend(rows: Sequence[NDArray[np.float64]], factors: Sequence[float]) -> NDArray[np.float64]:
    """Return the sum of `rows` [n], each times its factor: [n]. There must be a row."""

def products(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the sums of the products of every two of `rows` [n]: [n_rows, n_rows]."""
