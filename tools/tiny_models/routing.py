"""Which experts a router must choose, and how narrowly.

Computed from the router's logits apart from transformers, and held against its choice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Groups(NamedTuple):
    """Experts can be chosen from the `n_used` best of `n_groups` groups of neighbours only.

    A group is as good as the sum of its `n_best` best experts (DeepSeek-V2: 1, DeepSeek-V3: 2).
    """

    n_groups: int
    n_used: int
    n_best: int


class Choice(NamedTuple):
    """The experts of each token [tokens, top_k], best first, and the narrowest margin [tokens]."""

    ids: NDArray[np.int16]
    margin: NDArray[np.float32]


def choose(scores: NDArray[Any], top_k: int, groups: Groups | None = None) -> Choice:
    """The `top_k` best of `scores` [tokens, experts], from the best groups.

    The margin is the score of the last one chosen less that of the first one left out, of experts
    or of groups; infinite where none is left out.
    """
    margin = np.full(len(scores), np.inf, np.float32)
    if groups is not None:
        grouped = scores.reshape(len(scores), groups.n_groups, -1)
        worth = np.sort(grouped, axis=-1)[..., -groups.n_best :].sum(axis=-1)
        best = choose(worth, groups.n_used)
        margin, allowed = best.margin, np.zeros(worth.shape, bool)
        np.put_along_axis(allowed, best.ids.astype(np.int64), True, axis=-1)
        scores = np.where(allowed[..., None], grouped, -np.inf).reshape(scores.shape)
    order = np.argsort(-scores, axis=-1, kind="stable")
    if top_k < scores.shape[-1]:
        ranked = np.take_along_axis(scores, order, axis=-1)
        margin = np.minimum(margin, ranked[:, top_k - 1] - ranked[:, top_k])
    return Choice(order[:, :top_k].astype(np.int16), margin.astype(np.float32))
