"""A decoded token took the time since the run before it ended; totals count by differences."""

from __future__ import annotations

from vkmoe.experts.records.timing import (
    MAX_GAP_NS,
    MAX_RUNS,
    Computing,
    RunTimes,
    Step,
    Totals,
)

MS = 1_000_000


def note(
    times: RunTimes, n_decoded: int, began: int, ended: int, total: int, device: int | None = 5
) -> None:
    """Note a run, in milliseconds; all totals are multiples of one number."""
    intervals = [] if device is None else [(100, 100 + device * MS // 2)] * 2
    computing = Computing(intervals, 2, 7 * total, 3 * total)
    times.note(n_decoded, (began * MS, ended * MS), computing, Totals(11 * total, 2 * total, total))


def test_a_step_lasts_from_the_end_of_the_run_before_it() -> None:
    times = RunTimes()
    note(times, 1, 0, 10, total=100)
    assert times.steps() == []  # nothing is known of what was before
    note(times, 1, 13, 20, total=101)
    note(times, 3, 21, 30, total=103)
    assert times.steps() == [
        Step(1, 10 * MS, 5 * MS, 7, 3, 2, 1, 11),
        Step(3, 10 * MS, 5 * MS, 14, 6, 4, 2, 22),
    ]


def test_prompts_are_no_steps_and_their_totals_are_not_those_of_the_next_one() -> None:
    times = RunTimes()
    note(times, 1, 0, 10, total=0)
    note(times, 0, 11, 500, total=1000)
    note(times, 1, 505, 510, total=1001)
    assert times.steps() == [Step(1, 10 * MS, 5 * MS, 7, 3, 2, 1, 11)]


def test_time_in_which_nothing_was_asked_does_not_count() -> None:
    times, gap = RunTimes(), MAX_GAP_NS // MS
    note(times, 1, 0, 10, total=0)
    note(times, 1, 10 + gap, 20 + gap, total=1)
    note(times, 1, 20 + 2 * gap - 1, 30 + 2 * gap, total=2)
    assert [step.total_ns // MS for step in times.steps()] == [10, 10 + gap]


def test_a_device_of_which_one_submit_is_not_timed_is_not_known() -> None:
    times = RunTimes()
    note(times, 1, 0, 10, total=0)
    note(times, 1, 10, 20, total=1, device=None)
    times.note(1, (20, 30), Computing([(0, 5)], 2, 0, 0), Totals(0, 0, 0))
    assert [step.device_ns for step in times.steps()] == [None, None]


def test_the_last_runs_alone_are_remembered() -> None:
    times = RunTimes()
    for index in range(3 * MAX_RUNS):
        note(times, 1 + index, 10 * index, 10 * index + 1, total=index)
    found = [step.n_rows for step in times.steps()]
    assert found == [*range(2 * MAX_RUNS + 2, 3 * MAX_RUNS + 1)]
