"""Which experts are pinned to their slots, and when that is chosen anew.

Pinned are residents, chosen once by the options, and the experts used most of late. Owns both
lists, the uses that residents are chosen by, and the choices, in which ties go to the lower number.
Does not own slots: it answers with changes, which residency.py carries out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import Keys, KeySpace
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec

__all__ = ["PinChange", "Pinning", "fill"]

Uses = NDArray[Any]  # whole or decayed uses [n_keys]


class PinChange(NamedTuple):
    """Lists numbers of experts: those that lose their pin, then those that get one."""

    freed: list[int]
    pinned: list[int]


class Pinning:
    """Chooses pins by the settings, for the layers that have slots."""

    def __init__(self, space: KeySpace, pools: Sequence[PoolSpec], settings: CacheSettings) -> None:
        self._space, self._pools, self._settings = space, tuple(pools), settings
        self._residents: list[int] = []
        self._warm: list[int] = []
        self._uses = np.zeros(space.n_keys, np.int64)  # undecayed, for the choice of residents
        self._n_tokens = 0
        self.warm_at: int | None = None  # tokens seen when pins were last chosen by use
        layers = np.array(sorted(layer for pool in pools for layer in pool.layers), np.int64)
        # Numbers of the experts of each layer with slots: [n such layers, n_experts].
        self._numbers = layers[:, None] * space.n_experts + np.arange(space.n_experts)

    @property
    def keys(self) -> Keys:
        """Return the numbers of all pinned experts."""
        return np.array(sorted({*self._residents, *self._warm}), np.int64)

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
            self._uses[keys] += 1

    @property
    def is_due(self) -> bool:
        """Return whether pins are to be chosen after this token."""
        return bool(self._pools) and (self._warm_is_due or self._residents_are_due)

    def choose(self, counts: Uses) -> Iterator[PinChange]:
        """Yield the changes that are due; `counts` [n_keys] know of the token."""
        if self._warm_is_due:
            yield self._choose_warm(counts)
        if self._residents_are_due:
            self.warm_at = self._n_tokens
            yield self._choose_residents(self._most_used(self._uses))

    # ----- inside -----

    @property
    def _warm_is_due(self) -> bool:
        settings = self._settings
        return settings.warmpin > 0 and self._n_tokens % settings.warmpin_after == 0

    @property
    def _residents_are_due(self) -> bool:
        settings = self._settings
        return settings.selection == "frequency" and self._n_tokens == settings.warmup_tokens

    def _choose_residents(self, keys: list[int]) -> PinChange:
        """Make these the residents, and those before them ordinary experts."""
        freed = set(self._residents) - set(keys) - set(self._warm)
        self._residents = keys
        return PinChange(sorted(freed), keys)

    def _choose_warm(self, counts: Uses) -> PinChange:
        """Pin the hottest experts of each layer, at most half of every pool, instead of others."""
        before, n = self._warm, self._settings.warmpin
        self._warm = _hottest(counts, self._pools, self._space, n, self._residents)
        self.warm_at = self._n_tokens if self._warm else self.warm_at
        freed = set(before) - set(self._warm) - set(self._residents)
        new = set(self._warm) - set(before)
        return PinChange(sorted(freed), [key for key in self._warm if key in new])

    def _most_used(self, values: Uses) -> list[int]:
        return _most_used(values, self._numbers, self._settings.n_resident)

    def _listed(self) -> list[int]:
        ids = list(range(self._space.n_experts))
        if self._settings.selection == "manual":
            ids = list(self._settings.resident_ids)
        chosen: list[int] = self._numbers[:, ids[: self._settings.n_resident]].reshape(-1).tolist()
        return chosen


def fill(values: Uses, pool: PoolSpec, space: KeySpace) -> list[int]:
    """Return used experts for all slots of a pool, the most used first; layers get their floor."""
    rows = np.stack([space.numbers(layer) for layer in pool.layers])
    chosen = _most_used(values, rows, pool.floor)
    rest = set(rows.reshape(-1).tolist()) - set(chosen)
    chosen += sorted(rest, key=lambda key: (-values[key], key))
    return [key for key in chosen if values[key] > 0][: pool.capacity]


def _most_used(values: Uses, rows: NDArray[np.int64], n: int) -> list[int]:
    """Return the `n` most used of each row of numbers [n_rows, n_experts]."""
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
