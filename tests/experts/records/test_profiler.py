"""The profiler counts exactly what is recorded, per expert, and splits it at warm-pinning.

Overlap of computing and copying: by hand, against a plain count, and where it is unknown.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.records import profiler as module
from vkmoe.experts.records.profiler import ExpertProfiler, Interval, Overlap, Served, Tally

SPACE = KeySpace(3, 16)
N_USED = 4
MS = 1_000_000
EVER = (-(10**15), 10**15)  # the host saw nothing in particular


@pytest.fixture
def profiler() -> ExpertProfiler:
    return ExpertProfiler(SPACE, (0, 2, 5))


def token(rng: np.random.Generator) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Routing and hits of one token, both [n_layers, n_used]."""
    routing = np.stack(
        [rng.choice(SPACE.n_experts, N_USED, replace=False) for _ in range(SPACE.n_layers)]
    )
    return routing.astype(np.uint32), rng.random(routing.shape) < 0.6


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
            found = np.broadcast_to(np.bool_(n_tokens % 2 == 0), routing.shape)
            profiler.record(routing, found)
        uses[layers, routing] += 1
        hits[layers, routing] += found
        assert profiler.n_tokens == n_tokens
        if n_tokens == 100:
            profiler.mark_warm()
            marked = int(hits.sum())
        if n_tokens % read_every == 0:
            assert profiler.served().total == Tally(
                n_tokens * SPACE.n_layers * N_USED, int(hits.sum())
            )
            assert profiler.top_experts(1, 1)[0] == (uses[1].argmax(), uses[1].max())
            if n_tokens > 100:
                n_after = (n_tokens - 100) * SPACE.n_layers * N_USED
                assert profiler.served().after == Tally(n_after, int(hits.sum()) - marked)
    assert np.array_equal(profiler.counts, [uses, hits]) and profiler.counts.dtype == np.uint64
    for layer in range(SPACE.n_layers):
        tally = profiler.served(layer).total
        assert tally.hit_rate == pytest.approx(hits[layer].sum() / uses[layer].sum())
        assert tally == (uses[layer].sum(), hits[layer].sum())
    assert profiler.served().before == (100 * SPACE.n_layers * N_USED, marked)


def test_nothing_recorded_has_no_rate(profiler: ExpertProfiler) -> None:
    assert profiler.served().total.hit_rate is None and profiler.served(1).total.hit_rate is None
    assert profiler.served() == Served(Tally(0, 0), None, None)


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


def test_tokens_decoded_together_are_counted_by_their_sequences(profiler: ExpertProfiler) -> None:
    assert profiler.together == {}
    for n_sequences, n_hits in ((4, 3), (1, 5), (4, 1)):
        profiler.note_together(n_sequences, Tally(6 * n_sequences, n_hits))
    assert list(profiler.together.items()) == [(1, Tally(6, 5)), (4, Tally(48, 4))]


def test_top_experts_are_the_used_ones_only(profiler: ExpertProfiler) -> None:
    hits = np.zeros((SPACE.n_layers, 2), np.bool_)
    for pair in ([15, 2], [15, 9], [2, 9], [15, 0]):  # uses: 15 thrice, 2 and 9 twice, 0 once
        profiler.record(np.array([pair, [1, 0], [0, 1]], np.uint32), hits)
    assert profiler.top_experts(0, 16) == ((15, 3), (2, 2), (9, 2), (0, 1))
    assert profiler.top_experts(0, 2) == ((15, 3), (2, 2))
    assert profiler.top_experts(1, 9) == ((0, 4), (1, 4)), "ties go to the lower id"
    assert profiler.top_experts(2, 0) == ()


# ----- overlap -----


def measured(computed: list[Interval], copied: list[Interval]) -> Overlap:
    found = Overlap()
    for interval in computed:
        found.computed([interval], EVER)
    for interval in copied:
        found.copied(interval, EVER)
    return found


@pytest.mark.parametrize(
    ("computed", "copied", "fraction"),
    [
        ([(0, 10)], [(10, 20)], 0.0),
        ([(0, 10), (10, 20)], [(8, 14)], 1.0),
        ([(0, 10), (5, 20)], [(4, 24)], 0.8),  # of two submits at once nothing counts twice
        ([], [(0, 10)], 0.0),
        ([(0, 10)], [], None),
    ],
)
def test_the_overlapped_part(
    computed: list[Interval], copied: list[Interval], fraction: float | None
) -> None:
    assert measured(computed, copied).fraction == pytest.approx(fraction)


