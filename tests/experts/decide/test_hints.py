"""Experts fetched on a guess: which, in whose place, within what budget, and never at a cost."""

from __future__ import annotations

from math import inf
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.experts.invented_traces import drifting, trace_of
from tests.experts.pins import named, warm
from tests.experts.tokens import after_token
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.foresight import LEARNED
from vkmoe.experts.decide.locations import FREE, Locations, Move
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.decide.token_table import Upcoming

LAYERS, EXPERTS, USED = 2, 32, 4
N_GROUPS = EXPERTS // USED


def round_trip(n: int) -> NDArray[np.uint32]:
    """Token n has the id n % 8, and uses four experts of its own of each layer."""
    group = n % N_GROUPS
    ids = np.arange(group * USED, (group + 1) * USED, dtype=np.uint32)
    return np.stack([ids, ids])


TRACE = trace_of(np.stack([round_trip(n) for n in range(160)]), EXPERTS)


def cache_of(slots: int = 12, policy: PolicyName = "forecast", **choices: Any) -> Residency:
    pools = make_pools([slots] * LAYERS, [100] * LAYERS, USED, choices.pop("allocation", "layer"))
    return Residency(TRACE.space, pools, CacheSettings(policy, **{"lag": 2, **choices}))


def token(
    cache: Residency, n: int, landed: list[int] | None = None, budget: float = inf
) -> list[Move]:
    """Run token n, where those behind it are known, as in a prompt."""
    coming = tuple(i % N_GROUPS for i in range(n + 1, n + 9))
    upcoming = Upcoming(coming[:1], coming[1:])
    return after_token(cache, round_trip(n), landed or [], budget, n % N_GROUPS, upcoming)


def taught(n: int = 100, **choices: Any) -> Residency:
    """After tokens 0 to n - 1, all copies in place."""
    cache = cache_of(**choices)
    for i in range(n):
        if cache.settings.executor == "stepped":
            steps(cache, round_trip(i))
        cache.arrived(token(cache, i))
    return cache


def steps(cache: Residency, routing: NDArray[np.uint32]) -> list[Move]:
    """The hints of one token, layer by layer, which land at once."""
    found = []
    for layer, ids in enumerate(routing):
        keys = ids.astype(np.int64) + layer * EXPERTS
        moves = cache.hint(cache.guess_layer(layer + 1), keys)
        cache.arrived(moves)
        found += moves
    return found


def keys_of(n: int) -> set[int]:
    """Numbers of the experts of token n."""
    ids = round_trip(n)
    return {int(key) for layer in range(LAYERS) for key in ids[layer] + layer * EXPERTS}


# ----- which -----


def test_what_is_sure_to_come_is_there_before_it_is_missed() -> None:
    """Its copy is under way beside a token, and nothing else gets its slot then."""
    cache = cache_of()
    under_way: list[Move] = []
    for n in range(120):
        moves = token(cache, n)
        cache.arrived(under_way)
        under_way = moves
        cache.check_integrity()
        assert n < 60 or cache.hits(round_trip(n + 1)).all(), n
    counts = cache.predictions
    assert counts.n_right / counts.n_hinted > 0.9
    assert counts.hinted_bytes == 100 * counts.n_hinted


@pytest.mark.parametrize(
    "choices",
    [{"prefetches": False}, {"lag": 1}, *({"policy": name} for name in ("lru", "slru", "lfru"))],
    ids=str,
)
def test_nothing_is_fetched_ahead_where_it_is_off_or_a_token_waits(choices: Any) -> None:
    """Where a token waits, a copy would cost as much as the miss that it saves, if it saves one."""
    for stepped in (False, True):
        if stepped and "lag" in choices:
            continue
        cache = taught(executor="stepped" if stepped else "fused", **choices)
        assert cache.predictions.n_hinted == 0
        assert not stepped or cache.guess_layer(0).size == 0
        assert {move.key for move in token(cache, 100)} <= keys_of(100)


def test_the_next_layer_is_guessed() -> None:
    cache = taught(slots=6, executor="stepped")
    token(cache, 100)
    expected = {int(expert) + EXPERTS for expert in round_trip(101)[1]}
    guessed = cache.guess_layer(1).tolist()
    assert guessed and set(guessed) == {k for k in expected if not cache.locations.resident[k]}
    assert cache.guess_layer(LAYERS).size == 0, "there is none after the last"


def test_in_stepped_mode_guesses_wait_for_the_layers() -> None:
    cache = taught(executor="stepped")
    before = cache.predictions.n_hinted
    assert {move.key for move in token(cache, 100)} <= keys_of(100)
    assert cache.predictions.n_hinted == before > 0
    assert cache.predictions.n_right / before > 0.8


# ----- when not -----


def test_with_a_slot_for_every_expert_none_is_fetched() -> None:
    cache = cache_of(slots=EXPERTS)
    for n in range(80):
        moves = token(cache, n)
        assert {move.key for move in moves} <= keys_of(n)
        cache.arrived(moves)
        assert cache.guess_layer(1).size == 0


def test_a_new_text_is_not_guessed_from_the_last_one() -> None:
    """What was fetched for the next token of the old text is not counted as right either."""
    cache = taught()
    n_right = cache.predictions.n_right
    cache.reset_predictions()
    coming = {int(key) for key in np.flatnonzero(cache.locations.resident)} & keys_of(100)
    assert coming, "it was guessed before the text ended"
    assert cache.guess_layer(1).size == 0
    moves = token(cache, 100)
    assert cache.predictions.n_right == n_right
    assert {move.key for move in moves} <= keys_of(100) | keys_of(102), "the model is known still"


