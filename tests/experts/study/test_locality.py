"""The locality figures, each on traces whose figures can be worked out by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, of_ids, trace_of
from vkmoe.experts.study.locality import SEGMENT, Locality, locality
from vkmoe.experts.study.trace import joined


def test_a_trace_that_repeats_itself_is_as_local_as_can_be() -> None:
    found = locality(of_ids(*[[2, 5]] * 40))
    assert found.overlap.tolist() == [1.0]
    assert found.reuse_distance.tolist() == [1.0]
    assert [found.covering[share].tolist() for share in (0.5, 0.8, 0.95)] == [[1], [2], [2]]
    assert {n: size.tolist() for n, size in found.working_set.items()} == {
        n: [2.0] for n in (1, 2, 4, 8, 16, 32)
    }
    assert (found.consistency.tolist(), found.consistency_size.tolist()) == ([1.0], [1.0])


def test_figures_of_a_short_trace() -> None:
    found = locality(of_ids([0, 1], [1, 2], [2, 3], [0, 1]))
    assert found.overlap[0] == pytest.approx((1 / 3 + 1 / 3 + 0) / 3)
    # 0 comes back after 3 tokens, 1 after 1 and then 2, 2 after 1.
    assert found.reuse_distance.tolist() == [1.5]
    assert found.covering[0.5].tolist() == [2]  # 1 has three of eight uses, 0 and 2 two each
    assert found.covering[0.8].tolist() == [3]
    assert found.covering[0.95].tolist() == [4]
    assert {n: size.tolist() for n, size in found.working_set.items()} == {
        1: [2.0], 2: [3.5], 4: [4.0],
    }  # fmt: skip
    assert np.isnan(found.consistency).all()  # shorter than a segment


def test_a_single_token_has_no_neighbours() -> None:
    found = locality(of_ids([0, 1]))
    for figure in (found.overlap, found.reuse_distance, found.consistency):
        assert np.isnan(figure).all()
    assert found.working_set.keys() == {1}


def test_chance_overlap_is_that_of_independent_tokens() -> None:
    random = np.random.default_rng(5)
    routing = np.argsort(random.random((4000, 1, 32)), axis=2)[:, :, :4].astype(np.uint32)
    found = locality(trace_of(routing, 32))
    assert found.overlap[0] == pytest.approx(found.overlap_by_chance, rel=0.1)
    local = locality(trace_of(drifting(400, 1, 32, 4), 32))
    assert local.overlap[0] > 2 * local.overlap_by_chance


def test_layers_are_told_apart() -> None:
    routing = drifting(100, 3, 16, 2)
    together = locality(trace_of(routing, 16))
    for layer in range(3):
        alone = locality(trace_of(routing[:, [layer]], 16))
        assert figures(together, layer) == figures(alone, 0)


def test_memory_does_not_grow_with_the_layers() -> None:
    n_tokens, n_layers, n_experts = 400, 40, 256
    rows = np.arange(n_tokens * n_layers * 2, dtype=np.uint32).reshape(n_tokens, n_layers, 2)
    trace = trace_of(rows % n_experts, n_experts)
    tracemalloc.start()
    try:
        locality(trace)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Running counts of one layer in 64 bits are the most, and less than a flag for all.
    assert peak < 3 * 8 * n_tokens * n_experts < n_tokens * n_layers * n_experts


def figures(found: Locality, layer: int) -> list[float]:
    values = [found.overlap, found.reuse_distance, found.consistency, found.consistency_size]
    values += [*found.covering.values(), *found.working_set.values()]
    return [float(value[layer]) for value in values]


def test_sequences_have_no_neighbours_in_one_another() -> None:
    """Two prompts: what lies across their border is in no pair, window, distance or segment."""
    first, second = of_ids(*[[0, 1]] * 20), of_ids(*[[2, 3]] * 20)
    found = locality(joined([first, second]))
    assert found.overlap.tolist() == [1.0]
    assert found.working_set[16].tolist() == [2.0]
    assert 32 not in found.working_set
    assert found.consistency.tolist() == [1.0]
    back = locality(joined([of_ids([0, 1]), of_ids([0, 1])]))
    assert np.isnan(back.reuse_distance).all()


def test_consistency_is_the_best_score_of_a_router_per_segment() -> None:
    """Against a direct search over thresholds, segment by segment."""
    trace = trace_of(drifting(90, 1, 8, 2, seed=4), 8)
    used = np.zeros((90, 8), bool)
    np.put_along_axis(used, trace.routing[:, 0].astype(int), True, axis=1)
    segments = [used[at : at + SEGMENT] for at in range(90 - SEGMENT + 1)]
    scores = {}
    for least in range(1, SEGMENT + 1):
        right = wrong = missed = held = 0
        for segment in segments:
            chosen = segment.sum(axis=0) >= least
            right += int(segment[:, chosen].sum())
            wrong += int((~segment[:, chosen]).sum())
            missed += int(segment[:, ~chosen].sum())
            held += int(chosen.sum())
        scores[2 * right / (2 * right + wrong + missed)] = held / (2 * len(segments))
    found = locality(trace)
    assert found.consistency[0] == pytest.approx(max(scores))
    assert found.consistency_size[0] == pytest.approx(scores[max(scores)])
