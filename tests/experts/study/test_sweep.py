"""Many replays of one trace: which, in what order, and where the curve bends."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, trace_of
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.settings import CacheSettings, make_pools
from vkmoe.experts.study import replay as module
from vkmoe.experts.study.replay import (
    ENOUGH_TOKENS,
    Wanted,
    bend_of_curve,
    ceiling,
    ladder,
    run_sweep,
    simulate,
)
from vkmoe.experts.study.trace import Trace

POLICIES = get_args(PolicyName)
TRACE = trace_of(drifting(80, 3, 16, 4), 16)


def plain(policy: PolicyName, n_slots: int) -> CacheSettings:
    return CacheSettings(policy, half_life=float(n_slots))  # so that a mix-up would show


@pytest.mark.parametrize(
    ("n_experts", "n_used", "expected"),
    [
        (32, 4, (4, 8, 16, 24, 32)),
        (128, 8, (8, 16, 32, 64, 96, 128)),
        (60, 4, (4, 8, 16, 30, 45, 60)),
        (8, 2, (2, 4, 6, 8)),
        (8, 8, (8,)),
        (2, 1, (1, 2)),
        (1, 1, (1,)),
    ],
)
def test_the_ladder_goes_from_one_token_to_all_experts(
    n_experts: int, n_used: int, expected: tuple[int, ...]
) -> None:
    assert ladder(n_experts, n_used) == expected


@pytest.mark.parametrize("serial_uses", [0, 1 << 60], ids=["processes", "alone"])
def test_every_result_is_that_of_its_own_replay(
    serial_uses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SERIAL_USES", serial_uses)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    done: list[tuple[int, int]] = []
    found = run_sweep(
        TRACE, Wanted((8, 5, 8), POLICIES, plain), lambda *counts: done.append(counts)
    )
    assert [rung.slots for rung in found.rungs] == [5, 8]
    n_all = 2 * (1 + 3)  # shared, and a policy each
    assert done == [(n, n_all) for n in range(1, n_all + 1)]
    for rung in found.rungs:
        own, shared = (
            make_pools([rung.slots] * 3, TRACE.header.span_bytes, 4, allocation)
            for allocation in ("layer", "global")
        )
        for policy in POLICIES:
            alone = simulate(TRACE, plain(policy, rung.slots), own)
            assert np.array_equal(rung.own[policy].hits, alone.hits)
            assert np.array_equal(rung.own[policy].n_promoted, alone.n_promoted)
        alone = simulate(TRACE, plain("slru", rung.slots), shared)
        assert np.array_equal(rung.shared.hits, alone.hits)
        assert np.array_equal(rung.own_best, ceiling(TRACE, own))
        assert np.array_equal(rung.shared_best, ceiling(TRACE, shared))


def test_the_main_policy_is_the_one_asked_for_where_it_is_tried() -> None:
    assert run_sweep(TRACE, Wanted((8,), ("lru", "slru"), plain, main="lru")).main == "lru"
    assert run_sweep(TRACE, Wanted((8,), ("lru", "slru"), plain)).main == "slru"
    assert run_sweep(TRACE, Wanted((8,), ("lfru", "lru"), plain)).main == "lfru"


def rounds(n_tokens: int) -> Trace:
    """Tokens that go round in 8 of 32 experts."""
    ids = np.array([[[2 * n % 8, (2 * n + 1) % 8]] for n in range(n_tokens)], np.uint32)
    return trace_of(ids, 32)


@pytest.mark.parametrize("slots", [(2,), (31, 32), (4, 8, 24)])
def test_the_curve_bends_at_the_same_slots_whatever_else_is_tried(slots: tuple[int, ...]) -> None:
    """Below 8 recency finds nothing, above nothing is left."""
    curve = (32, 2, 4, 8, 16, 24)
    found = run_sweep(rounds(ENOUGH_TOKENS), Wanted(slots, ("lru", "lfru"), plain, curve=curve))
    assert bend_of_curve(found) == 8
    assert [rung.slots for rung in found.rungs] == sorted(slots)
    assert list(found.curve) == sorted(curve)
    rates = {n: result.hit_rate for n, result in found.curve.items()}
    assert rates[4] == 0
    assert rates[8] == rates[24] == pytest.approx(0.98)


def test_a_curve_that_does_not_bend_is_known_by_all_its_experts() -> None:
    ids = np.array([[[n % 16]] for n in range(ENOUGH_TOKENS)], np.uint32)
    found = run_sweep(trace_of(ids, 16), Wanted((4,), ("lru",), plain, curve=ladder(16, 1)))
    assert bend_of_curve(found) == 16


def test_a_few_tokens_have_no_curve() -> None:
    found = run_sweep(rounds(ENOUGH_TOKENS - 1), Wanted((8,), ("lru",), plain, curve=(4, 8, 32)))
    assert (bend_of_curve(found), found.curve) == (None, {})
