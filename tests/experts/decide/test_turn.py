"""Turns taken in the extension, beside the same turns step by step: the same bits throughout."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.experts.invented_traces import drifting
from vkmoe.experts import _residency
from vkmoe.experts.decide import foresight, turn
from vkmoe.experts.decide.foresight import Foresight
from vkmoe.experts.decide.keys import NO_KEYS, KeySpace
from vkmoe.experts.decide.locations import Locations, Move
from vkmoe.experts.decide.policies import Forecast
from vkmoe.experts.decide.reasons import Reasons
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.decide.token_table import TokenTable, Upcoming

N_LAYERS, N_EXPERTS, N_USED, N_IDS = 4, 16, 3, 12
SPACE = KeySpace(N_LAYERS, N_EXPERTS)
# Layers that share slots and keep some, one with slots of its own, and one without any.
SHARED = (PoolSpec((0, 2), 11, 3, 256), PoolSpec((1,), 5, 0, 512))
OWN = tuple(PoolSpec((layer,), 4, 0, 256) for layer in range(N_LAYERS))
ROOMY = (PoolSpec((0, 1, 2, 3), 40, 2, 256),)


class Case(NamedTuple):
    pools: tuple[PoolSpec, ...]
    settings: CacheSettings
    n_rows: int = 1  # of a run
    n_landing: int = 0
    has_host: bool = False
    exchanges: bool = False
    knows_later: bool = False


PLAIN, BESIDE = CacheSettings("forecast"), CacheSettings("forecast", lag=2)
CASES = {
    "shared slots": Case(SHARED, PLAIN),
    "own slots beside tokens": Case(OWN, BESIDE, n_landing=2, knows_later=True),
    "free slots": Case(ROOMY, BESIDE, knows_later=True),
    "several rows": Case(SHARED, PLAIN, n_rows=3, knows_later=True),
    "a small host pool": Case(OWN, BESIDE, has_host=True, knows_later=True),
    "exchanged places": Case(SHARED, BESIDE, n_landing=1, has_host=True, exchanges=True),
    "without slots": Case((), PLAIN),
}


class Both:
    """Two that are told the same; the `fast` one takes its turns in the extension."""

    def __init__(self, case: Case, seed: int) -> None:
        self.random, self.case = np.random.default_rng(seed), case
        self.fast, self.plain = (self._made(plain) for plain in (False, True))
        assert self.fast._turn is not None and self.plain._turn is None
        for each in (self.fast, self.plain):
            each.arrived(each.start())
        routing = drifting(160 * case.n_rows, N_LAYERS, N_EXPERTS, N_USED, seed)
        self.routing = routing.reshape(-1, case.n_rows, N_LAYERS, N_USED)
        self.ids = self.random.integers(0, N_IDS, (len(self.routing), case.n_rows)).tolist()
        self.n_moves = self.n_refused = self.n_landed = 0

    def _made(self, plain: bool) -> Residency:
        made = Residency(SPACE, self.case.pools, self.case.settings, plain=plain)
        if self.case.n_landing:
            made.locations.set_apart(self.case.n_landing)
        if self.case.has_host:
            host = Locations(SPACE, [PoolSpec(tuple(range(N_LAYERS)), 40, 0, 512)])
            free = np.full(40, -1, np.int64)
            host.enter(np.arange(0, 40, dtype=np.int64), free)
            host.arrive(np.arange(0, 40, dtype=np.int64))
            made.host = host
            if self.case.exchanges:
                made.exchange_with(host)
        made.reasons = Reasons(SPACE)
        return made

    def run(self, n: int) -> None:
        """One run, and what is decided behind it."""
        routing, ids = self.routing[n], self.ids[n]
        tokens = [token if self.random.random() < 0.9 else None for token in ids]
        answers = [each.observe(routing, tokens) for each in (self.fast, self.plain)]
        assert (answers[0] == answers[1]).all()
        if self.random.random() < 0.8:  # as while the next run is computed
            self.fast.learn()
            self.plain.learn()
        known = self.ids[n + 1] if n + 1 < len(self.ids) and self.random.random() < 0.9 else ()
        later = [one for row in self.ids[n + 2 : n + 9] for one in row]
        upcoming = Upcoming(tuple(known), tuple(later if known and self.case.knows_later else ()))
        budget = float(self.random.choice([inf, inf, 0, 700, 2000]))
        missed = self.fast._undecided[-1][1]
        landed = self.random.permutation(missed)[: self.case.n_landing * 2].tolist()
        moves = self.fast.decide(landed, budget, upcoming)
        assert moves == self.plain.decide(landed, budget, upcoming)
        self.n_moves += len(moves)
        self.n_landed += sum(move.landed for move in moves)
        self.n_refused += len(missed) - len(moves)
        self._arrive(moves)

    def _arrive(self, moves: list[Move]) -> None:
        """Most of what moves is there at once, the rest later, or never."""
        for key in [move.key for move in moves]:
            chance = self.random.random()
            for each in (self.fast, self.plain):
                if chance < 0.8:
                    each.locations.arrive([key])
                elif chance < 0.9:
                    each.locations.leave([key])
        late = self.fast.locations.waiting() if self.random.random() < 0.3 else NO_KEYS
        for each in (self.fast, self.plain):
            each.locations.arrive(late)

    def compare(self) -> None:
        """All that they know is the same, but for the numbers that stand for an order."""
        pairs = zip(_known(self.fast), _known(self.plain), strict=True)
        for n, (one, other) in enumerate(pairs):
            assert np.array_equal(one, other), n
        self.fast.check_integrity()


def _known(residency: Residency) -> list[Any]:
    policy, locations, foresight = residency._policy, residency.locations, residency._foresight
    assert isinstance(policy, Forecast)
    found: list[Any] = [*locations.record, *locations.derived, *policy.record[1:]]
    found += [np.argsort(policy.record.last, kind="stable"), residency.counts.raw]
    assert residency.reasons is not None
    found += [residency.reasons._came, residency.reasons._left_for]
    if foresight is not None:
        found += [each.raw for each in foresight.chances.short]
        found += [policy.worth, foresight.scores, foresight._due, foresight.counts]
        found += [foresight.chances._products, foresight.chances._sums]
        found += foresight.table.arrays if isinstance(foresight.table, TokenTable) else []
    return found


@pytest.mark.parametrize("name", CASES)
def test_both_decide_alike_on_random_traces(name: str) -> None:
    n_moves = n_landed = n_refused = 0
    for seed in range(2):
        both = Both(CASES[name], seed)
        for n in range(len(both.routing)):
            both.run(n)
            if n % 8 == 0:
                both.compare()
            if n % 40 == 20:
                keys = both.random.permutation(np.flatnonzero(both.fast.locations.pool_of >= 0))[:2]
                both.fast.pin(keys)
                both.plain.pin(keys)
            if n % 40 == 30:
                both.fast.unpin(np.arange(SPACE.n_keys))
                both.plain.unpin(np.arange(SPACE.n_keys))
            if n == 90:
                both.fast.reset_predictions()
                both.plain.reset_predictions()
        both.compare()
        n_moves, n_landed = n_moves + both.n_moves, n_landed + both.n_landed
        n_refused += both.n_refused
    assert not CASES[name].pools or (n_moves > 100 and n_refused > 100)
    assert n_landed > 50 or not CASES[name].n_landing


def test_a_turn_may_be_either_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension keeps nothing to itself."""
    both = Both(CASES["own slots beside tokens"], 5)
    turn = both.fast._turn
    for n in range(len(both.routing)):
        monkeypatch.setattr(both.fast, "_turn", turn if both.random.random() < 0.5 else None)
        both.run(n)
    both.compare()


