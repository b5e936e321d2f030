"""Which experts are pinned to their slots, and when that is chosen anew.

Owns the list of every rule for pins, the uses that they are chosen by, and the choices, in which
ties go to the lower number. Does not own slots: it answers with changes, which residency.py carries
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.config import Pins
from vkmoe.experts.decide.keys import Keys, KeySpace
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec

__all__ = ["PinChange", "Pinning", "fill"]

Uses = NDArray[Any]  # whole or decayed uses [n_keys]


class PinChange(NamedTuple):
    """Lists numbers of experts: those that lose their pin, then those that get one."""

    freed: list[int]
    pinned: list[int]


class Pinning:
    """Chooses pins by the rules of the settings, for the layers that have slots."""

    def __init__(self, space: KeySpace, pools: Sequence[PoolSpec], settings: CacheSettings) -> None:
        self._space, self._pools = space, tuple(pools)
        self._chosen: dict[Pins, list[int]] = {rule: [] for rule in settings.pins}
        self._uses = np.zeros(space.n_keys, np.int64)  # undecayed, for what is chosen once
        self._n_tokens = 0
        self.warm_at: int | None = None  # tokens seen when pins were last chosen by use
        layers = np.array(sorted(layer for pool in pools for layer in pool.layers), np.int64)
        # Numbers of the experts of each layer with slots: [n such layers, n_experts].
        self._numbers = layers[:, None] * space.n_experts + np.arange(space.n_experts)

    @property
    def keys(self) -> Keys:
        """Return the numbers of all pinned experts."""
        return np.array(sorted(set().union(*self._chosen.values())), np.int64)

    def at_start(self, seed: Uses | None) -> Iterator[PinChange]:
        """Yield the changes before the first token; `seed` are counts of an earlier run."""
        for rule in self._chosen:
            if rule.by != "use":
                ids = range(rule.n) if rule.by == "first" else rule.ids
                named: list[int] = self._numbers[:, list(ids)].reshape(-1).tolist()
                yield self._change(rule, named)
            elif seed is not None:
                yield self._change(rule, self._most_used(rule, seed))
                if rule.again and self._chosen[rule]:
                    self.warm_at = 0

    def note(self, keys: Keys) -> None:
        """Note that a token used these experts."""
        self._n_tokens += 1
        if any(rule.by == "use" and not rule.again for rule in self._chosen):
            np.add.at(self._uses, keys, 1)

    @property
    def is_due(self) -> bool:
        """Return whether pins are to be chosen after this token."""
        return bool(self._pools) and any(map(self._due, self._chosen))

    def choose(self, counts: Uses) -> Iterator[PinChange]:
        """Yield the changes that are due; `counts` [n_keys] are decayed and know of the token."""
        for rule in reversed(self._chosen):
            if self._due(rule):
                uses = counts if rule.again else self._uses
                yield self._change(rule, self._most_used(rule, uses))
                if self._chosen[rule]:
                    self.warm_at = self._n_tokens

    # ----- inside -----

    def _due(self, rule: Pins) -> bool:
        if rule.by != "use":
            return False
        return self._n_tokens % rule.after == 0 if rule.again else self._n_tokens == rule.after

    def _change(self, rule: Pins, keys: list[int]) -> PinChange:
        """Let a rule pin these experts instead of those before them."""
        before, others = set(self._chosen[rule]), self._others(rule)
        self._chosen[rule] = keys
        freed = sorted(before - set(keys) - others)
        # What stays pinned without a slot is not brought again and again.
        return PinChange(freed, [key for key in keys if not (rule.again and key in before)])

    def _most_used(self, rule: Pins, values: Uses) -> list[int]:
        """Return the most used experts of each layer, for a rule that chooses by use."""
        if rule.again:
            return _hottest(values, self._pools, self._space, rule.n, self._others(rule))
        return _most_used(values, self._numbers, rule.n)

    def _others(self, rule: Pins) -> set[int]:
        """Return what the other rules pin."""
        return set().union(*(keys for other, keys in self._chosen.items() if other != rule))


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
    values: Uses, pools: Sequence[PoolSpec], space: KeySpace, n: int, taken: set[int]
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
