"""Decides which experts have a slot, from what the tokens used and from the ids that are to come,
without a GPU or a file.

The engine and the simulator ask the same object, so that their hits agree exactly. Owns the
policies, the counts and the record of where experts are (locations.py), which it changes by giving
slots; does not copy: it answers with moves, whose arrival its caller notes in the record.
`Residency` is of the device, `PoolResidency` of a host pool that is smaller than the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import PolicyName
from vkmoe.experts.decide import pins
from vkmoe.experts.decide.backing import Backing
from vkmoe.experts.decide.foresight import GUESS, LEARNED, Foresight, PredictionCounts, Table
from vkmoe.experts.decide.keys import NO_KEYS, DecayedCounts, Keys, KeySpace, Mask
from vkmoe.experts.decide.locations import NO_POOL, Locations, Move
from vkmoe.experts.decide.pins import PinChange, Pinning
from vkmoe.experts.decide.policies import NO_LIMITS, POLICIES, Forecast, Limits
from vkmoe.experts.decide.reasons import Came, Reasons
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.decide.token_table import Upcoming
from vkmoe.experts.decide.turn import Asked, Turn

NOTHING_KNOWN = Upcoming()
UNKNOWN = 1e-9  # uses of an expert of which none is known
BY_HAND = 0x80  # the bit of pins that no rule of the settings chose
NEEDED = 8  # rows of a run, the last, whose experts do not leave: a long prompt uses nearly all


class Residency:
    """Orders experts into slots: `observe` notes what tokens used, `decide` says what moves.

    `learn` draws those conclusions from what was observed that the next decision can do without: it
    may be called after that, while the tokens that were decided on run. Experts that the last rows
    of a run used since the last decision, and those that are arriving, are never victims.
    """

    def __init__(
        self,
        space: KeySpace,
        pools: Sequence[PoolSpec],
        settings: CacheSettings,
        seed: NDArray[np.float64] | None = None,
        table: Table | None = None,
        plain: bool = False,
    ) -> None:
        """Begin with empty slots; with a `seed`, decayed counts [n_keys], the start is warm.

        `table` is what is known of tokens by their ids; None: nothing yet. `plain`: take no turn in
        the extension, but step by step (tests).
        """
        self.space, self.settings = space, settings
        self.locations = Locations(space, pools)
        self.counts = DecayedCounts(space.n_keys)
        self._seeded = seed is not None and bool(seed.any())
        if seed is not None:
            self.counts.restore(seed)
        self._pools = self.locations.pools
        # The MoE layers that have slots, in rows of their keys.
        self._layers = np.array(sorted(layer for pool in pools for layer in pool.layers), np.int64)
        # Only where slots are scarce; without any, guesses may still serve a host pool.
        pressed = any(pool.capacity < len(pool.layers) * space.n_experts for pool in pools)
        if pressed or (not pools and settings.prefetches and space.n_keys):
            self._foresight: Foresight | None = Foresight(space, self.counts, settings, table)
        else:
            self._foresight = None
        self._policy = POLICIES[settings.policy](self.locations, self.counts)
        self._plain, self._turn = plain, self._make_turn(plain)
        self._pinning = Pinning(self.locations, settings)
        self.n_tokens = 0
        # Of tokens that were not decided on: keys, and those without a slot, by rank.
        self._undecided: list[tuple[Keys, Keys]] = []
        # The host pool where it does not hold all experts: only those in it can be copied.
        self.host: Locations | None = None
        self.backing: Backing | None = None  # where experts exchange places
        self._awaits_pinned = False  # some expert that was pinned by hand may have no slot yet
        self.reasons: Reasons | None = None  # noted while that is watched

    @property
    def present(self) -> Mask:
        """Return which experts the next token finds in their slots [n_layers, n_experts]."""
        return self.locations.present.reshape(self.space.n_layers, self.space.n_experts)

    @property
    def pinned(self) -> list[list[int]]:
        """Return the ids of the pinned experts of each layer, ascending."""
        pins = self.locations.pins.reshape(self.space.n_layers, self.space.n_experts)
        return [np.flatnonzero(row).tolist() for row in pins]

    def bytes_before(self, upcoming: Upcoming, n_bytes: float, beside: bool) -> float:
        """Return how many bytes may be copied before a run; `n_bytes` are those of a token.

        Before a long chunk of a prompt copies fill free slots alone, whatever their number: the
        chunk need not bring these experts, but instead it would bring those that left for others.
        Where copies run `beside` it, that is so for the chunk behind it, and the last has none.
        Behind that they make up for it: they have the bytes of its last tokens at once.
        """
        if len(upcoming.ids) <= NEEDED:
            n_rows = sum(len(keys) for keys, _ in self._undecided)
            return n_bytes * min(n_rows, LEARNED) if beside and n_rows > NEEDED else n_bytes
        if beside and not upcoming.later:
            return n_bytes
        n_free = self.locations.n_free_of_all
        return sum(int(n) * pool.slot_bytes for n, pool in zip(n_free, self._pools, strict=True))

    @property
    def predictions(self) -> PredictionCounts:
        """Return how guesses went."""
        return self._foresight.counts if self._foresight is not None else PredictionCounts()

    def start(self) -> list[Move]:
        """Return the moves before the first token: residents, experts of the profile, then any."""
        seed = self.counts.values() if self._seeded else None
        moves = self._pin(self._pinning.at_start(seed), NO_KEYS)
        if self.settings.fills:  # each layer alike where nothing is known of its experts
            any_of = np.linspace(UNKNOWN, UNKNOWN / 2, self.space.n_experts)
            unknown = np.tile(any_of, self.space.n_layers)
            seed = unknown if seed is None else seed + unknown
        if seed is not None:
            for index, pool in enumerate(self._pools):
                wanted = np.array(pins.fill(seed, pool, self.space), np.int64)
                absent = wanted[~self.locations.are_resident(wanted)]
                coming = absent[: self.locations.n_free(index)]
                # The most used comes last: then every policy lets it leave last.
                moves += self._promote(coming[::-1], NO_KEYS)
        return moves

    @property
    def warm_at(self) -> int | None:
        """Return how many tokens were seen when pins were last chosen by use."""
        return self._pinning.warm_at

    def hits(self, routing: NDArray[np.uint32]) -> Mask:
        """Return which of `routing` [..., n_layers, n_used] the next token would find in a slot."""
        return self.locations.are_present(self.space.keys_of(routing))

    def observe(
        self, routing: NDArray[np.uint32], tokens: Sequence[int | None] | None = None
    ) -> Keys:
        """Note that a run used `routing` [n_tokens, n_layers, n_used]; return their keys.

        `tokens` are the ids of its tokens, None where they are not known.
        """
        first_noted = max(0, len(routing) - LEARNED)
        noted = [self._note(ids, row >= first_noted) for row, ids in enumerate(routing)]
        if len(noted) == 1:  # as nearly always
            keys, missing = noted[0][0][None], noted[0][1]
        else:
            keys = np.stack([each for each, _ in noted])
            missing = np.concatenate([each for _, each in noted])
        if (foresight := self._forecasting) is not None:
            foresight.after_run(routing, keys, tokens or [None] * len(keys))
        self._undecided.append((keys, missing))
        return keys

    def leave(self) -> None:
        """Decide nothing on what was observed: where nothing moves, it would pile up."""
        self._undecided = []

    def learn(self) -> None:
        """Learn from what was observed, if that was not done: the ids of tokens, and fits."""
        if (foresight := self._forecasting) is not None:
            foresight.learn()

    def exchange_with(self, host: Locations) -> Backing:
        """Note that `host` memory and slots hold the experts together from now on.

        Experts that are in slots alone do not leave until they are backed.
        """
        self.host, self.backing = host, Backing(self.locations, host)
        return self.backing

    def to_back(self) -> list[Move]:
        """Return which experts get a home now, because they are next to leave, and whose place."""
        if self.backing is None:
            return []
        absent = np.flatnonzero(~self.locations.resident & (self.locations.pool_of != NO_POOL))
        n_pools = len(self._pools)
        uses = self.counts.of(absent)
        missed = np.bincount(self.locations.pool_of[absent], uses, n_pools).astype(np.float64)
        return self.backing.moves(self.leaving_order(), missed)

    def leaving_order(self) -> Keys:
        """Return the experts of each pool, the next to leave first, as `Policy` does."""
        return self._policy.leaving_order()

    def decide(
        self,
        landed: Sequence[int] = (),
        budget_bytes: float = inf,
        upcoming: Upcoming = NOTHING_KNOWN,
    ) -> list[Move]:
        """Return what to move before the next run, now that some tokens were observed.

        `landed` are missed experts that lie in landing slots now; `upcoming` are ids that are known
        to come. Those worth most come first; while that is not known, those that landed, then those
        missed, by token and rank. Copies fill at most `budget_bytes`, up to the first that does not
        fit.
        """
        undecided, self._undecided = self._undecided, []
        if not undecided:
            return []
        if not self._pools:
            if (foresight := self._forecasting) is not None:
                foresight.expect(upcoming)
            return []
        used, missing = undecided[0][0][-NEEDED:], undecided[0][1]
        if len(undecided) > 1:
            used = np.concatenate([keys[-NEEDED:] for keys, _ in undecided])
            missing = np.concatenate([keys for _, keys in undecided])
        if len(used) > 1:  # more than one token may have missed an expert
            missing = np.array(list(dict.fromkeys(missing.tolist())), np.int64)
            missing = missing[~self.locations.are_resident(missing)]
        backs = self.backing is not None
        asked = Asked(missing, landed, used, budget_bytes, self.host, backs)
        decided = self._turn.decide(upcoming, asked) if self._turn is not None else None
        moves, guessed = decided if decided is not None else self._bring(upcoming, asked)
        self._note_moves(moves, guessed)
        if self._pinning.is_due:
            left = budget_bytes - self._n_bytes(move for move in moves if not move.landed)
            moves += self._pin(self._pinning.choose(self.counts.values()), used, left)
        if self._awaits_pinned:
            left = budget_bytes - self._n_bytes(move for move in moves if not move.landed)
            moves += self._bring_pinned(used, left)
        return moves

    def hint(
        self, keys: Sequence[int] | Keys, needed: Keys, budget_bytes: float = inf
    ) -> list[Move]:
        """Fetch those of these that are worth far more than those that would leave, on a guess.

        The likeliest come first; those with a slot are left out, and none of `needed` leaves.
        """
        if (worth := self._policy.worth) is None:
            return []
        found = np.array(keys, np.int64)
        absent = ~self.locations.are_resident(found) & (self.locations.pool_of[found] != NO_POOL)
        guessed = self._copyable(found[absent])
        moves = self._promote(guessed, needed, Limits(worth[guessed] / GUESS, budget_bytes))
        self._note_moves(moves, [move.key for move in moves])
        return moves

    @property
    def token_table(self) -> Table | None:
        """Return what is known of tokens by their ids; None where nothing goes by them."""
        return self._foresight.table if self._foresight is not None else None

    def guess_layer(self, layer: int) -> Keys:
        """Guess which experts without a slot a layer of the next run will use, likeliest first.

        Returns keys; none where there is no such layer.
        """
        foresight = self._forecasting
        if foresight is None or layer >= self.space.n_layers:
            return NO_KEYS
        return foresight.of_layer(layer, ~self.locations.are_resident(self.space.keys(layer)))

    def reset_predictions(self) -> None:
        """Forget what was used last, as a new text begins that it does not bear on."""
        if self._foresight is not None:
            self._foresight.reset()

    def leaving_for(self, numbers: Keys) -> Keys:
        """Return which experts leave so that these slots can be put out of use: the next to leave.

        What else is in these slots can be moved to those that they leave.
        """
        return self.locations.leaving_for(numbers, self.leaving_order())

    # ----- changes between runs -----

    def pin(self, keys: Keys) -> None:
        """Pin experts by hand; those without a slot get one when the next run is decided on."""
        by_hand = np.flatnonzero(self.locations.pins & BY_HAND)
        self._policy.pin(np.union1d(by_hand, keys), BY_HAND)
        self._awaits_pinned = True

    def unpin(self, keys: Keys) -> None:
        """Take the pins of experts away, whatever pinned them; a rule may choose them anew."""
        for rule in [1 << bit for bit in range(8)]:
            pinned = np.flatnonzero(self.locations.pins & rule)
            if np.isin(pinned, keys).any():
                self._policy.pin(np.setdiff1d(pinned, keys), rule)

    def change_policy(self, name: PolicyName) -> None:
        """Let another policy choose what leaves from now on."""
        policy = POLICIES[name](self.locations, self.counts)
        policy.take_over(self._policy)
        self._policy, self.settings = policy, replace(self.settings, policy=name)
        self._turn = self._make_turn(self._plain)
        self.reset_predictions()  # of tokens that ran under another policy nothing was noted

    def least_slots(self, pool: int, n: int) -> Keys:
        """Return `n` slots of a pool: free ones, then of the experts that are the next to leave."""
        free = self.locations.free_slots(pool)[:n]
        leaving = self.leaving_order()[pool, : n - len(free)]
        return np.concatenate([free, self.locations.slots_of(leaving)]).astype(np.int64)

    def arrived(self, moves: Iterable[Move]) -> None:
        """Note that all bytes of moves are there: the next token finds the experts in slots."""
        self.locations.arrive([move.key for move in moves])

    def check_integrity(self) -> None:
        """Raise AssertionError if the record or the policy contradicts itself (tests)."""
        self._policy.check_integrity()

    # ----- inside -----

    @property
    def _forecasting(self) -> Foresight | None:
        """Return what forecasts, where the policy goes by that."""
        return self._foresight if self.settings.policy == "forecast" else None

    def _make_turn(self, plain: bool) -> Turn | None:
        """Make what takes turns in the extension; None: the policy has none there."""
        if plain or not isinstance(self._policy, Forecast):
            return None
        return Turn(self.locations, self._policy, self.counts, self._foresight)

    def _note(self, ids: NDArray[np.uint32], is_late: bool) -> tuple[Keys, Keys]:
        """Note that a token used `ids` [n_layers, n_used], and return their keys.

        And those without a slot, by rank, then by layer. `is_late`: chances are learned from it.
        """
        if (foresight := self._forecasting) is not None:
            foresight.before_token()
        if self.n_tokens:
            self.counts.advance()
        self._pinning.note()
        self.n_tokens += 1
        if self._turn is not None:
            return self._turn.observe(ids, is_late)
        keys = self.space.keys_of(ids)
        self.counts.use(keys)
        if foresight is not None and is_late:
            foresight.after_token(keys)
        by_rank = keys[self._layers].T
        resident = self.locations.are_resident(by_rank)
        if self._pools:
            self._policy.note_use(by_rank[resident])
        return keys, by_rank[~resident]

    def _bring(self, upcoming: Upcoming, asked: Asked) -> tuple[list[Move], list[int]]:
        """Give slots after a token to experts that it missed or that are guessed for the next.

        Returns the moves in order, and the keys that were guessed.
        """
        foresight, missing, there, others = self._forecasting, asked.missing, NO_KEYS, asked.missing
        if foresight is not None:
            self._policy.worth = foresight.expect(upcoming)
        if asked.landed:
            landed = set(asked.landed)
            is_there = np.array([key in landed for key in missing.tolist()], np.bool_)
            there, others = missing[is_there], missing[~is_there]
        others, worth = self._copyable(others), self._policy.worth
        if foresight is None or worth is None:
            limits = Limits(None, asked.budget_bytes, len(there))
            return self._promote(np.concatenate([there, others]), asked.used, limits), []
        guessed = NO_KEYS
        if foresight.guesses:
            absent = ~self.locations.resident & (self.locations.pool_of != NO_POOL)
            absent[missing] = False
            guessed = self._copyable(foresight.wanted(absent))
        newcomers = np.concatenate([there, others, guessed])
        bids, n_landed, n_missed = worth[newcomers], len(there), len(there) + len(others)
        bids[n_landed:n_missed] /= foresight.toll
        bids[n_missed:] /= GUESS
        moves = self._promote(newcomers, asked.used, Limits(bids, asked.budget_bytes, n_landed))
        coming = set(guessed.tolist())
        return moves, [move.key for move in moves if move.key in coming]

    def _note_moves(self, moves: Sequence[Move], guessed: Collection[int]) -> None:
        """Note why experts come, if that is watched, and which of them were guessed."""
        if self.reasons is not None:
            self.reasons.entered((move for move in moves if move.key in guessed), "guessed")
            self.reasons.entered((move for move in moves if move.key not in guessed), "missed")
        if guessed and self._foresight is not None:
            hinted = [move for move in moves if move.key in guessed]
            self._foresight.fetched([move.key for move in hinted], self._n_bytes(hinted))

    def _note_reasons(self, moves: Sequence[Move], why: Came) -> None:
        """Note why experts come, if that is watched."""
        if self.reasons is not None:
            self.reasons.entered(moves, why)

    def _copyable(self, keys: Keys) -> Keys:
        return keys if self.host is None else keys[self.host.are_present(keys)]

    def _n_bytes(self, moves: Iterable[Move]) -> int:
        """Return the bytes of the slots that these moves take."""
        return sum(self._pools[move.pool].slot_bytes for move in moves)

    def _promote(self, newcomers: Keys, used: Keys, limits: Limits = NO_LIMITS) -> list[Move]:
        """Give slots to newcomers, of experts that are neither `used` now nor arriving."""
        if not newcomers.size:
            return []
        needed = self.locations.arriving
        needed[used] = True
        if self.backing is not None:
            needed |= self.backing.unbacked
        return self._policy.promote(newcomers, needed, limits)

    def _pin(
        self, changes: Iterable[PinChange], used: Keys, budget_bytes: float = inf
    ) -> list[Move]:
        """Carry out changes of pins; pinned experts get slots as far as others may leave."""
        moves: list[Move] = []
        for reason, keys, new in changes:
            self._policy.pin(np.array(keys, np.int64), reason)
            wanted = np.array(new, np.int64)
            absent = self._copyable(wanted[~self.locations.are_resident(wanted)])
            left = budget_bytes - self._n_bytes(moves)
            moves += self._promote(absent, used, Limits(budget_bytes=left))
        self._note_reasons(moves, "pinned")
        return moves

    def _bring_pinned(self, used: Keys, budget_bytes: float) -> list[Move]:
        """Give slots to experts that were pinned by hand, as far as others may leave."""
        absent = ((self.locations.pins & BY_HAND) != 0) & ~self.locations.resident
        wanted = np.flatnonzero(absent)
        self._awaits_pinned = bool(wanted.size)
        limits = Limits(budget_bytes=budget_bytes)
        moves = self._promote(self._copyable(wanted), used, limits)
        self._note_reasons(moves, "pinned")
        return moves


class PoolResidency:
    """Orders experts into host slots; a layer needs them while its token runs and waits for misses.

    An expert in the pool that also has a device slot is the first to leave: it is not read there.
    """

    def __init__(
        self,
        space: KeySpace,
        pools: Sequence[PoolSpec],
        policy: PolicyName,
        counts: DecayedCounts,
    ) -> None:
        """Begin with an empty pool; the owner of `counts` counts. All layers have host slots."""
        assert {layer for pool in pools for layer in pool.layers} == set(range(space.n_layers))
        self.space, self.pools = space, tuple(pools)
        self.locations, self._counts = Locations(space, pools), counts
        self._policy = POLICIES[policy](self.locations, counts)
        self.reasons: Reasons | None = None  # noted while that is watched

    def change_policy(self, name: PolicyName) -> None:
        """Let another policy choose what leaves from now on."""
        policy = POLICIES[name](self.locations, self._counts)
        policy.take_over(self._policy)
        self._policy = policy

    @property
    def n_at_once(self) -> int:
        """Return how many experts of one size can always be here together.

        What other layers keep in any case, although it is not needed now, leaves no room for them.
        """
        return min(pool.capacity - pool.floor * (len(pool.layers) - 1) for pool in self.pools)

    def use(self, keys: Keys) -> Keys:
        """Note that a layer uses these; returns those that are neither here nor on their way."""
        return self._policy.use(keys)

    def bring(self, keys: Sequence[int], kept: Mask, in_slots: Mask) -> list[Move]:
        """Give host slots to these distinct keys, in order, as long as others may leave for them.

        `kept` [n_keys] may not leave, nor may those on the way; `in_slots` leave first.
        """
        moves: list[Move] = []
        busy = kept | self.locations.arriving
        for pool in range(len(self.pools)):
            coming = [key for key in keys if self.locations.pool_of[key] == pool]
            if coming:
                moves += self._bring(pool, coming, busy, in_slots)
        return moves

    def enter(self, moves: Sequence[Move]) -> None:
        """Give experts the places that were chosen for them."""
        keys = np.array([move.key for move in moves], np.int64)
        self._policy.enter(keys, np.array([move.victim for move in moves], np.int64))

    def crowding(self, in_slots: Mask) -> Keys:
        """Return which experts are here and `in_slots` [n_keys] and leave no room for all others.

        The most used ones: they are to stay in their slots.
        """
        here, found = self.locations, [NO_KEYS]
        for index in range(len(self.pools)):
            ours = here.pool_of == index
            n_short = int((ours & ~in_slots & ~here.resident).sum()) - here.n_free(index)
            twice = np.flatnonzero(ours & in_slots & here.present)
            order = np.argsort(-self._counts.of(twice), kind="stable")
            found.append(twice[order[: max(0, n_short)]])
        return np.concatenate(found)

    def first_fill(self, in_slots: Mask) -> list[int]:
        """List what to read before the first token: the most used, else as many of each layer.

        Experts `in_slots` [n_keys] are left out: they are not read here.
        """
        used, left_out = self._counts.values(), in_slots | self.locations.resident
        wanted: list[int] = []
        for index, pool in enumerate(self.pools):
            rows = np.stack([self.space.keys(layer) for layer in pool.layers])
            ranks = np.argsort(np.argsort(-used[rows], axis=1, kind="stable"), axis=1)
            ranked = rows.ravel()[np.lexsort((-used[rows].ravel(), ranks.ravel()))]
            wanted += ranked[~left_out[ranked]][: self.locations.n_free(index)].tolist()
        return sorted(wanted)  # as they lie in the file

    def leaving_for(self, numbers: Keys, in_slots: Mask) -> Keys:
        """Return which experts leave so that these host slots can be put out of use.

        Those `in_slots` [n_keys] of the device first, then those that are the next to leave.
        """
        order = self._policy.leaving_order()
        stays = ~np.append(in_slots, False)[order]
        order = np.take_along_axis(order, np.argsort(stays, axis=1, kind="stable"), axis=1)
        return self.locations.leaving_for(numbers, order)

    def check_integrity(self) -> None:
        """Raise AssertionError if the record or the policy contradicts itself (tests)."""
        self._policy.check_integrity()

    # ----- inside -----

    def _bring(self, pool: int, coming: list[int], busy: Mask, in_slots: Mask) -> list[Move]:
        locations, leaving = self.locations, NO_KEYS
        n_short = len(coming) - locations.n_free(pool)
        if n_short > 0:
            twice = locations.present & in_slots & ~busy & (locations.pool_of == pool)
            leaving = np.flatnonzero(twice)[:n_short]
        n = len(leaving)
        if n:
            self._policy.enter(np.array(coming[:n], np.int64), leaving)
            busy[coming[:n]] = True  # the others' victims are none of these
        pairs = zip(coming[:n], leaving.tolist(), strict=True)
        moves = [Move(pool, key, victim) for key, victim in pairs]
        return moves + self._policy.promote(coming[n:], busy)
