"""A keeper of records and something for it to write, for the tests of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.experts.records.test_profile_file import COUNTS, MODEL, SPEC, TENSORS
from vkmoe.config import EngineConfig
from vkmoe.experts.records.keeper import RecordKeeper
from vkmoe.experts.records.profiler import ExpertProfiler
from vkmoe.experts.records.report import ExpertReport, Setup, make_report

__all__ = ["LAYERS", "SETUP", "keeper", "report", "write"]

LAYERS = [TENSORS[0:3], TENSORS[3:6], TENSORS[6:9]]
SETUP = Setup("toy", "qwen3moe", "Invented GPU", "device", 8, 2)


def keeper(folder: Path, stats: str | None = None, profile: str | None = None) -> RecordKeeper:
    paths = {"expert_stats": stats, "expert_profile": profile}
    config = EngineConfig(
        **{name: str(folder / path) for name, path in paths.items() if path is not None}  # type: ignore[arg-type]
    )
    return RecordKeeper(config, SPEC, LAYERS)


def report(n_tokens: int = 1) -> ExpertReport:
    profiler = ExpertProfiler(MODEL.space, range(3))
    for _ in range(n_tokens):
        profiler.record(np.array([[0, 1]] * 3, np.uint32), np.zeros((3, 2), np.bool_))
    return make_report(SETUP, profiler)


def write(records: RecordKeeper) -> None:
    records.take(report(), COUNTS)
    records.write()