def test_copies_may_be_told_of_before_what_they_overlap() -> None:
    """A copy collected while a token runs waits until that token's times are known."""
    found = Overlap()
    found.computed([(0, 10)], EVER)
    found.copied((5, 25), EVER)
    found.computed([(12, 20)], EVER)
    found.computed([(22, 30)], EVER)
    assert (found.copied_ns, found.overlapped_ns) == (0, 0), "the token may not be the last of it"
    found.computed([(32, 40)], EVER)
    assert (found.copied_ns, found.overlapped_ns) == (20, 5 + 8 + 3)
    assert found.fraction == pytest.approx(0.8)


def test_random_intervals_against_a_plain_count() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        edges = np.sort(random.choice(400, 40, replace=False)).reshape(-1, 2)
        computed = [(int(a), int(b)) for a, b in edges]
        copied = [tuple(sorted(random.choice(400, 2, replace=False).tolist())) for _ in range(12)]
        busy = np.zeros(400, np.bool_)
        for begin, end in computed:
            busy[begin:end] = True
        shared = sum(int(busy[begin:end].sum()) for begin, end in copied)
        found = measured(computed, copied)
        assert found.fraction == pytest.approx(shared / sum(end - begin for begin, end in copied))


def test_a_long_run_is_remembered_in_part_and_never_wrong() -> None:
    found = Overlap()
    n_tokens = 5 * module.MAX_COMPUTED
    for token in range(n_tokens):
        found.computed([(100 * token, 100 * token + 60)], EVER)
        found.copied((100 * token + 50, 100 * token + 70), EVER)
    found.copied((0, 40), EVER)  # too late: what was computed then is forgotten
    assert found.fraction == pytest.approx(0.5)
    assert found.n_unknown == 1 and found.copied_ns == 20 * n_tokens
    assert len(found._computed) <= module.MAX_COMPUTED
    for _ in range(3 * module.MAX_WAITING):
        found.copied((10**9, 10**9 + 10), EVER)
    assert len(found._waiting) <= module.MAX_WAITING


# ----- unknown -----


def test_copies_without_times_are_counted_apart() -> None:
    found = measured([(0, 10)], [(0, 5)])
    found.copied(None, EVER)
    found.copied((7, 6), EVER)  # the counter overflowed
    assert found.n_unknown == 2 and found.fraction == 1.0
    alone = Overlap()
    alone.copied(None, EVER)
    assert alone.fraction is None


def test_two_clocks_give_no_fraction() -> None:
    found = Overlap(comparable=False)
    found.computed([(0, 10)], EVER)
    found.copied((0, 10), EVER)
    assert found.fraction is None


@pytest.mark.parametrize("shift_ms", [-50, -12, 0, 12, 50])
def test_a_clock_that_contradicts_the_host_is_not_believed(shift_ms: int) -> None:
    """The upload queue's clock is `shift_ms` ahead of the other's. The host saw the token between
    0 and 20 ms of its own clock, and the copy between 30 and 40.
    """
    found, origin = Overlap(), 7_000 * MS  # of the device's clock
    found.computed([(origin + 1 * MS, origin + 19 * MS)], (0, 20 * MS))
    shift = origin + shift_ms * MS
    found.copied((shift + 31 * MS, shift + 39 * MS), (30 * MS, 40 * MS))
    assert found.fraction == (0.0 if shift_ms == 0 else None)
    found.computed([(origin + 41 * MS, origin + 59 * MS)], (40 * MS, 60 * MS))
    found.copied((origin + 50 * MS, origin + 55 * MS), (49 * MS, 56 * MS))
    assert (found.fraction is None) == (shift_ms != 0), "once wrong, it is not believed again"


def test_a_counter_that_begins_anew_is_not_believed() -> None:
    assert measured([(100, 110), (5, 15)], [(5, 15)]).fraction is None
    assert measured([(10, 5)], [(5, 15)]).fraction is None