def test_without_slots_guesses_are_made_but_nothing_moves() -> None:
    """For a host pool smaller than the model, on a device that reads experts in place."""
    cache = Residency(TRACE.space, (), CacheSettings("forecast", executor="stepped"))
    for n in range(60):
        assert token(cache, n) == []
    guessed = cache.guess_layer(1)
    assert set(guessed.tolist()) == {int(expert) + EXPERTS for expert in round_trip(60)[1]}
    assert cache.hint(guessed, np.array([0])) == []


def test_what_cannot_be_copied_is_not_fetched() -> None:
    cache = taught()
    absent = [key for key in keys_of(102) if not cache.locations.resident[key]]
    n_keys = TRACE.space.n_keys
    cache.host = Locations(TRACE.space, [PoolSpec(tuple(range(LAYERS)), n_keys, 0, 100)])
    others = np.setdiff1d(np.arange(n_keys), list(keys_of(102)))
    cache.host.enter(others, np.full(len(others), FREE))
    cache.host.arrive(others)
    moves = token(cache, 100)
    assert absent and not {move.key for move in moves} & keys_of(102)


# ----- in whose place -----


def test_a_pinned_expert_stays() -> None:
    cache = taught(pins=(named(0, 31),))
    cache.arrived(token(cache, 0))
    for n in range(101, 130):
        victims = {move.victim for move in token(cache, n)}
        assert not victims & {0, 31, EXPERTS, EXPERTS + 31}


# ----- within what budget, and in what order -----


@pytest.mark.parametrize("budget", [0, 99, 100, 350, 800])
def test_landed_ones_come_first_and_the_budget_holds(budget: int) -> None:
    cache = taught(policy="lru")
    missed = [int(key) for key in keys_of(103) if not cache.locations.resident[key]]
    landed = missed[:2]
    moves = token(cache, 103, landed, budget)
    assert [move.key for move in moves if move.landed] == landed
    copied = [move.key for move in moves if not move.landed]
    assert len(copied) == min(budget // 100, len(missed) - 2) and set(copied) <= set(missed)
    cache.check_integrity()


def test_a_landed_expert_that_is_not_worth_it_is_not_kept() -> None:
    """Nearly all tokens use the same; now and then others pass through."""
    cache = cache_of(slots=4)
    usual = round_trip(0)
    passing = usual.copy()
    for n in range(120):
        passing[:, 3] = 4 + n % 28
        cache.arrived(after_token(cache, passing if n % 3 == 0 else usual))
    cache.arrived(after_token(cache, usual))
    passing[:, 3] = 20
    assert cache.hits(usual).all()
    assert after_token(cache, passing, landed=[20, EXPERTS + 20]) == []
    unguarded = cache_of(slots=4, policy="slru")
    assert after_token(unguarded, passing, [20])[0].landed


def test_what_landed_although_its_copy_is_under_way_is_left_to_the_copy() -> None:
    cache = cache_of(policy="slru")
    (first, *_) = after_token(cache, round_trip(0))
    assert after_token(cache, round_trip(0), landed=[first.key]) == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["layer", "global"]),
       st.sampled_from(get_args(PolicyName)), st.booleans())  # fmt: skip
def test_whatever_happens_the_books_are_right(
    seed: int, allocation: str, policy: PolicyName, prefetches: bool
) -> None:
    """Random tokens, budgets, landings, failures, late copies, resets, hints and policies."""
    random = np.random.default_rng(seed)
    tokens = drifting(60, LAYERS, EXPERTS, USED, seed % 1000)
    cache = cache_of(slots=int(random.integers(1, 20)), allocation=allocation,
                     pins=(warm(2, 7),), policy=policy, prefetches=prefetches,
                     executor=random.choice(["fused", "stepped"]))  # fmt: skip
    under_way: list[Move] = []
    for routing in tokens:
        keys = routing.astype(np.int64) + np.arange(LAYERS)[:, None] * EXPERTS
        budget = float(random.choice([0, 300, inf]))
        for layer in range(LAYERS):
            hinted = cache.hint(cache.guess_layer(layer + 1), keys[layer], budget)
            assert not {move.victim for move in hinted} & set(keys[layer].tolist())
            assert 100 * len(hinted) <= budget
            under_way += hinted
        missed = keys[~cache.hits(routing)]
        landed = random.permutation(missed)[: random.integers(0, 3)].tolist()
        moving = {move.key for move in under_way}
        coming = tuple(random.integers(0, 9, random.integers(0, 5)).tolist())
        upcoming = Upcoming(coming[:1], coming[1:])
        moves = after_token(cache, routing, landed, budget, int(random.integers(0, 9)), upcoming)
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
        if random.random() < 0.05:
            cache.change_policy(random.choice(get_args(PolicyName)))
        if random.random() < 0.03:
            cache.locations.leave(np.flatnonzero(cache.locations.resident))
            under_way = []
        cache.check_integrity()


def test_a_long_prompt_teaches_by_its_last_tokens_and_counts_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_tokens, learned, cache = 2 * LEARNED + 3, [], taught()
    assert cache._foresight is not None
    chances = cache._foresight.chances
    learn = chances.noted

    def noted(keys: NDArray[np.int64]) -> None:
        learned.append(int(keys[0]))
        learn(keys)

    monkeypatch.setattr(chances, "noted", noted)
    routing = np.stack([round_trip(n) for n in range(100, 100 + n_tokens)])
    n_before, now = cache.n_tokens, cache.counts.now
    cache.observe(routing)
    cache.learn()
    assert learned == routing[-LEARNED:, 0, 0].tolist()
    assert {move.key for move in cache.decide()} <= keys_of(100 + n_tokens)
    assert (cache.n_tokens, cache.counts.now) == (n_before + n_tokens, now + n_tokens)
    cache.check_integrity()
