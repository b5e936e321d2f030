"""Which experts have a slot: decided from what the tokens used, without a GPU.

The engine and the simulator ask the same object, so that their hits agree exactly. Owns the
policies, the counts and the pins; does not own slots, addresses or copies: it answers with moves,
and is told when they have landed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import pins
from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.pools import FREE, Move, Pool, empty_pools
from vkmoe.experts.settings import CacheSettings, PoolSpec

__all__ = ["Residency"]


class Residency:
    """Orders experts into slots, token by token.

    A key of a move holds its slot at once and is `published` when the move has landed. Experts the
    current token used, and those in flight, are never victims.
    """

    def __init__(
        self,
        space: KeySpace,
        pools: Sequence[PoolSpec],
        settings: CacheSettings,
        seed: NDArray[np.float64] | None = None,
    ) -> None:
        """`seed` are decayed counts [n_keys] of an earlier run: the start is warm."""
        self.space, self.settings = space, settings
        self.counts = DecayedCounts(space.n_keys, settings.half_life)
        self._seeded = seed is not None and bool(seed.any())
        if seed is not None:
            self.counts.restore(seed)
        self._specs = tuple(pools)
        self._empty_pools()
        self.published: NDArray[np.bool_] = np.zeros((space.n_layers, space.n_experts), np.bool_)
        self._published = self.published.reshape(-1)
        self._uses = np.zeros(space.n_keys, np.int64)  # all alike, for the choice of residents
        self.n_tokens = 0
        self.warm_at: int | None = None  # tokens seen when the pins were last chosen by use
        self._first = np.arange(space.n_layers, dtype=np.int64)[:, None] * space.n_experts
        self._residents: list[int] = []
        self._warm: list[int] = []

    @property
    def pinned(self) -> list[list[int]]:
        """The ids of the pinned experts of each layer, ascending."""
        found: list[list[int]] = [[] for _ in range(self.space.n_layers)]
        for number in sorted({*self._residents, *self._warm}):
            layer, expert = self.space.key(number)
            found[layer].append(expert)
        return found

    def start(self) -> list[Move]:
        """The moves before the first token: residents, then the experts of the profile."""
        settings, moves = self.settings, []
        if settings.selection in ("first_n", "manual"):
            moves += self._pin_residents(self._listed_residents(), set())
        elif settings.selection == "frequency" and self._seeded:
            moves += self._pin_residents(self._most_used(self.counts.values()), set())
        if self._seeded:
            if settings.warmpin:
                moves += self._pin_warm(set())
            for pool in self._pools:
                wanted = pins.fill(self.counts.values(), pool.spec, self.space)
                absent = [key for key in wanted if key not in pool.policy]
                # The most used last: to every policy it is the one to leave last.
                moves += self._promote(pool, absent[: pool.n_free][::-1], set())
        return moves

    def hits(self, routing: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """[n_layers, n_used]: which of these experts the next token would find in a slot."""
        found: NDArray[np.bool_] = self._published[routing + self._first]
        return found

    def use(self, routing: NDArray[np.uint32]) -> list[Move]:
        """A token used these experts [n_layers, n_used]; what should move before the next one."""
        keys = routing + self._first
        flat = keys.reshape(-1)
        self.counts.use(flat)
        if self.settings.selection == "frequency":
            self._uses[flat] += 1
        self.n_tokens += 1
        moves: list[Move] = []
        rows = keys.tolist() if self._users else []
        for pool, use, layer in self._users:
            # With several layers the highest ranks of all come first.
            used = rows[layer] if layer >= 0 else keys[list(pool.spec.layers)].T.ravel().tolist()
            misses = use(used)
            if misses:
                moves += self._promote(pool, misses, set(used))
        moves += self._choose_pins(flat)
        self.counts.advance()
        return moves

    def landed(self, moves: Iterable[Move]) -> None:
        """The copies are done: the next token finds these experts in their slots."""
        for move in moves:
            self._pools[move.pool].in_flight.discard(move.key)
            self._published[move.key] = True

    def failed(self, moves: Iterable[Move]) -> None:
        """The copies were not done: their slots are free."""
        for move in moves:
            pool = self._pools[move.pool]
            pool.in_flight.discard(move.key)
            pool.policy.remove(move.key)

    def reset(self) -> None:
        """All slots are empty; counts and pins stay."""
        self._empty_pools()
        self.published[:] = False
        for key in (*self._residents, *self._warm):
            self._pool_of(key).policy.pin(key)

    def check_integrity(self) -> None:
        """Raises AssertionError if policies, published experts and pins contradict each other."""
        published = set(np.flatnonzero(self._published).tolist())
        for pool in self._pools:
            pool.policy.check_integrity()
            held = set(pool.policy)
            assert len(held) == len(pool.policy) <= pool.spec.capacity, pool.spec
            assert {self.space.layer(key) for key in held} <= set(pool.spec.layers), pool.spec
            assert pool.in_flight <= held, pool.in_flight - held
            assert held - pool.in_flight == published & held, "published and resident differ"
            published -= held
        assert not published, f"published without a slot: {published}"
        for key in (*self._residents, *self._warm):
            assert self._pool_of(key).policy.is_pinned(key), key

    # ----- inside -----

    def _choose_pins(self, keys: NDArray[np.int64]) -> list[Move]:
        """What follows from the counts at the tokens where the settings say so."""
        settings, moves = self.settings, []
        used: set[int] = set()
        if settings.warmpin or settings.selection == "frequency":
            used = set(keys.tolist())
        if settings.warmpin and self.n_tokens % settings.warmpin_after == 0:
            moves += self._pin_warm(used)
        if settings.selection == "frequency" and self.n_tokens == settings.warmup_tokens:
            moves += self._pin_residents(self._most_used(self._uses), used)
            self.warm_at = self.n_tokens
        return moves

    def _empty_pools(self) -> None:
        self._pools = empty_pools(self._specs, self.settings.policy, self.space, self.counts)
        self._by_layer = {layer: pool for pool in self._pools for layer in pool.spec.layers}
        # What every token does, looked up once: the pool, its policy's use, its only layer or -1.
        self._users = [
            (pool, pool.policy.use, pool.spec.layers[0] if len(pool.spec.layers) == 1 else -1)
            for pool in self._pools
        ]

    def _promote(self, pool: Pool, newcomers: Sequence[int], needed: set[int]) -> list[Move]:
        moves = pool.promote(newcomers, needed)
        for move in moves:
            if move.victim != FREE:
                self._published[move.victim] = False
        return moves

    def _pin(self, keys: Sequence[int], needed: set[int]) -> list[Move]:
        """Pin these; those without a slot get one, if somebody may leave for them."""
        moves: list[Move] = []
        absent: dict[int, list[int]] = {}  # by pool
        for key in keys:
            pool = self._pool_of(key)
            pool.policy.pin(key)
            if key not in pool.policy:
                absent.setdefault(pool.index, []).append(key)
        for index, newcomers in absent.items():
            moves += self._promote(self._pools[index], newcomers, set(needed))
        return moves

    def _unpin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._pool_of(key).policy.unpin(key)

    def _pool_of(self, key: int) -> Pool:
        return self._by_layer[self.space.layer(key)]

    def _pin_residents(self, keys: list[int], used: set[int]) -> list[Move]:
        """Make these the residents, and those before them ordinary experts."""
        self._unpin(set(self._residents) - set(keys) - set(self._warm))
        self._residents = keys
        return self._pin(keys, used)

    def _pin_warm(self, used: set[int]) -> list[Move]:
        """Pin the hottest experts of each layer, at most half of every pool, instead of others."""
        before, n = self._warm, self.settings.warmpin
        values, residents = self.counts.values(), self._residents
        self._warm = pins.hottest(values, self._specs, self.space, n, residents)
        self._unpin(set(before) - set(self._warm) - set(self._residents))
        self.warm_at = self.n_tokens if self._warm else self.warm_at
        new = set(self._warm) - set(before)
        return self._pin([key for key in self._warm if key in new], used)

    def _slotted_layers(self) -> NDArray[np.int64]:
        """Numbers of the experts of each layer with slots: [n such layers, n_experts]."""
        layers = sorted(layer for pool in self._pools for layer in pool.spec.layers)
        return self._first[layers] + np.arange(self.space.n_experts)

    def _most_used(self, values: NDArray[Any]) -> list[int]:
        return pins.most_used(values, self._slotted_layers(), self.settings.n_resident)

    def _listed_residents(self) -> list[int]:
        ids = list(range(self.space.n_experts))
        if self.settings.selection == "manual":
            ids = list(self.settings.resident_ids)
        chosen = self._slotted_layers()[:, ids[: self.settings.n_resident]]
        return [int(key) for key in chosen.reshape(-1)]
