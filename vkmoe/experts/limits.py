"""What keeps an expert out of a slot although somebody may leave for it: worth, and a budget."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_LIMITS", "Limits"]

Values = NDArray[np.float64]


class Limits(NamedTuple):
    """Newcomers enter whose bid is more than what their victim is worth; pinned ones anyway.

    Copies into slots have at most `budget_bytes`; the first `n_landed` newcomers need none.
    """

    bids: Values | None = None  # [n newcomers]; None: everybody enters
    worth: Values | None = None  # [n_keys]; with bids
    budget_bytes: float = inf
    n_landed: int = 0

    def lets_in(self, newcomer: int, victim: int) -> bool:
        """Whether the newcomer of this index may take the victim's slot, as far as worth goes."""
        if self.bids is None or self.worth is None:
            return True
        return self.bids.item(newcomer) > self.worth.item(victim)


NO_LIMITS = Limits()
