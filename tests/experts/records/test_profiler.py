"""The profiler counts exactly what is recorded, per expert, and splits it at warm-pinning."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.records.profiler import ExpertProfiler, Served, Tally

SPACE = KeySpace(3, 16)
N_USED = 4


@pytest.fixture
def profiler() -> ExpertProfiler:
    return ExpertProfiler(SPACE, (0, 2, 5))


def token(rng: np.random.Generator) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Routing and hits of one token, both [n_layers, n_used]."""
    routing = np.stack(
        [rng.choice(SPACE.n_experts, N_USED, replace=False) for _ in range(SPACE.n_layers)]
    )
    return routing.astype(np.uint32), rng.random(routing.shape) < 0.6


def test_counts_equal_a_plain_loop(profiler: ExpertProfiler) -> None:
    rng = np.random.default_rng(1)
    uses = np.zeros((SPACE.n_layers, SPACE.n_experts), np.int64)
    hits = np.zeros_like(uses)
    for _ in range(50):
        routing, found = token(rng)
        profiler.record(routing, found)
        for layer in range(SPACE.n_layers):
            for expert, hit in zip(routing[layer], found[layer], strict=True):
                uses[layer, expert] += 1
                hits[layer, expert] += hit
    assert profiler.n_tokens == 50
    assert np.array_equal(profiler.uses, uses) and np.array_equal(profiler.hits, hits)
    assert profiler.uses.dtype == profiler.hits.dtype == np.uint64
    for layer in range(SPACE.n_layers):
        assert profiler.total(layer) == Tally(int(uses[layer].sum()), int(hits[layer].sum()))
        assert profiler.hit_rate(layer) == pytest.approx(hits[layer].sum() / uses[layer].sum())
    assert profiler.total() == Tally(50 * SPACE.n_layers * N_USED, int(hits.sum()))


@pytest.mark.parametrize("read_every", [1, 7, 31, 32, 33, 200])
def test_when_it_is_asked_does_not_change_the_counts(
    profiler: ExpertProfiler, read_every: int
) -> None:
    rng = np.random.default_rng(5)
    uses, hits = np.zeros((2, SPACE.n_layers, SPACE.n_experts), np.int64)
    layers = np.arange(SPACE.n_layers)[:, None]
    marked = 0
    for n_tokens in range(1, 201):
        routing, found = token(rng)
        if n_tokens % 3:
            profiler.record(routing, found)
        else:  # all alike
            profiler.record(routing, n_tokens % 2 == 0)
            found[:] = n_tokens % 2 == 0
        uses[layers, routing] += 1
        hits[layers, routing] += found
        assert profiler.n_tokens == n_tokens
        if n_tokens == 100:
            profiler.mark_warm()
            marked = int(hits.sum())
        if n_tokens % read_every == 0:
            assert profiler.total() == Tally(n_tokens * SPACE.n_layers * N_USED, int(hits.sum()))
            assert profiler.top_experts(1, 1)[0] == (uses[1].argmax(), uses[1].max())
            if n_tokens > 100:
                n_after = (n_tokens - 100) * SPACE.n_layers * N_USED
                assert profiler.served().after == Tally(n_after, int(hits.sum()) - marked)
    assert np.array_equal(profiler.uses, uses) and np.array_equal(profiler.hits, hits)
    assert profiler.served().before == (100 * SPACE.n_layers * N_USED, marked)


def test_nothing_recorded_has_no_rate(profiler: ExpertProfiler) -> None:
    assert profiler.hit_rate() is None and profiler.hit_rate(1) is None
    assert profiler.served() == Served(Tally(0, 0), None, None)


def test_a_rate_of_zero_is_a_rate(profiler: ExpertProfiler) -> None:
    routing, found = token(np.random.default_rng(2))
    profiler.record(routing, np.zeros_like(found))
    assert profiler.hit_rate() == 0.0


def test_warm_pinning_splits_the_counts(profiler: ExpertProfiler) -> None:
    rng = np.random.default_rng(3)
    routing, found = token(rng)
    for _ in range(5):
        profiler.record(routing, np.zeros_like(found))
    profiler.mark_warm()
    assert profiler.served().after == Tally(0, 0)
    for _ in range(2):
        profiler.record(routing, np.ones_like(found))
    assert profiler.n_tokens_before == 5
    for layer in (None, 0, 1, 2):
        n_used = N_USED * (SPACE.n_layers if layer is None else 1)
        before, after = Tally(5 * n_used, 0), Tally(2 * n_used, 2 * n_used)
        assert profiler.served(layer) == (Tally(7 * n_used, 2 * n_used), before, after)


def test_a_second_mark_keeps_the_split(profiler: ExpertProfiler) -> None:
    routing, found = token(np.random.default_rng(4))
    for _ in range(2):
        profiler.record(routing, found)
        profiler.mark_warm()
    assert profiler.n_tokens_before == 1
    assert profiler.served()[1:] == (Tally(12, int(found.sum())),) * 2


def test_top_experts_are_the_used_ones_only(profiler: ExpertProfiler) -> None:
    hits = np.zeros((SPACE.n_layers, 2), np.bool_)
    for pair in ([15, 2], [15, 9], [2, 9], [15, 0]):  # uses: 15 thrice, 2 and 9 twice, 0 once
        profiler.record(np.array([pair, [1, 0], [0, 1]], np.uint32), hits)
    assert profiler.top_experts(0, 16) == ((15, 3), (2, 2), (9, 2), (0, 1))
    assert profiler.top_experts(0, 2) == ((15, 3), (2, 2))
    assert profiler.top_experts(1, 9) == ((0, 4), (1, 4)), "ties go to the lower id"
    assert profiler.top_experts(2, 0) == ()


def test_what_is_handed_out_cannot_change_the_counts(profiler: ExpertProfiler) -> None:
    with pytest.raises(ValueError, match="read-only"):
        profiler.uses[0, 0] = 1


def test_layers_are_kept_apart_at_their_edges(profiler: ExpertProfiler) -> None:
    last, first = SPACE.n_experts - 1, 0
    profiler.record(np.array([[last], [first], [last]], np.uint32), np.array([[1], [0], [1]]) > 0)
    assert profiler.uses.sum(axis=1).tolist() == [1, 1, 1]
    assert (profiler.uses[0, last], profiler.uses[1, first], profiler.uses[2, last]) == (1, 1, 1)
    assert [profiler.hit_rate(layer) for layer in range(3)] == [1.0, 0.0, 1.0]
