"""Traces for the tests of `vkmoe simulate`, and its values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.experts.invented_traces import drifting, trace_of
from vkmoe.config import DEFAULT_PREDICTOR
from vkmoe.experts.study.trace import Trace, TraceWriter

from .conftest import Run

__all__ = ["MOVING", "TRACE", "document", "long_path", "path", "rows", "write"]

TRACE = trace_of(drifting(120, 3, 16, 4), 16, n_prompt=40)


# What the engine does besides without being asked.
MOVING: dict[str, Any] = {"admission": True, "predictor": DEFAULT_PREDICTOR}


def write(path: Path, trace: Trace = TRACE) -> str:
    with TraceWriter(path, trace.header) as writer:
        for routing, is_prompt in zip(trace.routing, trace.is_prompt, strict=True):
            writer.write(routing, bool(is_prompt))
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "t.jsonl")


@pytest.fixture
def long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trace long enough for a suggestion, by a lower mark: a replay of 200 tokens takes long."""
    monkeypatch.setattr("vkmoe.experts.study.replay.ENOUGH_TOKENS", 60)
    return write(tmp_path / "long.jsonl", trace_of(drifting(60, 3, 16, 4), 16))


def document(run: Run, *arguments: str) -> dict[str, Any]:
    done = run("simulate", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def rows(text: str) -> dict[int, list[str]]:
    """The cells of the table, by slots."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"\s*\*?\s+(\d+)  (.*)", line):
            found[int(match[1])] = re.split(r"\s{2,}", match[2].strip())
    return found
