"""Between the submits of a token that is cut at its routers: the experts of the next layer to run.

Has them where the next submit can read them, and begins to move what they let expect of the layer
after it. Does not decide who leaves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.store.host_pool import HostPool
from vkmoe.experts.store.tier import Tier

__all__ = ["LayerSteps"]

Keys = NDArray[np.int64]
Mask = NDArray[np.bool_]


class LayerSteps:
    """Owns which experts are about to be run, and who of the token's was found in a slot."""

    def __init__(
        self,
        residency: Residency,
        tier: Tier,
        pool: HostPool | None,
        budget: Callable[[], float],
    ) -> None:
        """`budget`: how many bytes may be copied ahead."""
        self._residency, self._tier, self._pool, self._budget = residency, tier, pool, budget
        self._in_slots: Mask = residency.published.reshape(-1)  # a view
        self._left: float | None = None  # bytes a token may still copy ahead, from its first hint
        self._next: tuple[int, Keys] | None = None  # layer and experts of the next submit
        self._hits: dict[int, Mask] = {}  # by layer
        self.n_hinted = 0

    def forget(self) -> None:
        """A token begins, whatever became of the last one."""
        self._next = None
        self._hits.clear()
        self._left = None

    def need(self, layer: int, experts: NDArray[np.uint32]) -> None:
        """The next submit uses these [n_used] of a layer. Waits for the file.

        Raises ModelFileError where it cannot be read.
        """
        keys = experts.astype(np.int64) + layer * self._residency.space.n_experts
        self._next = (layer, keys)
        self.fetch(keys)
        guessed = self._residency.guess_next_layer(layer, experts)
        if guessed.size:
            self._hint(guessed, keys)

    def fetch(self, keys: Keys) -> None:
        """Have these in a slot or in the host pool. Raises ModelFileError."""
        if self._pool is not None:
            self._pool.need(keys, self._kept(keys), lambda: self._make_room(keys))

    def begin(self) -> None:
        """The next submit begins: who is in a slot now is a hit."""
        if self._next is not None:
            layer, keys = self._next
            self._hits[layer] = self._in_slots[keys]

    def hits(self, keys: Keys) -> Mask:
        """Which of these [n_layers, n_used] the token that is over found in a slot."""
        hits: Mask = self._in_slots[keys]
        for layer, row in self._hits.items():
            hits[layer] = row
        return hits

    # ----- inside -----

    def _kept(self, keys: Keys) -> Mask:
        """Who may not leave the pool [n_keys]: those needed now, and those being copied from."""
        kept = np.zeros(self._residency.space.n_keys, np.bool_)
        kept[keys] = True
        kept[list(self._tier.moving)] = True
        return kept

    def _make_room(self, keys: Keys) -> Mask:
        """Wait until nobody is copied from the pool; who may not leave it then."""
        self._tier.start_blocked(wait=True)
        self._tier.collect(wait=True)
        return self._kept(keys)

    def _hint(self, guessed: Keys, keys: Keys) -> None:
        """Begin to move what the next layer is expected to use, while `keys` are run."""
        tier, before = self._tier, self._tier.pending_bytes
        if self._left is None:
            self._left = self._budget() - before
        if self._pool is not None:
            self._pool.want(guessed, self._kept(keys))
            guessed = guessed[self._pool.residency.published[guessed]]
        outer, tier.torn = tier.torn, True
        moves = self._residency.hint(guessed.tolist(), keys, self._left)
        self.n_hinted += len(moves)
        tier.bring(moves)
        tier.torn = outer
        self._left -= tier.pending_bytes - before
