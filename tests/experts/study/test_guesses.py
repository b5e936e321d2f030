"""What a trace becomes where tokens of replies are verified together with guesses."""

from __future__ import annotations

import numpy as np

from vkmoe.experts.records.trace import Trace, TraceHeader
from vkmoe.experts.study.guesses import with_guesses

HEADER = TraceHeader("model", "qwen3moe", (0, 1), 16, 2, (100, 100))


def trace_of(kinds: str, starts: tuple[int, ...] = (0,), runs: tuple[int, ...] = ()) -> Trace:
    """A trace whose tokens are of prompts (p) or replies (r); each has a number of its own."""
    n = len(kinds)
    routing = np.random.default_rng(1).integers(0, 16, (n, 2, 2)).astype(np.uint32)
    is_prompt = np.array([kind == "p" for kind in kinds])
    return Trace(HEADER, routing, is_prompt, starts, ids=np.arange(n), runs=runs)


def test_where_all_guesses_are_right_nothing_is_added() -> None:
    """Steps end with the reply, where guesses have nothing to be right about."""
    found = with_guesses(trace_of("pprrrrrr", runs=(0, *range(2, 8))), 2, accepted=1.0)
    assert found.ids is not None
    assert found.ids.tolist() == list(range(8)) and found.runs == (0, 2, 5) and found.n_text == 8


def test_where_all_are_wrong_each_token_has_a_run_of_its_own() -> None:
    trace = trace_of("prrprr", starts=(0, 3))
    found = with_guesses(trace, 1, accepted=0.0)
    assert found.ids is not None and trace.ids is not None
    assert found.runs == (0, 1, 3, 5, 6, 8) and found.starts == (0, 5)
    firsts = [found.ids[run] for run in found.runs]
    assert firsts == trace.ids.tolist()
    wrong = set(found.ids.tolist()[2:5:2])
    assert wrong <= {1, 2, 4, 5}, "they use what tokens of replies used"


def test_as_many_are_right_as_is_said() -> None:
    trace = trace_of("p" + "r" * 2000)
    found = with_guesses(trace, 3, accepted=0.7)
    n_steps = len(found.runs) - 1
    assert abs(2000 / n_steps - (1 + 0.7 + 0.7**2 + 0.7**3)) < 0.1
    assert abs(found.n_tokens - 1 - 4 * n_steps) <= 0
