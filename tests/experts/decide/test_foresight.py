"""What experts are worth where the tokens to come are known, and what follows for slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.experts.invented_traces import drifting, trace_of
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.foresight import (
    AHEAD,
    COPY,
    COPY_FOR_NEXT,
    EVERY,
    LEAST,
    LIKELY,
    LOOKED_AT,
    NEARER,
    Foresight,
)
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.locations import Move
from vkmoe.experts.decide.residency import NEEDED, Residency
from vkmoe.experts.decide.settings import CacheSettings, make_pools
from vkmoe.experts.decide.token_table import TokenTable, Upcoming
from vkmoe.experts.study.replay import simulate

SPACE = KeySpace(2, 8)
SETTINGS = CacheSettings("forecast")
A, B, C = 11, 22, 33  # tokens
USES = {A: (0, 1), B: (2, 3), C: (4, 5)}


def ids(token: int) -> NDArray[np.uint32]:
    return np.array([USES[token]] * 2, np.uint32)


def learned(n_times: int = 60) -> TokenTable:
    """A table that has seen each token often enough to be sure."""
    table = TokenTable(SPACE, 2)
    for token in (A, B, C) * n_times:
        table.learn(token, ids(token))
    return table


def foresight() -> Foresight:
    return Foresight(SPACE, DecayedCounts(SPACE.n_keys), SETTINGS, learned())


def worth(upcoming: Upcoming) -> list[float]:
    """Of the experts of the first layer; nothing was used of late."""
    values = foresight().expect(upcoming)
    assert values is not None and (values[:8] == values[8:]).all()
    found: list[float] = values[:8].tolist()
    return found


def test_the_next_token_counts_most_and_later_ones_less_and_less() -> None:
    sure = 32 / 32.5  # as far as an id is believed
    found = worth(Upcoming((A,), (B, C, B)))
    assert found[0] == pytest.approx(sure)
    assert found[2] == pytest.approx(sure * (NEARER + NEARER**3))
    assert found[4] == pytest.approx(sure * NEARER**2)
    assert found[6] == 0


def test_only_so_many_runs_are_looked_at() -> None:
    far = worth(Upcoming((A,), (A,) * (AHEAD - 2) + (B, C)))
    assert far[2] > 0 and far[4] == 0


def test_an_expert_counts_once_for_a_run_however_many_rows_use_it() -> None:
    """Its bytes cross the link once. Later tokens make runs as long as the next one."""
    together = worth(Upcoming((A, A, B), (C, C, C, B)))
    assert together[0] == 1.0 and together[2] == pytest.approx(32 / 32.5 * (1 + NEARER**2))
    assert together[4] == pytest.approx(NEARER)


def test_of_a_long_run_the_first_tokens_are_looked_at() -> None:
    found = worth(Upcoming((A,) * LOOKED_AT + (B,)))
    assert found[0] == 1.0 and found[2] == 0


def test_the_more_runs_are_known_the_less_what_is_usual_counts() -> None:
    """It stands for all runs that are not: together they weigh as much as the last that is."""
    found = []
    for upcoming in (Upcoming((A,)), Upcoming((A,), (A,)), Upcoming((A,), (A, A))):
        made = foresight()
        made._counts.use(np.array([6]))
        values = made.expect(upcoming)
        assert values is not None
        found.append(values[6] / (made._counts.values()[6] * made._share))
    doubt = 0.5 / 32.5  # an id that was seen so often is believed so far
    known = [sum(NEARER**i for i in range(n)) for n in range(1, 4)]
    rest = [sum(NEARER**i for i in range(n, 60)) for n in range(1, 4)]
    assert found == pytest.approx([doubt * a + b for a, b in zip(known, rest, strict=True)])


def test_of_an_unknown_id_the_share_of_late_tokens_counts() -> None:
    made = foresight()
    for _ in range(3):
        made._counts.use(np.array([6, 14]))
        made._counts.advance()
    values = made.expect(Upcoming((999,)))
    assert values is not None and np.flatnonzero(values).tolist() == [6, 14]


def test_where_no_id_is_known_experts_have_no_worth_until_use_tells() -> None:
    """Then a copy must pay for its bytes alone: no token that is soon over speaks for it."""
    made = foresight()
    for n in range(EVERY * LEAST):
        assert made.expect(Upcoming()) is None and made.expect(Upcoming((A,))) is not None, n
        assert made.toll == COPY_FOR_NEXT
        keys = np.array([[6, 7], [14, 15]])
        made._counts.use(keys.ravel())
        made.after_token(keys)
        made.learn()
    assert made.expect(Upcoming()) is not None and made.toll == COPY


def cache(**changes: object) -> Residency:
    """Two slots a layer; the counts know nothing."""
    settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    pools = make_pools([2, 2], [100, 100], 2, "layer")
    return Residency(SPACE, pools, settings, table=learned())


def run(residency: Residency, token: int, *upcoming: int) -> list[Move]:
    residency.observe(ids(token)[None], [token])
    residency.learn()
    moves = residency.decide(upcoming=Upcoming(upcoming[:1], upcoming[1:]))
    residency.arrived(moves)
    residency.check_integrity()
    return moves


def test_the_one_worth_least_leaves() -> None:
    """Which experts of two tokens have slots follows from the token that comes."""
    residency = cache()
    run(residency, A, A)
    assert residency.present[0].nonzero()[0].tolist() == [0, 1]
    assert run(residency, B, A) == [], "what comes next keeps its slots"
    moves = run(residency, B, B)
    assert {(move.key, move.victim) for move in moves} <= {
        (key, victim) for key in (2, 3, 10, 11) for victim in (0, 1, 8, 9)
    }
    assert len(moves) == 4


def test_a_long_chunk_that_used_everything_leaves_the_slots_to_what_comes() -> None:
    """Only what its last rows used stays in any case: else nothing could move after a prompt."""
    residency = cache()
    run(residency, A, A)
    chunk = [A, *(B, C) * NEEDED]
    residency.observe(np.stack([ids(token) for token in chunk]), chunk)
    residency.learn()
    moves = residency.decide(upcoming=Upcoming((C,)))
    assert {(move.key, move.victim) for move in moves} == {(4, 0), (5, 1), (12, 8), (13, 9)}


@pytest.mark.parametrize("policy", ["lru", "slru", "lfru"])
def test_another_policy_goes_by_no_token_to_come(policy: PolicyName) -> None:
    """Each expert that was missed gets a slot, and what is known of tokens stays as it is."""
    residency = cache(policy=policy)
    table = residency.token_table
    assert isinstance(table, TokenTable)
    before = table.rows().seen.tolist()
    run(residency, A, A)
    assert {move.key for move in run(residency, B, A)} == {2, 3, 10, 11}
    assert table.rows().seen.tolist() == before


def test_the_policy_can_change_between_tokens() -> None:
    """What was learned of tokens is still known when the forecast comes back."""
    residency = cache()
    run(residency, A, A)
    residency.change_policy("lru")
    assert {move.key for move in run(residency, B, A)} == {2, 3, 10, 11}
    residency.change_policy("forecast")
    assert {move.key for move in run(residency, A, A)} == {0, 1, 8, 9}
    assert run(residency, B, A) == [], "what comes next keeps its slots"


def test_what_is_all_but_sure_is_fetched_before_it_is_missed() -> None:
    """Of a prompt: the token after the next is known, and copies beside the next are there."""
    residency = cache(lag=2)
    run(residency, A, A, A)
    assert LIKELY < 32 / 32.5
    moves = run(residency, A, A, C)
    assert {move.key for move in moves} == set(), "what was used just now does not leave"
    residency.observe(ids(B)[None], [B])
    residency.learn()
    moves = residency.decide(upcoming=Upcoming((999,), (C,)))
    assert {move.key for move in moves} == {4, 5, 12, 13}
    residency.arrived(moves)
    assert residency.hits(ids(C)).all()
    run(residency, B, C)
    run(residency, C)
    assert residency.predictions.n_hinted == residency.predictions.n_right == 4


def test_a_copy_that_comes_a_token_too_late_is_not_begun() -> None:
    """Beside tokens copies are there for the one after the next, which a reply does not know."""
    residency = cache(lag=2)
    run(residency, A, A)
    assert run(residency, B, C) == []
    assert {move.key for move in run(residency, B, 999, C)} >= {4, 5, 12, 13}, "a prompt does"


def test_what_a_run_used_is_counted_for_its_decision_and_the_rest_learned_later() -> None:
    """Its id is learned when the next run is under way, and once, however often that is asked."""
    residency = cache()
    seen = []
    decide = residency._policy.promote

    def noted(*arguments: object) -> list[Move]:
        seen.append(float(residency.counts.values()[0]))
        return decide(*arguments)  # type: ignore[arg-type]

    residency._policy.promote = noted  # type: ignore[method-assign,assignment]
    table = residency.token_table
    assert isinstance(table, TokenTable)
    before = table.rows().seen.tolist()
    residency.observe(ids(A)[None], [999])
    residency.decide()
    assert seen == [1.0] and residency.n_tokens == 1
    assert table.rows().seen.tolist() == before
    for _ in range(2):
        residency.learn()
        assert table.rows().seen.tolist() == [*before, 1]
    assert residency.counts.values()[0] == 1.0 and residency.n_tokens == 1


def test_where_ids_say_nothing_of_routing_no_hits_are_lost_to_them() -> None:
    """Routing drifts whatever the token is, as that of random weights does."""
    routing = drifting(1500, 3, 32, 4, seed=2, persistence=3)
    tokens = np.random.default_rng(2).zipf(1.3, len(routing)).astype(np.int64) % 500
    trace = replace(trace_of(routing, 32), ids=tokens)
    pools = make_pools([8] * 3, trace.header.span_bytes, 4, "layer")
    hits = {}
    policies: tuple[PolicyName, ...] = ("slru", "forecast")
    for policy in policies:
        hits[policy] = simulate(trace, CacheSettings(policy), pools).hit_rate
    assert hits["forecast"] > hits["slru"] - 0.005, hits
