"""What keeps an expert out of a slot although somebody may leave for it: worth, and a budget."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.moves import FREE

__all__ = ["NO_LIMITS", "Limits", "Proposals"]

Keys = NDArray[np.int64]
Mask = NDArray[np.bool_]
Values = NDArray[np.float64]


class Limits(NamedTuple):
    """Newcomers enter whose bid is more than what their victim is worth; pinned ones anyway.

    Copies into slots have at most `budget_bytes`; the first `n_landed` newcomers need none.
    """

    bids: Values | None = None  # [n newcomers]; None: everybody enters
    worth: Values | None = None  # [n_keys]; with bids
    budget_bytes: float = inf
    n_landed: int = 0


NO_LIMITS = Limits()


class Proposals(NamedTuple):
    """Newcomers and who would leave for each (FREE: nobody), by pool, in their order there."""

    pools: Keys
    keys: Keys
    victims: Keys
    turns: Keys  # the place of each among all newcomers

    def within(self, limits: Limits, pinned: Mask, slot_bytes: Keys) -> Proposals:
        """Those that the limits let in; `pinned` [n_keys], `slot_bytes` [n_pools]."""
        found = self
        if limits.bids is not None and limits.worth is not None and len(found.keys):
            found = found.chosen(found._worthwhile(limits.bids, limits.worth, pinned))
        if limits.budget_bytes < inf and len(found.keys):
            found = found.chosen(found._affordable(slot_bytes, limits))
        return found

    def chosen(self, which: Mask) -> Proposals:
        return Proposals(*(column[which] for column in self))

    def _worthwhile(self, bids: Values, worth: Values, pinned: Mask) -> Mask:
        """In each pool those up to the first that bids too little.

        Those after it bid less, and their victims would leave later.
        """
        enters = (self.victims == FREE) | pinned[self.keys]
        enters |= bids[self.turns] > worth[self.victims]
        out = np.flatnonzero(~enters)
        first_out = np.full(self.pools.max() + 1, len(enters))
        first_out[self.pools[out[::-1]]] = out[::-1]  # the first of a pool is written last
        before: Mask = np.arange(len(enters)) < first_out[self.pools]
        return before

    def _affordable(self, slot_bytes: Keys, limits: Limits) -> Mask:
        """Those up to the first, in their turns, that the budget has no room for."""
        order = np.argsort(self.turns)
        cost = np.where(self.turns < limits.n_landed, 0, slot_bytes[self.pools])
        fits = np.zeros(len(order), np.bool_)
        fits[order[cost[order].cumsum() <= limits.budget_bytes]] = True
        fits |= cost == 0
        return fits
