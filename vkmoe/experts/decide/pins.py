"""Which experts are pinned to their slots, and when that is chosen anew.

Pinned are residents, chosen once by the options, and the experts used most of late. Owns the uses
that residents are chosen by, and the choices, in which ties go to the lower key. Does not own the
pins (locations.py): it answers with changes, which residency.py carries out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import Keys, KeySpace
from vkmoe.experts.decide.locations import ASKED, BY_USE, Locations
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec

__all__ = ["PinChange", "Pinning", "fill"]

Uses = NDArray[Any]  # whole or decayed uses [n_keys]


class PinChange(NamedTuple):
    """Lists the keys that are to be pinned for a reason, and no others, and the new among them."""

    reason: int
    keys: list[int]
    new: list[int]  # in the order in which they get slots


class Pinning:
    """Chooses pins by the settings, for the layers that have slots."""

    def __init__(self, locations: Locations, settings: CacheSettings) -> None:
        self._locations, self._settings = locations, settings
        self._space, self._pools = space, pools = locations.space, locations.pools
        self._uses = np.zeros(space.n_keys, np.int64)  # undecayed, for the choice of residents
        self._n_tokens = self._n_looked = 0  # tokens noted, and those at the last choice
        self.warm_at: int | None = None  # tokens seen when pins were last chosen by use
        layers = np.array(sorted(layer for pool in pools for layer in pool.layers), np.int64)
        # Keys of the experts of each layer with slots: [n such layers, n_experts].
        self._rows = layers[:, None] * space.n_experts + np.arange(space.n_experts)

    def at_start(self, seed: Uses | None) -> Iterator[PinChange]:
        """Yield the changes before the first token; `seed` are counts of an earlier run."""
        selection = self._settings.selection
        if selection in ("first_n", "manual"):
            yield self._choose_residents(self._listed())
        elif selection == "frequency" and seed is not None:
            yield self._choose_residents(self._most_used(seed))
        if seed is not None and self._settings.warmpin:
            yield self._choose_warm(seed)

    def note(self, keys: Keys) -> None:
        """Note that a token used these experts."""
        self._n_tokens += 1
        if self._settings.selection == "frequency":
            np.add.at(self._uses, keys, 1)

    @property
    def is_due(self) -> bool:
        """Return whether pins are to be chosen after the tokens noted since the last choice."""
        return bool(self._pools) and (self._warm_is_due or self._residents_are_due)

    def choose(self, counts: Uses) -> Iterator[PinChange]:
        """Yield the changes that are due; `counts` [n_keys] know of the token."""
        if self._warm_is_due:
            yield self._choose_warm(counts)
        if self._residents_are_due:
            self.warm_at = self._n_tokens
            yield self._choose_residents(self._most_used(self._uses))
        self._n_looked = self._n_tokens

    # ----- inside -----

    @property
    def _warm_is_due(self) -> bool:
        after = self._settings.warmpin_after
        return self._settings.warmpin > 0 and self._n_tokens // after > self._n_looked // after

    @property
    def _residents_are_due(self) -> bool:
        warmup = self._settings.warmup_tokens
        return self._settings.selection == "frequency" and self._n_looked < warmup <= self._n_tokens

    def _choose_residents(self, keys: list[int]) -> PinChange:
        """Make these the residents, and those before them ordinary experts."""
        return PinChange(ASKED, keys, keys)

    def _choose_warm(self, counts: Uses) -> PinChange:
        """Pin the hottest experts of each layer, at most half of every pool, instead of others."""
        before = set(self._pinned(BY_USE))
        residents, n = self._pinned(ASKED), self._settings.warmpin
        warm = _hottest(counts, self._pools, self._space, n, residents)
        self.warm_at = self._n_tokens if warm else self.warm_at
        return PinChange(BY_USE, warm, [key for key in warm if key not in before])

    def _pinned(self, reason: int) -> list[int]:
        """Return the experts that are pinned for a reason."""
        found: list[int] = np.flatnonzero(self._locations.pins & reason).tolist()
        return found

    def _most_used(self, values: Uses) -> list[int]:
        return _most_used(values, self._rows, self._settings.n_resident)

    def _listed(self) -> list[int]:
        ids = list(range(self._space.n_experts))
        if self._settings.selection == "manual":
            ids = list(self._settings.resident_ids)
        chosen: list[int] = self._rows[:, ids[: self._settings.n_resident]].reshape(-1).tolist()
        return chosen


def fill(values: Uses, pool: PoolSpec, space: KeySpace) -> list[int]:
    """Return used experts for all slots of a pool, the most used first; layers get their floor."""
    rows = np.stack([space.keys(layer) for layer in pool.layers])
    chosen = _most_used(values, rows, pool.floor)
    rest = set(rows.reshape(-1).tolist()) - set(chosen)
    chosen += sorted(rest, key=lambda key: (-values[key], key))
    return [key for key in chosen if values[key] > 0][: pool.capacity]


def _most_used(values: Uses, rows: NDArray[np.int64], n: int) -> list[int]:
    """Return the `n` most used of each row of keys [n_rows, n_experts]."""
    order = np.argsort(-values[rows], axis=1, kind="stable")[:, :n]
    chosen: list[int] = np.take_along_axis(rows, order, axis=1).reshape(-1).tolist()
    return chosen


def _hottest(
    values: Uses, pools: Sequence[PoolSpec], space: KeySpace, n: int, taken: Sequence[int]
) -> list[int]:
    """Return up to `n` used experts of each layer with slots; at most half of a pool gets pinned.

    `taken` are pinned already. Where the room is too small for all layers of a pool, those whose
    experts were used most are served first.
    """
    left = values.copy()
    left[list(taken)] = 0
    rows = left.reshape(space.n_layers, space.n_experts)
    best = np.argsort(-rows, axis=1, kind="stable")[:, :n].tolist()
    n_taken = Counter(space.layer(key) for key in taken)
    chosen: list[int] = []
    for pool in pools:
        by_layer = []
        for layer in pool.layers:
            first = layer * space.n_experts
            keys = [first + expert for expert in best[layer] if left[first + expert] > 0]
            by_layer.append((-sum(left[keys].tolist()), layer, keys))
        room = max(0, pool.capacity // 2 - sum(n_taken[layer] for layer in pool.layers))
        chosen += [key for _, _, keys in sorted(by_layer) for key in keys][:room]
    return chosen
