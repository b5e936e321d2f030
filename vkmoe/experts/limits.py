"""What keeps an expert out of a slot although somebody may leave for it: worth, and a budget."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.moves import FREE

__all__ = ["NO_LIMITS", "Limits", "Proposals", "by_worth"]

Keys = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Limits(NamedTuple):
    """Newcomers must be worth more than `margin` times who leaves; pinned ones enter anyway.

    Slots that are given away have at most `budget_bytes`, worth or not.
    """

    worth: NDArray[np.float64] | None = None  # [n_keys]
    margin: float = 1.0
    budget_bytes: float = inf


NO_LIMITS = Limits()


def by_worth(newcomers: Keys, pinned: Mask, worth: NDArray[np.float64]) -> Keys:
    """The pinned ones first, then those worth most; equals in the order they came."""
    order = np.argsort(-np.where(pinned[newcomers], inf, worth[newcomers]), kind="stable")
    ordered: Keys = newcomers[order]
    return ordered


class Proposals(NamedTuple):
    """Newcomers and who would leave for each (FREE: nobody), by pool, in their turn there."""

    pools: Keys
    keys: Keys
    victims: Keys
    turns: Keys  # the place of each among all newcomers

    def chosen(self, which: Mask) -> Proposals:
        return Proposals(*(column[which] for column in self))

    def within(self, limits: Limits, pinned: Mask, slot_bytes: NDArray[np.int64]) -> Proposals:
        """Those that the limits let in; `pinned` [n_keys], `slot_bytes` [n_pools]."""
        found = self
        if limits.worth is not None and len(found.keys):
            found = found.chosen(found._worthwhile(limits.worth, limits.margin, pinned))
        if limits.budget_bytes < inf and len(found.keys):
            found = found.chosen(found._affordable(slot_bytes, limits.budget_bytes))
        return found

    def _worthwhile(self, worth: NDArray[np.float64], margin: float, pinned: Mask) -> Mask:
        """In each pool those up to the first that is not worth its victim.

        Those after it are worth less, and their victims would leave later.
        """
        keys, victims = self.keys, self.victims
        enters = (victims == FREE) | pinned[keys] | (worth[keys] > margin * worth[victims])
        first_out = np.full(self.pools.max() + 1, len(keys))
        out = np.flatnonzero(~enters)
        np.minimum.at(first_out, self.pools[out], out)
        before: Mask = np.arange(len(keys)) < first_out[self.pools]
        return before

    def _affordable(self, slot_bytes: NDArray[np.int64], budget_bytes: float) -> Mask:
        """Those up to the first, in their turns, that the budget has no room for."""
        order = np.argsort(self.turns)
        total = slot_bytes[self.pools[order]].cumsum()
        fits = np.zeros(len(order), np.bool_)
        fits[order[total <= budget_bytes]] = True
        return fits
