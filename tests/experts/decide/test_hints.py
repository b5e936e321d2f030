"""Experts fetched on a guess: whom, in whose place, within what budget, and never at a cost."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.experts.invented_traces import drifting, trace_of
from tests.experts.pins import named, warm
from tests.experts.tokens import after_token
from vkmoe.choices import PredictorName
from vkmoe.experts.decide.locations import FREE, Locations, Move
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.decide.worth import LEARNED
from vkmoe.experts.study.replay import Transfers, simulate

LAYERS, EXPERTS, USED = 2, 32, 4
N_GROUPS = EXPERTS // USED


def round_trip(n: int) -> NDArray[np.uint32]:
    """Token n uses the n-th four experts of each layer, so it tells who comes next."""
    group = n % N_GROUPS
    ids = np.arange(group * USED, (group + 1) * USED, dtype=np.uint32)
    return np.stack([ids, ids])


TRACE = trace_of(np.stack([round_trip(n) for n in range(160)]), EXPERTS)


def cache_of(slots: int = 12, **choices: Any) -> Residency:
    pools = make_pools([slots] * LAYERS, [100] * LAYERS, USED, choices.pop("allocation", "layer"))
    values: dict[str, Any] = {"admission": True, "predictor": "correlation", "lag": 2, **choices}
    return Residency(TRACE.space, pools, CacheSettings(**values))


def taught(n: int = 100, **choices: Any) -> Residency:
    """After tokens 0 to n - 1, all copies in place."""
    cache = cache_of(**choices)
    for token in range(n):
        if cache.settings.executor == "stepped":
            steps(cache, round_trip(token))
        cache.arrived(after_token(cache, round_trip(token)))
    return cache


def steps(cache: Residency, routing: NDArray[np.uint32]) -> list[Move]:
    """The hints of one token, layer by layer, which land at once."""
    found = []
    for layer, ids in enumerate(routing):
        keys = ids.astype(np.int64) + layer * EXPERTS
        moves = cache.hint(cache.guess_next_layer(layer, ids).tolist(), keys)
        cache.arrived(moves)
        found += moves
    return found


def keys_of(n: int) -> set[int]:
    """Numbers of the experts of token n."""
    ids = round_trip(n)
    return {int(key) for layer in range(LAYERS) for key in ids[layer] + layer * EXPERTS}


# ----- whom -----


def test_who_always_follows_is_there_before_it_is_missed() -> None:
    """Its copy is under way beside a token, and nothing else gets its slot then."""
    cache = cache_of()
    under_way: list[Move] = []
    for token in range(120):
        moves = after_token(cache, round_trip(token))
        cache.arrived(under_way)
        under_way = moves
        cache.check_integrity()
        assert token < 100 or cache.hits(round_trip(token + 1)).all(), token
    counts = cache.predictions
    assert counts.n_right / counts.n_hinted > 0.9
    assert counts.hinted_bytes == 100 * counts.n_hinted


def test_without_a_predictor_nobody_is_there_early() -> None:
    cache = taught(predictor="none")
    assert {move.key for move in after_token(cache, round_trip(100))} <= keys_of(100)
    assert cache.predictions.n_hinted == 0


def test_a_guess_is_about_the_token_that_its_copy_is_there_for() -> None:
    """A copy that overlaps a token: that is the one after the next."""
    pools = make_pools([12] * LAYERS, [100] * LAYERS, USED, "layer")
    choices = CacheSettings(admission=True, predictor="correlation", lag=2)
    result = simulate(TRACE, choices, pools, transfers=Transfers(late=True))
    assert result.hits[80:].mean() / USED > 0.95


@pytest.mark.parametrize("predictor", ["correlation", "token"])
def test_where_a_token_waits_for_copies_nothing_is_fetched_ahead(predictor: PredictorName) -> None:
    """A copy would cost as much as the miss that it saves, if it saves one."""
    cache = taught(lag=1, predictor=predictor)
    assert cache.predictions.n_hinted == 0
    assert {move.key for move in after_token(cache, round_trip(100))} <= keys_of(100)


def test_the_next_layer_is_guessed_from_the_one_at_hand() -> None:
    cache = taught(executor="stepped")
    ids = round_trip(101)[0]
    after_token(cache, round_trip(100))
    expected = {int(expert) + EXPERTS for expert in round_trip(101)[1]}
    guessed = cache.guess_next_layer(0, ids).tolist()
    assert set(guessed) == {key for key in expected if not cache.locations.resident[key]}
    assert cache.guess_next_layer(LAYERS - 1, ids).size == 0, "there is none after the last"


def test_in_stepped_mode_guesses_wait_for_the_layers() -> None:
    cache = taught(executor="stepped")
    before = cache.predictions.n_hinted
    assert {move.key for move in after_token(cache, round_trip(100))} <= keys_of(100)
    assert cache.predictions.n_hinted == before > 0
    assert cache.predictions.n_right / before > 0.8


# ----- when not -----


@pytest.mark.parametrize("predictor", ["previous", "correlation", "frequency"])
def test_with_a_slot_for_everybody_nobody_is_fetched(predictor: PredictorName) -> None:
    cache = cache_of(slots=EXPERTS, predictor=predictor)
    for token in range(80):
        moves = after_token(cache, round_trip(token))
        assert {move.key for move in moves} <= keys_of(token)
        cache.arrived(moves)
        assert cache.guess_next_layer(0, round_trip(token)[0]).size == 0


def test_during_the_warm_up_nobody_is_fetched() -> None:
    cache = taught(n=33)
    assert cache.predictions.n_hinted == 0


def test_a_new_text_is_not_guessed_from_the_last_one() -> None:
    """What was fetched for the next token of the old text is not counted as right either."""
    cache = taught()
    n_right = cache.predictions.n_right
    cache.reset_predictions()
    coming = {int(key) for key in np.flatnonzero(cache.locations.resident)} & keys_of(100)
    assert coming, "it was guessed before the text ended"
    moves = after_token(cache, round_trip(100))
    assert cache.predictions.n_right == n_right
    assert {move.key for move in moves} <= keys_of(100) | keys_of(102), "the model is known still"


def test_without_slots_guesses_are_told_but_nothing_moves() -> None:
    """For a host pool smaller than the model, on a device that reads experts in place."""
    choices = CacheSettings(predictor="correlation", executor="stepped")
    cache = Residency(TRACE.space, (), choices)
    for token in range(60):
        assert after_token(cache, round_trip(token)) == []
    guessed = cache.guess_next_layer(0, round_trip(60)[0])
    assert set(guessed.tolist()) == {int(expert) + EXPERTS for expert in round_trip(60)[1]}
    assert cache.hint(guessed.tolist(), np.array([0])) == []


def test_who_cannot_be_copied_is_not_fetched() -> None:
    cache = taught()
    absent = [key for key in keys_of(102) if not cache.locations.resident[key]]
    n_keys = TRACE.space.n_keys
    cache.host = Locations(TRACE.space, [PoolSpec(tuple(range(LAYERS)), n_keys, 0, 100)])
    others = np.setdiff1d(np.arange(n_keys), list(keys_of(102)))
    cache.host.enter(others, np.full(len(others), FREE))
    cache.host.arrive(others)
    moves = after_token(cache, round_trip(100))
    assert absent and not {move.key for move in moves} & keys_of(102)


# ----- in whose place -----


def test_a_guess_takes_no_slot_of_whom_the_token_used_or_who_is_under_way() -> None:
    cache = taught(slots=8)
    under_way: set[int] = set()
    for token in range(100, 130):  # nothing lands any more
        moves = after_token(cache, round_trip(token))
        victims = {move.victim for move in moves if move.victim != FREE}
        assert not victims & (keys_of(token) | under_way)
        under_way |= {move.key for move in moves}
        cache.check_integrity()


def test_a_hint_spares_whom_the_layer_at_hand_needs() -> None:
    """As many slots as a token uses, all needed now: nobody can be fetched."""
    cache = taught(slots=USED, allocation="global", executor="stepped")
    needed = np.flatnonzero(cache.locations.resident)
    absent = np.flatnonzero(~cache.locations.resident)
    assert cache.hint(absent.tolist(), needed) == []


def test_a_pinned_expert_stays() -> None:
    cache = taught(pins=(named(0, 31),))
    cache.arrived(after_token(cache, round_trip(0)))
    for token in range(101, 130):
        victims = {move.victim for move in after_token(cache, round_trip(token))}
        assert not victims & {0, 31, EXPERTS, EXPERTS + 31}


# ----- within what budget, and in what order -----


@pytest.mark.parametrize("budget", [0, 99, 100, 350, 800])
def test_landed_and_missed_come_first_and_the_budget_holds(budget: int) -> None:
    cache = taught(n=100, admission=False)
    routing = round_trip(103)  # not the one that was guessed
    missed = [int(key) for key in keys_of(103) if not cache.locations.resident[key]]
    landed = missed[:2]
    moves = after_token(cache, routing, landed, budget)
    assert all(move.landed == (move.key in landed) for move in moves)
    copied = [move.key for move in moves if not move.landed]
    assert 100 * len(copied) <= budget
    if set(copied) - set(missed):
        assert {*missed[2:]} <= {*copied}, "a guess came before somebody who was missed"
    cache.check_integrity()


def test_a_landed_expert_that_is_not_worth_it_is_not_kept() -> None:
    """Nearly all tokens use the same; now and then others pass through."""
    cache = cache_of(slots=4, predictor="none")
    usual = round_trip(0)
    passing = usual.copy()
    for token in range(120):
        passing[:, 3] = 4 + token % 28
        cache.arrived(after_token(cache, passing if token % 3 == 0 else usual))
    cache.arrived(after_token(cache, usual))
    passing[:, 3] = 20
    assert cache.hits(usual).all()
    assert after_token(cache, passing, landed=[20, EXPERTS + 20]) == []
    unguarded = cache_of(slots=4, admission=False, predictor="none")
    assert after_token(unguarded, passing, [20])[0].landed


def test_who_landed_although_its_copy_is_under_way_is_left_to_the_copy() -> None:
    cache = cache_of(predictor="none", admission=False)
    (first, *_) = after_token(cache, round_trip(0))
    assert after_token(cache, round_trip(0), landed=[first.key]) == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["layer", "global"]), st.booleans(),
       st.sampled_from(["previous", "correlation", "frequency", "none"]))  # fmt: skip
def test_whatever_happens_the_books_are_right(
    seed: int, allocation: str, admission: bool, predictor: PredictorName
) -> None:
    """Random tokens, budgets, landings, failures, late copies, resets and hints."""
    random = np.random.default_rng(seed)
    tokens = drifting(60, LAYERS, EXPERTS, USED, seed % 1000)
    cache = cache_of(slots=int(random.integers(1, 20)), allocation=allocation,
                     pins=(warm(2, 7),), admission=admission, predictor=predictor,
                     executor=random.choice(["fused", "stepped"]))  # fmt: skip
    under_way: list[Move] = []
    for routing in tokens:
        keys = routing.astype(np.int64) + np.arange(LAYERS)[:, None] * EXPERTS
        budget = float(random.choice([0, 300, inf]))
        for layer in range(LAYERS):
            guessed = cache.guess_next_layer(layer, routing[layer]).tolist()
            hinted = cache.hint(guessed, keys[layer], budget)
            assert not {move.victim for move in hinted} & set(keys[layer].tolist())
            assert 100 * len(hinted) <= budget
            under_way += hinted
        missed = keys[~cache.hits(routing)]
        landed = random.permutation(missed)[: random.integers(0, 3)].tolist()
        moving = {move.key for move in under_way}
        moves = after_token(cache, routing, landed, budget)
        copies = [move for move in moves if not move.landed]
        assert 100 * len(copies) <= budget
        assert not {move.victim for move in moves} & (set(keys.ravel().tolist()) | moving)
        cache.arrived([move for move in moves if move.landed])
        under_way += copies
        if random.random() < 0.5:
            n = int(random.integers(0, len(under_way) + 1))
            note = cache.locations.leave if random.random() < 0.2 else cache.locations.arrive
            note([move.key for move in under_way[:n]])
            under_way = under_way[n:]
        if random.random() < 0.05:
            cache.reset_predictions()
        if random.random() < 0.03:
            cache.locations.leave(np.flatnonzero(cache.locations.resident))
            under_way = []
        cache.check_integrity()


def test_a_long_prompt_teaches_by_its_last_tokens_and_counts_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guess about its first token is forgotten; the next one is what its last ones say."""
    n_tokens, learned, cache = 2 * LEARNED + 3, [], taught()
    assert cache._foresight is not None
    learn = cache._foresight.after_token

    def noted(ids: NDArray[np.uint32], keys: NDArray[np.int64]) -> None:
        learned.append(int(ids[0, 0]))
        learn(ids, keys)

    monkeypatch.setattr(cache._foresight, "after_token", noted)
    routing = np.stack([round_trip(n) for n in range(100, 100 + n_tokens)])
    n_before, now, n_right = cache.n_tokens, cache.counts.now, cache.predictions.n_right
    cache.observe(routing)
    cache.learn()
    assert learned == routing[-LEARNED:, 0, 0].tolist()
    assert cache.predictions.n_right == n_right
    assert {move.key for move in cache.decide()} <= keys_of(100 + n_tokens)
    assert (cache.n_tokens, cache.counts.now) == (n_before + n_tokens, now + n_tokens)
    cache.check_integrity()
