"""Which experts have a slot: decided from what the tokens used, without a GPU.

The engine and the simulator ask the same object, so that their hits agree exactly. Owns the
policies, the counts and the pins; does not own slots, addresses or copies: it answers with moves,
and is told when they have landed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import pins
from vkmoe.experts.create import create_policy
from vkmoe.experts.foresight import MARGIN, Foresight, PredictionCounts
from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.limits import NO_LIMITS, Limits
from vkmoe.experts.moves import FREE, Move
from vkmoe.experts.policy import NO_POOL, Keys, Mask
from vkmoe.experts.settings import CacheSettings, PoolSpec

__all__ = ["Residency"]

NOBODY: Keys = np.zeros(0, np.int64)


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
        self._pools = tuple(pools)
        # The MoE layers that have slots, in rows of their numbers.
        self._layers = np.array(sorted(layer for pool in pools for layer in pool.layers), np.int64)
        self._foresight = self._look_ahead()
        self._begin_empty()
        self.published: NDArray[np.bool_] = np.zeros((space.n_layers, space.n_experts), np.bool_)
        self._published = self.published.reshape(-1)
        self._uses = np.zeros(space.n_keys, np.int64)  # all alike, for the choice of residents
        self.n_tokens = 0
        self.warm_at: int | None = None  # tokens seen when the pins were last chosen by use
        self._first = np.arange(space.n_layers, dtype=np.int64)[:, None] * space.n_experts
        self._residents: list[int] = []
        self._warm: list[int] = []
        # Who can be copied [n_keys]: who is in a host pool that does not hold all. None: everybody.
        self.copyable: Mask | None = None

    @property
    def pinned(self) -> list[list[int]]:
        """The ids of the pinned experts of each layer, ascending."""
        found: list[list[int]] = [[] for _ in range(self.space.n_layers)]
        for number in sorted({*self._residents, *self._warm}):
            layer, expert = self.space.key(number)
            found[layer].append(expert)
        return found

    @property
    def predictions(self) -> PredictionCounts:
        """How the guesses went that experts were fetched on."""
        return self._foresight.counts if self._foresight is not None else PredictionCounts()

    def start(self) -> list[Move]:
        """The moves before the first token: residents, then the experts of the profile."""
        settings, moves = self.settings, []
        if settings.selection in ("first_n", "manual"):
            moves += self._pin_residents(self._listed_residents(), NOBODY)
        elif settings.selection == "frequency" and self._seeded:
            moves += self._pin_residents(self._most_used(self.counts.values()), NOBODY)
        if self._seeded:
            if settings.warmpin:
                moves += self._pin_warm(NOBODY)
            for index, pool in enumerate(self._pools):
                wanted = pins.fill(self.counts.values(), pool, self.space)
                absent = [key for key in wanted if not self._policy.resident[key]]
                coming = np.array(absent[: self._policy.n_free(index)], np.int64)
                # The most used last: to every policy it is the one to leave last.
                moves += self._promote(coming[::-1], NOBODY)
        return moves

    def hits(self, routing: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """[n_layers, n_used]: which of these experts the next token would find in a slot."""
        found: NDArray[np.bool_] = self._published[routing + self._first]
        return found

    def use(
        self,
        routing: NDArray[np.uint32],
        landed: Sequence[int] = (),
        budget_bytes: float = inf,
    ) -> list[Move]:
        """A token used these experts [n_layers, n_used]; what should move before the next one.

        `landed` are the numbers of experts it missed that lie in landing slots now. First come
        those of them that are kept, then other missed ones, then hinted ones. Copies fill at most
        `budget_bytes` of slots: those up to the first that does not fit.
        """
        keys = routing + self._first
        self.counts.use(keys.reshape(-1))
        if self.settings.selection == "frequency":
            self._uses[keys] += 1
        self.n_tokens += 1
        moves: list[Move] = []
        if self._foresight is not None:
            self._foresight.after_token(routing, keys)
        if self._pools:
            slotted = keys if len(self._layers) == len(keys) else keys[self._layers]
            # By rank: the highest of all layers come first.
            missing = self._policy.use(slotted.T.reshape(-1))
            moves = self._bring(missing, landed, keys, budget_bytes)
            if self._pins_are_due:
                left = budget_bytes - self._n_bytes(move for move in moves if not move.landed)
                moves += self._choose_pins(keys, left)
        self.counts.advance()
        return moves

    def hint(
        self, keys: Sequence[int] | Keys, needed: Keys, budget_bytes: float = inf
    ) -> list[Move]:
        """Fetch the absent ones of these, the likeliest first, and let nobody `needed` leave."""
        found = np.array(keys, np.int64)
        return self._fetch(found[~self._policy.resident[found]], needed, budget_bytes)

    def guess_next_layer(self, layer: int, experts: NDArray[np.uint32]) -> Keys:
        """Numbers of the experts without a slot that the next layer is expected to use, the
        likeliest first, when the token at hand uses these [n_used] in `layer`.
        """
        if self._foresight is None or layer + 1 >= self.space.n_layers:
            return NOBODY
        return self._foresight.of_next_layer(layer, experts, ~self._policy.resident)

    def reset_predictions(self) -> None:
        """A new text begins, and what was used last says nothing of it."""
        if self._foresight is not None:
            self._foresight.reset()

    def landed(self, moves: Iterable[Move]) -> None:
        """The copies are done: the next token finds these experts in their slots."""
        keys = [move.key for move in moves]
        self._in_flight[keys] = False
        self._published[keys] = True

    def failed(self, moves: Iterable[Move]) -> None:
        """The copies were not done: their slots are free."""
        keys = np.array([move.key for move in moves], np.int64)
        self._in_flight[keys] = False
        self._policy.remove(keys)

    def reset(self) -> None:
        """All slots are empty; counts and pins stay."""
        self._begin_empty()
        self.published[:] = False
        self._policy.pin(np.array([*self._residents, *self._warm], np.int64))

    def check_integrity(self) -> None:
        """Raises AssertionError if policies, published experts and pins contradict each other."""
        policy = self._policy
        policy.check_integrity()
        assert not (self._in_flight & ~policy.resident).any(), "in flight without a slot"
        assert ((policy.resident & ~self._in_flight) == self._published).all(), (
            "published and resident differ"
        )
        assert all(policy.is_pinned(key) for key in (*self._residents, *self._warm))

    # ----- inside -----

    def _look_ahead(self) -> Foresight | None:
        """What weighs and guesses, where that can change anything: not with a slot for everybody.

        Without any slots guesses may still serve a host pool.
        """
        settings, n_experts = self.settings, self.space.n_experts
        pressed = any(pool.capacity < len(pool.layers) * n_experts for pool in self._pools)
        guesses = settings.predictor != "none" and (pressed or not self._pools)
        if not guesses and not (settings.admission and pressed):
            return None
        return Foresight(self.space, self.counts, settings)

    def _bring(
        self, missing: Keys, landed: Sequence[int], used: Keys, budget_bytes: float
    ) -> list[Move]:
        """Slots after a token, for those it missed and those that are guessed for the next."""
        there, others = NOBODY, missing
        if landed:
            is_there = np.isin(missing, np.array(landed, np.int64))
            there, others = missing[is_there], missing[~is_there]
        others = self._copyable(others)
        guessed, bids, worth = NOBODY, None, None
        if self._foresight is not None and self._foresight.worth is not None:
            worth = self._foresight.worth
            if self.settings.admission:
                others = others[np.argsort(-worth[others], kind="stable")]
            absent = ~self._policy.resident
            absent[used] = False
            guessed = self._copyable(self._foresight.wanted(absent))
            bids = np.concatenate([self._bids(there), self._bids(others), worth[guessed] / MARGIN])
        newcomers = np.concatenate([there, others, guessed])
        moves = self._promote(newcomers, used, Limits(bids, worth, budget_bytes, len(there)))
        if there.size:
            free = set(there.tolist())
            moves = [move._replace(landed=move.key in free) for move in moves]
        self._note_guesses(moves, guessed)
        return moves

    def _bids(self, missed: Keys) -> NDArray[np.float64]:
        """What they are worth; without admission, more than anybody."""
        assert self._foresight is not None and self._foresight.worth is not None
        return (
            self._foresight.worth[missed] if self.settings.admission else np.full(len(missed), inf)
        )

    def _fetch(self, absent: Keys, needed: Keys, budget_bytes: float) -> list[Move]:
        """Slots on a guess, for those that are worth far more than who would leave."""
        if self._foresight is None or self._foresight.worth is None:
            return []
        worth = self._foresight.worth
        guessed = self._copyable(absent[self._policy.pool_of[absent] != NO_POOL])
        limits = Limits(worth[guessed] / MARGIN, worth, budget_bytes)
        moves = self._promote(guessed, needed, limits)
        self._note_guesses(moves, guessed)
        return moves

    def _note_guesses(self, moves: Sequence[Move], guessed: Keys) -> None:
        if guessed.size and moves and self._foresight is not None:
            keys = set(guessed.tolist())
            hinted = [move for move in moves if move.key in keys]
            self._foresight.fetched([move.key for move in hinted], self._n_bytes(hinted))

    def _copyable(self, keys: Keys) -> Keys:
        return keys if self.copyable is None else keys[self.copyable[keys]]

    def _n_bytes(self, moves: Iterable[Move]) -> int:
        """Of the slots they take."""
        return sum(self._pools[move.pool].slot_bytes for move in moves)

    @property
    def _warm_pins_are_due(self) -> bool:
        return self.settings.warmpin > 0 and self.n_tokens % self.settings.warmpin_after == 0

    @property
    def _residents_are_due(self) -> bool:
        settings = self.settings
        return settings.selection == "frequency" and self.n_tokens == settings.warmup_tokens

    @property
    def _pins_are_due(self) -> bool:
        return self._warm_pins_are_due or self._residents_are_due

    def _choose_pins(self, used: Keys, budget_bytes: float) -> list[Move]:
        """What follows from the counts. Must hold: pins are due."""
        moves: list[Move] = []
        if self._warm_pins_are_due:
            moves += self._pin_warm(used, budget_bytes)
        if self._residents_are_due:
            left = budget_bytes - self._n_bytes(moves)
            moves += self._pin_residents(self._most_used(self._uses), used, left)
            self.warm_at = self.n_tokens
        return moves

    def _begin_empty(self) -> None:
        self._policy = create_policy(self.settings.policy, self._pools, self.space, self.counts)
        self._in_flight: Mask = np.zeros(self.space.n_keys, np.bool_)  # not arrived in their slots

    def _promote(self, newcomers: Keys, used: Keys, limits: Limits = NO_LIMITS) -> list[Move]:
        """Slots for newcomers, of experts that are neither `used` now nor in flight."""
        if not newcomers.size:
            return []
        needed = self._in_flight.copy()
        needed[used] = True
        moves = self._policy.promote(newcomers, needed, limits)
        self._in_flight[[move.key for move in moves]] = True
        self._published[[move.victim for move in moves if move.victim != FREE]] = False
        return moves

    def _pin(self, keys: Sequence[int], used: Keys, budget_bytes: float) -> list[Move]:
        """Pin these; those without a slot get one, if somebody may leave for them."""
        wanted = np.array(keys, np.int64)
        self._policy.pin(wanted)
        absent = self._copyable(wanted[~self._policy.resident[wanted]])
        return self._promote(absent, used, Limits(budget_bytes=budget_bytes))

    def _unpin(self, keys: Iterable[int]) -> None:
        self._policy.unpin(np.array(sorted(keys), np.int64))

    def _pin_residents(self, keys: list[int], used: Keys, budget_bytes: float = inf) -> list[Move]:
        """Make these the residents, and those before them ordinary experts."""
        self._unpin(set(self._residents) - set(keys) - set(self._warm))
        self._residents = keys
        return self._pin(keys, used, budget_bytes)

    def _pin_warm(self, used: Keys, budget_bytes: float = inf) -> list[Move]:
        """Pin the hottest experts of each layer, at most half of every pool, instead of others."""
        before, n = self._warm, self.settings.warmpin
        values, residents = self.counts.values(), self._residents
        self._warm = pins.hottest(values, self._pools, self.space, n, residents)
        self._unpin(set(before) - set(self._warm) - set(self._residents))
        self.warm_at = self.n_tokens if self._warm else self.warm_at
        new = set(self._warm) - set(before)
        return self._pin([key for key in self._warm if key in new], used, budget_bytes)

    def _slotted_layers(self) -> NDArray[np.int64]:
        """Numbers of the experts of each layer with slots: [n such layers, n_experts]."""
        return self._first[self._layers] + np.arange(self.space.n_experts)

    def _most_used(self, values: NDArray[Any]) -> list[int]:
        return pins.most_used(values, self._slotted_layers(), self.settings.n_resident)

    def _listed_residents(self) -> list[int]:
        ids = list(range(self.space.n_experts))
        if self.settings.selection == "manual":
            ids = list(self.settings.resident_ids)
        chosen = self._slotted_layers()[:, ids[: self.settings.n_resident]]
        return [int(key) for key in chosen.reshape(-1)]
