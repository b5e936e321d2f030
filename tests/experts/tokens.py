"""What a token does to a residency: it is observed, and what moves is decided."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.locations import Move
from vkmoe.experts.decide.residency import NOTHING_KNOWN, Residency
from vkmoe.experts.decide.token_table import Upcoming


def after_token(
    residency: Residency,
    ids: NDArray[np.uint32],
    landed: Sequence[int] = (),
    budget_bytes: float = inf,
    token: int | None = None,
    upcoming: Upcoming = NOTHING_KNOWN,
) -> list[Move]:
    """Observe one token that used `ids` [n_layers, n_used]; return what is to move then."""
    residency.observe(ids[None], [token])
    residency.learn()
    return residency.decide(landed, budget_bytes, upcoming)
