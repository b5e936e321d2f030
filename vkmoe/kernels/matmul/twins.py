"""This module has the NumPy twins of matmul.comp and expert_matmul.comp.

They compute in float64 on decoded weights, for all rows of a batch; experts for pairs of a row and
one of its experts. `half_bound` says how far the kernels that multiply f16 may be off,
`matrix_bound` those that do so on matrix units.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.kernels.matvec.twins import Floats

HALF_UNIT = 2.0**-11  # what rounding to f16 changes a number by, over the number


def matmul(weights: Floats, x: Floats, bias: Floats | float = 0.0) -> NDArray[np.float64]:
    """Compute x @ weights^T + bias: [n, n_rows].

    weights [n_rows, n_columns], x [n, n_columns], bias [n_rows].
    """
    result: NDArray[np.float64] = x.astype(np.float64) @ weights.astype(np.float64).T + bias
    return result


def half_bound(weights: Floats, x: Floats) -> NDArray[np.float64]:
    """Bound the error of x @ weights^T where tiles are of f16 (tile_half.glsl): [n, n_rows].

    Say S is the sum of |w * x|, u = 2^-11, W and X the largest |w| and |x| of a chunk. Scaled by
    powers of two to [16, 32), w and x are rounded by u of each, or flushed by 2^-18 of W and X:
    2 u S + 2^-18 (W sum |x| + X sum |w|). A chunk has 16 even and 16 odd products. Each is added
    with an error of u of the sum so far, and of u of itself where fma is not fused; then the two
    sums are added: 18 u S in all. What is flushed of 34 sums, 2^-22 W X each, is below
    2^-16.9 X sum |w|. Sums of chunks are f32, and what that changes is left to the caller.
    """
    n_columns = weights.shape[1]
    n_block = 256 if n_columns % 256 == 0 else 32  # chunks lie in blocks, whatever the type
    w, values = (
        np.abs(each.astype(np.float64)).reshape(len(each), -1, n_block) for each in (weights, x)
    )
    flushed = matmul(w.max(2), values.sum(2)) + matmul(w.sum(2), values.max(2))
    rounded = matmul(np.abs(weights), np.abs(x))
    result: NDArray[np.float64] = 20.1 * HALF_UNIT * rounded + 2.0**-16 * flushed
    return result


def matrix_bound(weights: Floats, x: Floats) -> NDArray[np.float64]:
    """Bound the error of x @ weights^T on matrix units (tile_matrix.glsl): [n, n_rows].

    Say S is the sum of |w * x|, u = 2^-11, W and X the largest |w| and |x| of a row and a column.
    Divided by units of at most W / 16 and X / 16, w and x are rounded by u of each, or flushed by
    2^-14 of the unit: 2 u S + 2^-18 (W sum |x| + X sum |w|). Matrix units add in an order of their
    own, in f32 or a little less: 2^-22 S for each product at worst.
    """
    w, values = (np.abs(each.astype(np.float64)) for each in (weights, x))
    flushed = np.outer(values.sum(1), w.max(1)) + np.outer(values.max(1), w.sum(1))
    of_sums = weights.shape[1] * 2.0**-22
    result: NDArray[np.float64] = (2.01 * HALF_UNIT + of_sums) * matmul(w, values)
    return result + 2.0**-18 * flushed


def expert_matmul(
    weights: Floats, x: Floats, experts: NDArray[np.integer], biases: Floats
) -> NDArray[np.float64]:
    """Compute weights @ x[pair] + bias of pairs' experts, unweighted: [n_pairs, n_rows].

    weights [n_experts, n_rows, n_columns], biases [n_experts, n_rows], x [n_pairs, n_columns],
    experts [n, n_used].
    """
    result = np.zeros((len(x), weights.shape[1]))
    ids = experts.reshape(-1)
    for expert in np.unique(ids):
        result[ids == expert] = matmul(weights[expert], x[ids == expert], biases[expert])
    return result
