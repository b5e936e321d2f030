"""Admission: an expert gets a slot only if it is worth more than its victim, far more if copied.

That makes fewer copies, and hardly a hit less, whatever the routing is like.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, trace_of
from tests.experts.tokens import after_token
from vkmoe.choices import PredictorName
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.locations import Move
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.decide.worth import COPY, GUESS
from vkmoe.experts.records.trace import Trace
from vkmoe.experts.study.replay import PLAIN, SimulationResult, Transfers, simulate

HELD, MISSED = (0, 1), 7  # one layer of eight experts, with slots for two
LAYERS, EXPERTS, USED = 3, 32, 4


def full(predictor: PredictorName = "none") -> Residency:
    """Experts 0 and 1 have the slots, and enough tokens were seen to weigh them."""
    settings = CacheSettings(admission=True, predictor=predictor)
    made = Residency(KeySpace(1, 8), [PoolSpec((0,), 2, 0, 100)], settings)
    for _ in range(80):
        made.arrived(after_token(made, np.array([HELD], np.uint32)))
    return made


def weigh(cache: Residency, missed: float, held: float) -> None:
    """Let this be worth what is missed next, and that who has a slot, whatever was learned."""
    foresight = cache._foresight
    assert foresight is not None and foresight.worth is not None
    worth = np.zeros(8)
    worth[MISSED], worth[list(HELD)] = missed, held

    foresight.worth = foresight.held_worth = worth
    foresight.expect = lambda upcoming: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("worth", "landed", "enters"),
    [
        (COPY * 0.99, False, False),
        (COPY * 1.01, False, True),
        (0.99, True, False),
        (1.01, True, True),
    ],
)
def test_a_copy_must_pay_for_its_bytes_and_landing_costs_none(
    worth: float, landed: bool, enters: bool
) -> None:
    cache = full()
    weigh(cache, worth, 1.0)
    moves = after_token(cache, np.array([[MISSED, 1]], np.uint32), [MISSED] if landed else [])
    assert moves == ([Move(0, MISSED, 0, landed)] if enters else [])


@pytest.mark.parametrize(("worth", "enters"), [(GUESS * 0.99, False), (GUESS * 1.01, True)])
def test_a_guess_must_be_worth_still_more(worth: float, enters: bool) -> None:
    cache = full("frequency")
    weigh(cache, worth, 1.0)
    moves = cache.hint([MISSED], np.zeros(0, np.int64))
    assert [move.key for move in moves] == ([MISSED] if enters else [])


def test_who_has_a_slot_keeps_it_for_the_long_run_or_for_what_comes_next() -> None:
    """Six experts follow each other in pairs: the predictor is sure of the next, counts are not."""
    cache = full("correlation")
    pairs = [(2, 3), (4, 5), (6, 7)]
    for token in range(120):
        cache.arrived(after_token(cache, np.array([pairs[token % 3]], np.uint32)))
    foresight = cache._foresight
    assert foresight is not None and foresight.worth is not None
    assert foresight.held_worth is not None
    due, others = list(pairs[0]), [*pairs[1], *pairs[2]]
    assert foresight.worth[due].min() > 0.5 > foresight.worth[others].max()
    gained = foresight.held_worth - foresight.worth
    assert gained.min() == 0, "never less than the next token lets expect"
    assert gained[others].max() > 0.1, "more for what the long run says"


def steady(n_tokens: int, seed: int = 0) -> Trace:
    """Experts are liked by Zipf's law throughout; every fourth token passes through."""
    random = np.random.default_rng(seed)
    liking = -1.5 * np.log1p(np.arange(EXPERTS))
    tokens = []
    for token in range(n_tokens):
        scores = liking if token % 4 else np.zeros(EXPERTS)
        noise = random.gumbel(size=(LAYERS, EXPERTS))
        tokens.append(np.argsort(-(scores + noise), axis=1)[:, :USED])
    return trace_of(np.array(tokens, np.uint32), EXPERTS)


TRACES = {
    "drifting": trace_of(drifting(300, LAYERS, EXPERTS, USED, seed=1), EXPERTS),
    "drifting fast": trace_of(drifting(300, LAYERS, EXPERTS, USED, 2, persistence=2), EXPERTS),
    "steady": steady(300),
}


def run(name: str, slots: int, transfers: Transfers = PLAIN, **choices: object) -> SimulationResult:
    trace = TRACES[name]
    pools = make_pools([slots] * LAYERS, trace.header.span_bytes, USED, "layer")
    return simulate(trace, CacheSettings(**choices), pools, transfers=transfers)  # type: ignore[arg-type]


def all_bytes(result: SimulationResult) -> float:
    """Read in place and copied, per token."""
    return result.read_bytes + result.copied_bytes


@pytest.mark.parametrize("slots", [4, 8, 16])
@pytest.mark.parametrize("name", TRACES)
def test_admission_costs_hardly_a_hit_and_no_more_bytes(name: str, slots: int) -> None:
    """A fixed bar of counts loses 28 points on the fast one, with 4 slots. There a copy is used for
    two or three tokens only, and fewer of them are worth their bytes."""
    each, weighed = run(name, slots), run(name, slots, admission=True)
    lost = 0.04 if (name, slots) == ("drifting fast", 4) else 0.007
    assert weighed.hit_rate >= each.hit_rate - lost
    assert weighed.n_promoted.sum() < each.n_promoted.sum()
    assert all_bytes(weighed) < (0.9 if lost > 0.01 else 1.0) * all_bytes(each)


def test_where_experts_pass_through_it_saves_most_copies_and_gains_hits() -> None:
    each, weighed = run("steady", 8), run("steady", 8, admission=True)
    assert weighed.n_promoted.sum() < 0.5 * each.n_promoted.sum()
    assert weighed.hit_rate > each.hit_rate + 0.02


def test_landing_is_weighed_too_but_copies_nothing() -> None:
    plain, landing = (run("steady", 8, Transfers(n_landing=n), admission=True) for n in (0, 2))
    assert landing.n_landed > 0
    assert landing.n_promoted.sum() < plain.n_promoted.sum()
    everybody = run("steady", 8, Transfers(n_landing=USED))
    assert everybody.n_promoted.sum() == 0, "each missed one has landed"
    assert np.array_equal(everybody.hits, run("steady", 8).hits)


def test_nothing_is_weighed_where_every_expert_has_a_slot() -> None:
    """No prediction, no copy, no table write: the engine must not notice that it could."""
    trace = TRACES["drifting"]
    pools = make_pools([EXPERTS] * LAYERS, trace.header.span_bytes, USED, "layer")
    cache = Residency(trace.space, pools, CacheSettings(admission=True, predictor="correlation"))
    for routing in trace.routing[:60]:
        moves = after_token(cache, routing)
        assert {move.key for move in moves} <= set(trace.space.keys_of(routing).ravel().tolist())
        cache.arrived(moves)
    assert cache._foresight is None and cache.predictions.n_hinted == 0
    assert cache.guess_next_layer(0, trace.routing[0, 0]).size == 0
