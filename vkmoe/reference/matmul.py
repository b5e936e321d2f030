"""This module has the NumPy twins of matmul.comp and expert_matmul.comp.

They compute in float64 on decoded weights, for all rows of a batch; experts for pairs of a row and
one of its experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.reference.experts import activated
from vkmoe.reference.matvec import Floats

__all__ = ["expert_matmul_down", "expert_matmul_gate_up", "matmul", "matmul_heads"]


def matmul(weights: Floats, x: Floats, bias: Floats | float = 0.0) -> NDArray[np.float64]:
    """Compute x @ weights^T + bias: [n, n_rows].

    weights [n_rows, n_columns], x [n, n_columns], bias [n_rows].
    """
    result: NDArray[np.float64] = x.astype(np.float64) @ weights.astype(np.float64).T + bias
    return result


def matmul_heads(weights: Floats, x: Floats) -> NDArray[np.float64]:
    """Multiply each head's part of x by its weights: [n, n_heads, n_rows].

    weights [n_heads, n_rows, n_columns], x [n, n_heads, n_columns].
    """
    heads = [matmul(weights[h], x[:, h]) for h in range(len(weights))]
    return np.stack(heads, axis=1)


def expert_matmul_gate_up(
    gate: Floats,
    up: Floats,
    x: Floats,
    experts: NDArray[np.integer],
    biases: tuple[Floats, Floats],
    activation: str = "silu",
) -> NDArray[np.float64]:
    """Compute activated(gate @ x, up @ x) of pairs' experts, biases added before: [n_pairs, inner].

    gate, up [n_experts, inner, n_columns], their biases [n_experts, inner], x [n, n_columns];
    experts [n, n_used].
    """
    of_x = np.repeat(x, experts.shape[1], axis=0)
    products = [
        _of_pairs(weights, of_x, experts, bias)
        for weights, bias in zip((gate, up), biases, strict=True)
    ]
    return activated(products[0], products[1], activation)


def expert_matmul_down(
    down: Floats, act: Floats, experts: NDArray[np.integer], biases: Floats
) -> NDArray[np.float64]:
    """Compute down @ act[pair] + bias of pairs' experts, unweighted: [n_pairs, n_rows].

    down [n_experts, n_rows, inner], biases [n_experts, n_rows], act [n_pairs, inner], experts
    [n, n_used].
    """
    return _of_pairs(down, act, experts, biases)


def _of_pairs(
    weights: Floats, x: Floats, experts: NDArray[np.integer], biases: Floats
) -> NDArray[np.float64]:
    """Multiply x [n_pairs, n_columns] by the weights of the pairs' experts."""
    result = np.zeros((len(x), weights.shape[1]))
    ids = experts.reshape(-1)
    for expert in np.unique(ids):
        result[ids == expert] = matmul(weights[expert], x[ids == expert], biases[expert])
    return result
