"""Brings the experts of the next layer into memory, where a token is cut at its routers.

Begins to move what they let expect of the layer after it. Owns which experts are about to be run,
and which of the tokens' were found in a slot; does not decide which leave.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import NO_KEYS, Keys, Mask
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.store.copies import CopyBudget
from vkmoe.experts.store.tier import HostPool, Tier


class LayerSteps:
    """Follows a token from layer to layer. Works on parts of the cache, and owns none."""

    def __init__(
        self, residency: Residency, tier: Tier, pool: HostPool | None, budget: CopyBudget | None
    ) -> None:
        """Work on a cache's parts; `budget` says how many bytes may be copied ahead."""
        self._residency, self._tier, self._pool, self._budget = residency, tier, pool, budget
        self._left: float | None = None  # bytes a token may still copy ahead, from its first hint
        self._next: tuple[int, Keys] | None = None  # layer and experts of the next submit
        self._hits: dict[int, Mask] = {}  # by layer: of its experts, those needed and in a slot
        self.n_hinted = 0

    def forget(self) -> None:
        """Begin a token, whatever became of the last one: Ctrl-C may have ended it early."""
        self._next = None
        self._hits.clear()

    def over(self) -> None:
        """Note that a token is over, and with it what it may copy ahead."""
        self._left = None

    def need(self, layer: int, experts: NDArray[np.uint32], guess: bool) -> None:
        """Do what `ExpertCache.need` says."""
        used = experts.reshape(-1).astype(np.int64) + layer * self._residency.space.n_experts
        self._next = (layer, used)
        self.fetch(used)
        for _ in experts if guess else ():  # as many as each row uses
            guessed = self._residency.guess_layer(layer + 1)
            if guessed.size:
                self._hint(guessed, used)

    def guess_first(self) -> None:
        """Begin to move what the first layer of the next run is expected to use."""
        guessed = self._residency.guess_layer(0)
        if guessed.size:
            self._hint(guessed, NO_KEYS)

    def fetch(self, keys: Keys) -> None:
        """Ensure that experts are in a slot or in the host pool. Raises ModelFileError."""
        if self._pool is not None:
            self._pool.need(keys, self._kept(keys), lambda: self._make_room(keys))

    def begin(self) -> None:
        """Note the hits of a submit that begins: the experts that are in a slot now."""
        if self._next is not None:
            layer, keys = self._next
            n_experts = self._residency.space.n_experts
            hits = self._hits.setdefault(layer, np.zeros(n_experts, np.bool_))
            hits[keys % n_experts] = self._residency.locations.are_present(keys)

    def hits(self, keys: Keys) -> Mask | None:
        """Return which of `keys` [n_tokens, n_layers, n_used] were found in a slot.

        None: those that are there now, as where a run is one submit.
        """
        if not self._hits:
            return None
        hits = self._residency.locations.are_present(keys)
        for layer, of_experts in self._hits.items():
            hits[:, layer] = of_experts[keys[:, layer] % len(of_experts)]
        return hits

    def _kept(self, keys: Keys) -> Mask:
        """Mark which may not leave the pool [n_keys]: those needed now or being copied from."""
        kept = self._residency.locations.arriving
        kept[keys] = True
        return kept

    def _make_room(self, keys: Keys) -> Mask:
        """Wait until none is copied from the pool; return which may not leave it then."""
        self._tier.start_waiting(wait=True)
        self._tier.collect(wait=True)
        return self._kept(keys)

    def _hint(self, guessed: Keys, keys: Keys) -> None:
        """Begin to move what the next layer is expected to use, while `keys` are run."""
        tier = self._tier
        before = tier.pending_bytes if self._budget is not None else 0
        if self._left is None:
            self._left = inf if self._budget is None else self._budget.n_bytes - before
        if self._pool is not None:
            self._pool.want(guessed, self._kept(keys))
            guessed = guessed[self._pool.locations.are_present(guessed)]
        moves = self._residency.hint(guessed, keys, self._left)
        self.n_hinted += len(moves)
        tier.bring(moves)
        if self._budget is not None:
            self._left -= tier.pending_bytes - before
