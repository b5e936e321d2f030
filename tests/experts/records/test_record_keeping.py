"""The two files of a run: when they are read and written, under which names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import DEVICE
from tests.experts.kept_records import SETUP, keeper, report, write
from tests.experts.records.test_profile_file import COUNTS, MODEL, SPEC
from vkmoe.config import EngineConfig
from vkmoe.experts.records.keeper import RecordKeeper, record_outputs
from vkmoe.experts.records.profile import profile_text
from vkmoe.experts.records.report import make_report, setup_of
from vkmoe.facts import ExpertMode, MemoryPlan


@pytest.mark.parametrize(
    ("path", "text", "document"),
    [
        ("a/stats.txt", "a/stats.txt", "a/stats.json"),
        ("a/stats.json", "a/stats.txt", "a/stats.json"),
        ("a/stats", "a/stats", "a/stats.json"),
        ("run.1", "run.1", "run.1.json"),
        ("a.b/.txt", "a.b/.txt", "a.b/.txt.json"),
        ("stats.log", "stats.log", "stats.log.json"),
    ],
)
def test_text_and_json_lie_side_by_side(path: str, text: str, document: str) -> None:
    found = [path for _, path in record_outputs(EngineConfig(expert_stats=path))]
    assert sorted(found) == sorted([Path(text), Path(document)]) and found[0] == Path(path)


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    write(keeper(tmp_path))
    assert os.listdir(tmp_path) == []


def test_both_files_are_written_and_the_profile_comes_back(tmp_path: Path) -> None:
    records = keeper(tmp_path, "stats.txt", "profile.json")
    assert records.seed is None and os.listdir(tmp_path) == []
    write(records)
    assert sorted(os.listdir(tmp_path)) == ["profile.json", "stats.json", "stats.txt"]
    assert (tmp_path / "stats.txt").read_text().startswith("vkmoe expert statistics\n")
    assert json.loads((tmp_path / "stats.json").read_text())["model"] == "toy"
    seed = keeper(tmp_path, profile="profile.json").seed
    assert seed is not None and np.array_equal(seed, COUNTS)


def test_it_writes_once(tmp_path: Path) -> None:
    records = keeper(tmp_path, "stats.txt")
    records.write()
    assert os.listdir(tmp_path) == [], "nothing was taken"
    write(records)
    (tmp_path / "stats.txt").unlink()
    records.write()
    assert os.listdir(tmp_path) == ["stats.json"]


def test_a_run_without_tokens_replaces_no_statistics(tmp_path: Path) -> None:
    for n_tokens, kept in ((0, 0), (3, 3), (0, 3)):
        records = keeper(tmp_path, "stats.txt")
        records.take(report(n_tokens), COUNTS)
        records.write()
        assert json.loads((tmp_path / "stats.json").read_text())["n_tokens"] == kept


def test_without_a_token_no_profile_is_begun_or_changed(tmp_path: Path) -> None:
    records = keeper(tmp_path, "stats", "p")
    records.take(report(0), np.zeros_like(COUNTS))
    records.write()
    assert sorted(os.listdir(tmp_path)) == ["stats", "stats.json"]
    (tmp_path / "p").write_text(profile_text(MODEL, COUNTS))
    kept = (tmp_path / "p").read_bytes() + b"\n\n"  # as we do not write it
    (tmp_path / "p").write_bytes(kept)
    records = keeper(tmp_path, profile="p")
    assert records.seed is not None
    records.take(report(0), records.seed)
    records.write()
    assert (tmp_path / "p").read_bytes() == kept


@pytest.mark.parametrize(("name", "begins"), [("pipe", b"vkmoe expert statistics\n"),
                                              ("pipe.json", b"{")])  # fmt: skip
def test_a_pipe_gets_what_its_name_says_and_nothing_lies_beside_it(
    tmp_path: Path, name: str, begins: bytes
) -> None:
    pipe = tmp_path / name
    (tmp_path / "pipe.txt").write_text("my notes")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(keeper(tmp_path, name))
        assert os.read(reader, 1 << 16).startswith(begins)
    finally:
        os.close(reader)
    assert sorted(os.listdir(tmp_path)) == [name, "pipe.txt"]
    assert (tmp_path / "pipe.txt").read_text() == "my notes"


def test_a_dense_model_keeps_no_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p").write_text(profile_text(MODEL, COUNTS))
    before = (tmp_path / "p").read_bytes()
    config = EngineConfig(expert_profile=str(tmp_path / "p"), expert_stats=str(tmp_path / "stats"))
    records = RecordKeeper(config, SPEC, [])
    assert records.seed is None and "has no experts" in caplog.text
    records.take(make_report(SETUP, None), np.zeros(0))
    records.write()
    assert (tmp_path / "p").read_bytes() == before
    assert "the model is dense" in (tmp_path / "stats").read_text()


@pytest.mark.parametrize(
    ("place", "expected"), [("cache", ("lfru", "global")), ("device", (None, None))]
)
def test_a_policy_is_named_only_where_one_decides(place: Any, expected: tuple[Any, Any]) -> None:
    config = EngineConfig(expert_policy="lfru", expert_allocation="global")
    slots = (4, 4, 2) if place == "cache" else ()
    plan = MemoryPlan(128, "f16", ExpertMode(place), (), expert_slots=slots)
    setup = setup_of(SPEC, plan, DEVICE, config)
    assert (setup.policy, setup.allocation) == expected
    assert (setup.n_experts, setup.n_used, setup.experts_in) == (8, 2, place)
    assert setup.slots == plan.expert_slots and setup.device == DEVICE.name