def test_of_many_guesses_both_take_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foresight, "most_guessed", 2)
    for module in (foresight, turn):  # so that there are many
        monkeypatch.setattr(module, "LIKELY", 0.1)
    both = Both(CASES["own slots beside tokens"], 7)
    for n in range(len(both.routing)):
        both.run(n)
    both.compare()
    assert both.fast.predictions.n_hinted >= 5


@pytest.mark.parametrize("plain", [False, True])
def test_what_is_learned_does_not_depend_on_when(plain: bool) -> None:
    """While the next token runs, or only when counts are about to change."""
    routing = drifting(60, N_LAYERS, N_EXPERTS, N_USED, 2)
    early, late = (Residency(SPACE, OWN, BESIDE, plain=plain) for _ in range(2))
    for ids in routing:
        for each in (early, late):
            each.observe(ids[None])
            each.leave()
        early.learn()
    late.learn()
    for one, other in zip(_learned(early), _learned(late), strict=True):
        assert one.any() and np.array_equal(one, other)


def _learned(residency: Residency) -> list[Any]:
    assert residency._foresight is not None
    chances = residency._foresight.chances
    assert chances._kept is not None
    return [chances._products, chances._sums, *chances._kept]


def test_what_does_not_fit_is_refused() -> None:
    made = Residency(SPACE, OWN, PLAIN)
    assert made._turn is not None and isinstance(made._policy, Forecast)
    native, ids = made._turn._native, np.zeros((N_LAYERS, N_USED), np.uint32)
    before = made.counts.raw.copy()
    for wrong in (ids[1:], ids[0], ids + np.uint32(N_EXPERTS)):
        with pytest.raises(ValueError, match=r"ids are|an id is"):
            native.observe(wrong, [0.0, 0.0, 1.0], 1)
    with pytest.raises(ValueError, match="weights"):
        native.observe(ids, [1.0] * 4, 1)
    assert (made.counts.raw == before).all()
    make: Any = _residency.Turn
    arrays: list[Any] = [*made.locations.record, *made._policy.record]
    for place in range(1, len(arrays)):
        fewer: list[Any] = [each[:-1] if i == place else each for i, each in enumerate(arrays)]
        with pytest.raises(ValueError, match="not"):
            make(*fewer, [made.counts.raw], N_EXPERTS, Move)
    with pytest.raises(TypeError):
        make(*arrays, [made.counts.raw.astype(np.float32)], N_EXPERTS, Move)
    with pytest.raises(ValueError, match="named tuple"):
        make(*arrays, [made.counts.raw], N_EXPERTS, list)
