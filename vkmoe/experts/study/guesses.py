"""Makes of a trace the one that a run with guesses would have left: rows verified together.

A trace has the routing of a text alone. Of the guesses a share is taken to be right; one that is
wrong, and those behind it in its step, use what other tokens of the replies used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from vkmoe.experts.records.trace import Trace


def with_guesses(trace: Trace, n_guesses: int, accepted: float, seed: int = 0) -> Trace:
    """Return the trace with `n_guesses` rows behind each token of a reply that is decoded.

    A guess is right with the chance `accepted` if all before it in the step are. Steps end with the
    reply.
    """
    rows: list[int] = []  # of the trace, one for each row of the new one
    runs: list[int] = []
    starts: list[int] = []
    for run, wrong in _steps(trace, n_guesses, accepted, np.random.default_rng(seed)):
        runs.append(len(rows))
        starts += [len(rows)] * (run.start in trace.starts)
        rows += [*run, *wrong]
    return replace(
        trace,
        routing=trace.routing[rows],
        is_prompt=trace.is_prompt[rows],
        starts=tuple(starts),
        ids=None if trace.ids is None else trace.ids[rows],
        runs=tuple(runs),
        n_text=trace.n_tokens,
    )


def _steps(
    trace: Trace, n_guesses: int, accepted: float, rng: np.random.Generator
) -> Iterator[tuple[range, list[int]]]:
    """Yield the rows of each run, and what wrong guesses in it use: rows of replies."""
    begins = {*(trace.runs or range(trace.n_tokens)), *trace.starts}
    replies = np.flatnonzero(~trace.is_prompt)
    row = 0
    while row < trace.n_tokens:
        if trace.is_prompt[row]:
            end = row + 1
            while end < trace.n_tokens and trace.is_prompt[end] and end not in begins:
                end += 1
            yield range(row, end), []
            row = end
            continue
        n_right = int(np.cumprod(rng.random(n_guesses) < accepted).sum())
        last = row
        while last < row + n_right and _goes_on(trace, last):
            last += 1
        yield range(row, last + 1), rng.choice(replies, row + n_guesses - last).tolist()
        row = last + 1


def _goes_on(trace: Trace, row: int) -> bool:
    """Say whether the next row is of the same reply."""
    following = row + 1
    return (
        following < trace.n_tokens
        and not trace.is_prompt[following]
        and following not in trace.starts
    )
