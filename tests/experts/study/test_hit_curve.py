"""What a file tells of hits: of a trace that was replayed, of uses that were counted."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

import numpy as np
import pytest

from tests.engine.tiny import model_path
from tests.experts.invented_traces import drifting, trace_of
from vkmoe.experts.study.hit_curve import (
    MEAN_CURVE,
    curve_of_counts,
    curve_of_trace,
    known_curve,
)
from vkmoe.experts.study.replay import ENOUGH_TOKENS
from vkmoe.models import open_model

SHARES = np.linspace(0, 1, 33)


def test_where_all_experts_are_used_alike_the_mean_curve_counts() -> None:
    curve = curve_of_counts(np.ones((3, 32)), inf)
    for share in SHARES:
        assert curve.rate(share) == pytest.approx(MEAN_CURVE.rate(share), abs=0.01)
    assert curve.of_slots((8, 8, 16), 32) == pytest.approx(
        (2 * curve.rate(0.25) + curve.rate(0.5)) / 3
    )


def test_there_are_no_fewer_hits_than_if_the_most_used_always_had_the_slots() -> None:
    """Of a text without end; a layer without uses tells nothing, and few tokens little."""
    counts = np.zeros((4, 32))
    counts[1:, :4] = 5.0
    curve = curve_of_counts(counts, inf)
    assert curve.rate(4 / 32) == pytest.approx(0.75) and curve.rate(1.0) == 1.0
    few = [curve_of_counts(counts, n).rate(4 / 32) for n in (1, 2000, 10_000)]
    assert MEAN_CURVE.rate(4 / 32) == few[0] < few[1] < few[2] < 0.75


def test_a_trace_of_steady_routing_promises_more_hits_than_one_of_chance() -> None:
    rates = []
    for persistence in (0.0, 3.0):
        trace = trace_of(drifting(600, 3, 32, 4, seed=1, persistence=persistence), 32)
        curve = curve_of_trace(trace)
        assert curve is not None
        found = [curve.rate(share) for share in SHARES]
        assert found == sorted(found) and found[0] == 0 and found[-1] == 1
        rates.append(curve.rate(0.25))
    assert rates[0] < rates[1]


def test_a_short_trace_tells_nothing() -> None:
    routing = drifting(ENOUGH_TOKENS, 2, 16, 4)
    assert curve_of_trace(trace_of(routing[1:], 16)) is None
    assert curve_of_trace(trace_of(routing, 16)) is not None


def test_a_pipe_is_left_to_what_follows_the_uses(tmp_path: Path) -> None:
    """What one reader has taken of a pipe, no other gets."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        os.write(writer, b"{}")
        with open_model(model_path("moe_plain")) as model:
            assert known_curve(pipe, model.spec, model.expert_tensors) is None
        assert os.read(writer, 9) == b"{}"
    finally:
        os.close(writer)
