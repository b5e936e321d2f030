"""Overlap of computing and copying: by hand, against a plain count, and where it is unknown."""

from __future__ import annotations

import numpy as np
import pytest

from vkmoe.experts.records import overlap
from vkmoe.experts.records.overlap import Interval, Overlap, first_overlap

MS = 1_000_000
EVER = (-(10**15), 10**15)  # the host saw nothing in particular


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
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(2, 4)], 1.0),
        ([(2, 4)], [(0, 10)], 0.2),
        ([(0, 10)], [(10, 20)], 0.0),
        ([(10, 20)], [(0, 10)], 0.0),
        ([(0, 10), (12, 20)], [(8, 14)], 4 / 6),
        ([(0, 10), (10, 20)], [(8, 14)], 1.0),
        ([(0, 10), (5, 20)], [(4, 24)], 0.8),  # of two submits at once nothing counts twice
        ([(0, 10)], [(0, 5), (15, 20)], 0.5),
        ([], [(0, 10)], 0.0),
    ],
)
def test_the_overlapped_part(
    computed: list[Interval], copied: list[Interval], fraction: float
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


def test_nothing_copied_has_no_fraction() -> None:
    assert measured([(0, 10)], []).fraction is None


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
    n_tokens = 5 * overlap.MAX_COMPUTED
    for token in range(n_tokens):
        found.computed([(100 * token, 100 * token + 60)], EVER)
        found.copied((100 * token + 50, 100 * token + 70), EVER)
    found.copied((0, 40), EVER)  # too late: what was computed then is forgotten
    assert found.fraction == pytest.approx(0.5)
    assert found.n_unknown == 1 and found.copied_ns == 20 * n_tokens
    assert len(found._computed) <= overlap.MAX_COMPUTED
    for _ in range(3 * overlap.MAX_WAITING):
        found.copied((10**9, 10**9 + 10), EVER)
    assert len(found._waiting) <= overlap.MAX_WAITING


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


# ----- one queue -----


def test_what_overlaps_on_one_queue_is_found() -> None:
    computed = [(0, 10), (20, 30), (40, 50)]
    assert first_overlap([]) is None
    assert first_overlap([*computed, (10, 20), (32, 38)]) is None
    assert first_overlap([*computed, (10, 21)]) == ((10, 21), (20, 30))
    assert first_overlap([*computed, (29, 31)]) == ((20, 30), (29, 31))
