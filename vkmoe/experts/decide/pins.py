"""Chooses which experts are pinned to their slots, and when to choose anew.

Owns the choices, in which ties go to the lower key. Does not own the pins (locations.py): it
answers with changes, which residency.py carries out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.config import Pins
from vkmoe.experts.decide.keys import Keys, KeySpace
from vkmoe.experts.decide.locations import Locations
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec

Uses = NDArray[Any]  # whole or decayed uses [n_keys]


class PinChange(NamedTuple):
    """Lists the keys that a rule pins now, and no others, and the new among them."""

    rule: int  # its bit in the record of pins
    keys: list[int]
    new: list[int]  # in the order in which they get slots


class Pinning:
    """Chooses pins by the rules of the settings, for the layers that have slots."""

    def __init__(self, locations: Locations, settings: CacheSettings) -> None:
        self._locations = locations
        self._rules = {rule: 1 << index for index, rule in enumerate(settings.pins)}
        space, pools = locations.space, locations.pools
        self._n_tokens = self._n_looked = 0  # tokens noted, and those at the last choice
        self.warm_at: int | None = None  # tokens seen when pins were last chosen by use
        layers = np.array(sorted(layer for pool in pools for layer in pool.layers), np.int64)
        # Keys of the experts of each layer with slots: [n such layers, n_experts].
        self._rows = layers[:, None] * space.n_experts + np.arange(space.n_experts)

    def at_start(self, seed: Uses | None) -> Iterator[PinChange]:
        """Yield the changes before the first token; `seed` are counts of an earlier run."""
        for rule in self._rules:
            if rule.by == "ids":
                yield self._change(rule, self._rows[:, list(rule.ids)].reshape(-1).tolist())
            elif seed is not None:
                chosen = self._most_used(rule, seed)
                if chosen:
                    self.warm_at = 0
                yield self._change(rule, chosen)

    def note(self) -> None:
        """Note that a token ran."""
        self._n_tokens += 1

    @property
    def is_due(self) -> bool:
        """Return whether pins are to be chosen after the tokens noted since the last choice."""
        return bool(self._rows.size) and any(map(self._due, self._rules))

    def choose(self, counts: Uses) -> Iterator[PinChange]:
        """Yield the changes that are due; `counts` [n_keys] are decayed and know of the tokens."""
        for rule in self._rules:
            if self._due(rule):
                chosen = self._most_used(rule, counts)
                if chosen:
                    self.warm_at = self._n_tokens
                yield self._change(rule, chosen)
        self._n_looked = self._n_tokens

    # ----- inside -----

    def _due(self, rule: Pins) -> bool:
        return rule.by == "use" and self._n_tokens // rule.after > self._n_looked // rule.after

    def _change(self, rule: Pins, keys: list[int]) -> PinChange:
        """Let a rule pin these experts instead of those before them."""
        bit = self._rules[rule]
        # What stays pinned without a slot is not brought again and again.
        before = set(self._pinned(bit))
        return PinChange(bit, keys, [key for key in keys if key not in before])

    def _most_used(self, rule: Pins, values: Uses) -> list[int]:
        """Return the most used experts of each layer, for a rule that chooses by use.

        It takes used ones only, and at most half of a pool gets pinned. Where the room is too small
        for all its layers, those whose experts were used most come first.
        """
        locations, taken = self._locations, self._pinned(0xFF & ~self._rules[rule])
        left = values.copy()
        left[taken] = 0
        best = _most_used(left, self._rows, rule.n)
        pool_of_row = locations.pool_of[self._rows[:, 0]]
        chosen: list[int] = []
        for index in range(len(locations.pools)):
            rows = best[pool_of_row == index].tolist()
            used = [[key for key in row if left[key] > 0] for row in rows]
            used.sort(key=lambda keys: -sum(left[keys].tolist()))
            n_taken = int(np.count_nonzero(locations.pool_of[taken] == index))
            room = max(0, int(locations.capacities[index]) // 2 - n_taken)
            chosen += [key for keys in used for key in keys][:room]
        return chosen

    def _pinned(self, rules: int) -> list[int]:
        """Return the experts that some of these rules pin."""
        found: list[int] = np.flatnonzero(self._locations.pins & rules).tolist()
        return found


def fill(values: Uses, pool: PoolSpec, space: KeySpace) -> list[int]:
    """Return used experts for all slots of a pool, the most used first; layers get their floor."""
    rows = np.stack([space.keys(layer) for layer in pool.layers])
    chosen: list[int] = _most_used(values, rows, pool.floor).reshape(-1).tolist()
    rest = set(rows.reshape(-1).tolist()) - set(chosen)
    chosen += sorted(rest, key=lambda key: (-values[key], key))
    return [key for key in chosen if values[key] > 0][: pool.capacity]


def _most_used(values: Uses, rows: Keys, n: int) -> Keys:
    """Return the `n` most used of each row of keys [n_rows, n_experts]: [n_rows, n]."""
    order = np.argsort(-values[rows], axis=1, kind="stable")[:, :n]
    return np.take_along_axis(rows, order, axis=1)
