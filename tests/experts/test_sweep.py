"""Many replays of one trace: which, in what order, and what they recommend."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, trace_of
from vkmoe.experts import sweep as module
from vkmoe.experts.settings import CacheSettings, PolicyName, make_pools
from vkmoe.experts.simulate import ceiling, simulate
from vkmoe.experts.sweep import Sweep, ladder, recommended_slots, run_sweep

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
    found = run_sweep(TRACE, (8, 5, 8), plain, POLICIES, lambda *counts: done.append(counts))
    assert [rung.slots for rung in found.rungs] == [5, 8]
    assert done == [(n, 8) for n in range(1, 9)]
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


def test_the_main_policy_is_slru_where_it_is_asked_for() -> None:
    assert run_sweep(TRACE, (8,), plain, ("lru", "slru")).main == "slru"
    assert run_sweep(TRACE, (8,), plain, ("lfru", "lru")).main == "lfru"


def test_what_is_recommended_lies_where_the_curve_bends() -> None:
    """Tokens go round in 8 of 32 experts: below, recency finds nothing; above, nothing is left."""
    ids = np.array([[[2 * n % 8, (2 * n + 1) % 8]] for n in range(200)], np.uint32)
    found: Sweep = run_sweep(trace_of(ids, 32), (2, 4, 8, 16, 24, 32), plain, ("lru",))
    assert recommended_slots(found) == 8
    rates = {rung.slots: rung.own["lru"].hit_rate for rung in found.rungs}
    assert rates[4] == 0
    assert rates[8] == rates[24] == pytest.approx(0.98)
