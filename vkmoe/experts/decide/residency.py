"""Decides which experts have a slot, from what the tokens used and without a GPU.

The engine and the simulator ask the same object, so that their hits agree exactly. Owns the
policies and the counts; does not own slots, addresses or copies: it answers with moves, and its
caller reports when they have landed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from math import inf

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide import pins
from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import NO_KEYS, Keys, KeySpace, Mask
from vkmoe.experts.decide.pins import PinChange, Pinning
from vkmoe.experts.decide.policies import create_policy
from vkmoe.experts.decide.residents import FREE, NO_LIMITS, NO_POOL, Limits, Move
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.decide.worth import COPY, GUESS, PredictionCounts, create_foresight

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
        """Begin with empty slots; with a `seed`, decayed counts [n_keys], the start is warm."""
        self.space, self.settings = space, settings
        self.counts = DecayedCounts(space.n_keys, settings.half_life)
        self._seeded = seed is not None and bool(seed.any())
        if seed is not None:
            self.counts.restore(seed)
        self._pools = tuple(pools)
        # The MoE layers that have slots, in rows of their numbers.
        self._layers = np.array(sorted(layer for pool in pools for layer in pool.layers), np.int64)
        self._foresight = create_foresight(space, pools, self.counts, settings)
        self._begin_empty()
        self.published: NDArray[np.bool_] = np.zeros((space.n_layers, space.n_experts), np.bool_)
        self._published = self.published.reshape(-1)
        self.n_tokens = 0
        self._pinning = Pinning(space, pools, settings)
        # Which can be copied [n_keys]: those in a host pool that does not hold all. None: all can.
        self.copyable: Mask | None = None

    @property
    def pinned(self) -> list[list[int]]:
        """Return the ids of the pinned experts of each layer, ascending."""
        found: list[list[int]] = [[] for _ in range(self.space.n_layers)]
        for number in self._pinning.keys.tolist():
            layer, expert = self.space.key(number)
            found[layer].append(expert)
        return found

    @property
    def predictions(self) -> PredictionCounts:
        """Return how the guesses went that experts were fetched on."""
        return self._foresight.counts if self._foresight is not None else PredictionCounts()

    def start(self) -> list[Move]:
        """Return the moves before the first token: residents, then experts of the profile."""
        seed = self.counts.values() if self._seeded else None
        moves = self._pin(self._pinning.at_start(seed), NO_KEYS)
        if seed is not None:
            for index, pool in enumerate(self._pools):
                wanted = pins.fill(seed, pool, self.space)
                absent = [key for key in wanted if not self._policy.resident[key]]
                coming = np.array(absent[: self._policy.n_free(index)], np.int64)
                # The most used comes last: then every policy lets it leave last.
                moves += self._promote(coming[::-1], NO_KEYS)
        return moves

    @property
    def warm_at(self) -> int | None:
        """Return how many tokens were seen when pins were last chosen by use."""
        return self._pinning.warm_at

    def hits(self, routing: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return which of `routing` [n_layers, n_used] the next token would find in a slot."""
        found: NDArray[np.bool_] = self._published[self.space.numbers_of(routing)]
        return found

    def use(
        self,
        routing: NDArray[np.uint32],
        landed: Sequence[int] = (),
        budget_bytes: float = inf,
    ) -> list[Move]:
        """Count a token's experts [n_layers, n_used]; return what to move before the next.

        `landed` are the numbers of experts it missed that lie in landing slots now. First come
        those that are worth most; while nothing is known of that, those that landed, then those
        missed, by rank. Copies fill at most `budget_bytes`, up to the first that does not fit.
        """
        keys = self.space.numbers_of(routing)
        self.counts.use(keys.reshape(-1))
        self._pinning.note(keys)
        self.n_tokens += 1
        moves: list[Move] = []
        if self._foresight is not None:
            self._foresight.after_token(routing, keys)
        if self._pools:
            slotted = keys if len(self._layers) == len(keys) else keys[self._layers]
            # By rank: the highest of all layers come first.
            missing = self._policy.use(slotted.T.reshape(-1))
            moves = self._bring(missing, set(landed), keys, budget_bytes)
            if self._pinning.is_due:
                left = budget_bytes - self._n_bytes(move for move in moves if not move.landed)
                moves += self._pin(self._pinning.choose(self.counts.values()), keys, left)
        self.counts.advance()
        return moves

    def hint(
        self, keys: Sequence[int] | Keys, needed: Keys, budget_bytes: float = inf
    ) -> list[Move]:
        """Fetch the absent ones of these, the likeliest first; none of `needed` leaves."""
        found = np.array(keys, np.int64)
        return self._fetch(found[~self._policy.resident[found]], needed, budget_bytes)

    def guess_next_layer(self, layer: int, experts: NDArray[np.uint32]) -> Keys:
        """Guess which experts without a slot the next layer will use: numbers, likeliest first.

        The token at hand uses `experts` [n_used] in `layer`.
        """
        if self._foresight is None or layer + 1 >= self.space.n_layers:
            return NO_KEYS
        return self._foresight.of_next_layer(layer, experts, ~self._policy.resident)

    def reset_predictions(self) -> None:
        """Forget what was used last, as a new text begins that it does not bear on."""
        if self._foresight is not None:
            self._foresight.reset()

    def landed(self, moves: Iterable[Move]) -> None:
        """Publish experts whose copies are done: the next token finds them in their slots."""
        keys = [move.key for move in moves]
        self._in_flight[keys] = False
        self._published[keys] = True

    def failed(self, moves: Iterable[Move]) -> None:
        """Free the slots of moves whose copies failed."""
        keys = np.array([move.key for move in moves], np.int64)
        self._in_flight[keys] = False
        self._policy.remove(keys)

    def reset(self) -> None:
        """Empty all slots; counts and pins stay."""
        self._begin_empty()
        self.published[:] = False
        self._policy.pin(self._pinning.keys)

    def check_integrity(self) -> None:
        """Raises AssertionError if policies, published experts and pins contradict each other."""
        policy = self._policy
        policy.check_integrity()
        assert not (self._in_flight & ~policy.resident).any(), "in flight without a slot"
        assert ((policy.resident & ~self._in_flight) == self._published).all(), (
            "published and resident differ"
        )
        assert all(map(policy.is_pinned, self._pinning.keys.tolist()))

    # ----- inside -----

    def _bring(
        self, missing: Keys, landed: Set[int], used: Keys, budget_bytes: float
    ) -> list[Move]:
        """Give slots after a token to experts that it missed or that are guessed for the next."""
        there, others = NO_KEYS, missing
        if landed:
            is_there = np.array([key in landed for key in missing.tolist()], np.bool_)
            there, others = missing[is_there], missing[~is_there]
        others = self._copyable(others)
        if self._foresight is None or self._foresight.worth is None:
            newcomers = np.concatenate([there, others])
            return self._promote(newcomers, used, Limits(None, None, budget_bytes, len(there)))
        worth = self._foresight.worth
        absent = ~self._policy.resident
        absent[used] = False
        guessed = self._copyable(self._foresight.wanted(absent))
        newcomers = np.concatenate([there, others, guessed])
        bids, n_landed, n_missed = worth[newcomers], len(there), len(there) + len(others)
        if self.settings.admission:
            bids[n_landed:n_missed] /= COPY
        else:
            bids[:n_missed] = inf
        bids[n_missed:] /= GUESS
        limits = Limits(bids, self._foresight.held_worth, budget_bytes, n_landed)
        moves = self._promote(newcomers, used, limits)
        self._note_guesses(moves, guessed)
        return moves

    def _fetch(self, absent: Keys, needed: Keys, budget_bytes: float) -> list[Move]:
        """Give slots on a guess to experts that are worth far more than those that would leave."""
        if self._foresight is None or self._foresight.worth is None:
            return []
        guessed = self._copyable(absent[self._policy.pool_of[absent] != NO_POOL])
        bids = self._foresight.worth[guessed] / GUESS
        limits = Limits(bids, self._foresight.held_worth, budget_bytes)
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
        """Return the bytes of the slots that these moves take."""
        return sum(self._pools[move.pool].slot_bytes for move in moves)

    def _begin_empty(self) -> None:
        self._policy = create_policy(self.settings.policy, self._pools, self.space, self.counts)
        self._in_flight: Mask = np.zeros(self.space.n_keys, np.bool_)  # on the way to their slots

    def _promote(self, newcomers: Keys, used: Keys, limits: Limits = NO_LIMITS) -> list[Move]:
        """Give slots to newcomers, of experts that are neither `used` now nor in flight."""
        if not newcomers.size:
            return []
        needed = self._in_flight.copy()
        needed[used] = True
        moves = self._policy.promote(newcomers, needed, limits)
        self._in_flight[[move.key for move in moves]] = True
        self._published[[move.victim for move in moves if move.victim != FREE]] = False
        return moves

    def _pin(
        self, changes: Iterable[PinChange], used: Keys, budget_bytes: float = inf
    ) -> list[Move]:
        """Carry out changes of pins; pinned experts get slots as far as others may leave."""
        moves: list[Move] = []
        for freed, pinned in changes:
            self._policy.unpin(np.array(freed, np.int64))
            wanted = np.array(pinned, np.int64)
            self._policy.pin(wanted)
            absent = self._copyable(wanted[~self._policy.resident[wanted]])
            left = budget_bytes - self._n_bytes(moves)
            moves += self._promote(absent, used, Limits(budget_bytes=left))
        return moves
