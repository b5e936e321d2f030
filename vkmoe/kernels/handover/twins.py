"""This module has the NumPy twins of find_experts.comp and join_rows.comp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.kernels.matvec.twins import Floats, HiddenState
from vkmoe.kernels.router.twins import AT_HOME


def find_experts(routing: NDArray[np.uint32], entries: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return a row's routing, uint32 [6 * n_used], with the addresses of a table [n_experts].

    Experts that have one come first; both kinds keep their order.
    """
    n_used = len(routing) // 6
    ids, weights = routing[:n_used], routing[n_used : 2 * n_used]
    places = entries[np.minimum(ids, len(entries) - 1)] & ~AT_HOME
    order = np.argsort(places == 0, kind="stable")
    partners = np.zeros(2 * n_used, np.uint32)
    return np.concatenate([ids[order], weights[order], places[order].view(np.uint32), partners])


def join_rows(given: Floats, hidden: Floats, gain: Floats) -> HiddenState:
    """Compute hidden + given, f32 [width], with the next norm's gain applied beside it."""
    joined = hidden.astype(np.float64) + given.astype(np.float64)
    return HiddenState(joined, joined * gain.astype(np.float64))
