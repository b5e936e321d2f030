"""The files of a run: when they are read and written, and what a failure may not destroy."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import DEVICE
from tests.engine.tiny import model_path
from tests.experts.records.test_profile import COUNTS, LEFT, MODEL, SPEC, TENSORS
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.token_table import History
from vkmoe.experts.records.keeper import (
    RecordKeeper,
    check_outputs,
    reason_against_writing,
    record_outputs,
    write_whole,
)
from vkmoe.experts.records.profile import load_profile, profile_text
from vkmoe.experts.records.profiler import ExpertProfiler
from vkmoe.experts.records.report import ExpertReport, Setup, make_report, setup_of
from vkmoe.facts import MemoryPlan
from vkmoe.kv_types import both
from vkmoe.modes import Cache, ExpertMode, Resident

LAYERS = [TENSORS[0:3], TENSORS[3:6], TENSORS[6:9]]
SETUP = Setup("toy", "qwen3moe", "Invented GPU", "device", 8, 2)


def keeper(folder: Path, stats: str | None = None, profile: str | None = None) -> RecordKeeper:
    paths = {"expert_stats": stats, "expert_profile": profile}
    config = EngineConfig(
        **{name: str(folder / path) for name, path in paths.items() if path is not None}  # type: ignore[arg-type]
    )
    return RecordKeeper(config, SPEC, LAYERS)


def report(n_tokens: int = 1) -> ExpertReport:
    profiler = ExpertProfiler(KeySpace(3, 8), range(3))
    for _ in range(n_tokens):
        profiler.record(np.array([[0, 1]] * 3, np.uint32), np.zeros((3, 2), np.bool_))
    return make_report(SETUP, profiler)


def write(records: RecordKeeper) -> None:
    records.write(report(), LEFT)


@pytest.mark.parametrize(
    ("path", "text", "document"),
    [
        ("a/stats.txt", "a/stats.txt", "a/stats.json"),
        ("a/stats.json", "a/stats.txt", "a/stats.json"),
        ("a/stats", "a/stats", "a/stats.json"),
        ("run.1", "run.1", "run.1.json"),
        ("a.b/.txt", "a.b/.txt", "a.b/.txt.json"),
        ("stats.log", "stats.log", "stats.log.json"),
        ("/", "/", "/.json"),
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
    assert seed is not None and np.array_equal(seed.counts, COUNTS)


def test_a_run_without_tokens_replaces_no_statistics(tmp_path: Path) -> None:
    for n_tokens, kept in ((0, 0), (3, 3), (0, 3)):
        records = keeper(tmp_path, "stats.txt")
        records.write(report(n_tokens), LEFT)
        assert json.loads((tmp_path / "stats.json").read_text())["n_tokens"] == kept


def test_without_a_token_no_profile_is_begun_or_changed(tmp_path: Path) -> None:
    records = keeper(tmp_path, "stats", "p")
    records.write(report(0), History(np.zeros_like(COUNTS)))
    assert sorted(os.listdir(tmp_path)) == ["stats", "stats.json"]
    (tmp_path / "p").write_text(profile_text(MODEL, LEFT))
    kept = (tmp_path / "p").read_bytes() + b"\n\n"  # as we do not write it
    (tmp_path / "p").write_bytes(kept)
    records = keeper(tmp_path, profile="p")
    assert records.seed is not None
    records.write(report(0), records.seed)
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
    (tmp_path / "p").write_text(profile_text(MODEL, LEFT))
    before = (tmp_path / "p").read_bytes()
    config = EngineConfig(expert_profile=str(tmp_path / "p"), expert_stats=str(tmp_path / "stats"))
    records = RecordKeeper(config, SPEC, [])
    assert records.seed is None and "has no experts" in caplog.text
    records.write(make_report(SETUP, None), History(np.zeros(0)))
    assert (tmp_path / "p").read_bytes() == before
    assert "the model is dense" in (tmp_path / "stats").read_text()


@pytest.mark.parametrize(
    ("mode", "expected"), [(Cache(), ("lfru", "global")), (Resident(), (None, None))]
)
def test_a_policy_is_named_only_where_one_decides(
    mode: ExpertMode, expected: tuple[Any, Any]
) -> None:
    config = EngineConfig(expert_allocation="global")
    slots = (4, 4, 2) if mode.has_slots else ()
    plan = MemoryPlan(128, both("f16"), mode, (), expert_slots=slots)
    setup = setup_of(SPEC, plan, DEVICE, config, "lfru" if mode.has_slots else None)
    assert (setup.policy, setup.allocation) == expected
    assert (setup.n_experts, setup.n_used, setup.experts_in) == (8, 2, mode.experts_in)
    assert setup.slots == plan.expert_slots and setup.device == DEVICE.name


# ----- what goes wrong -----


def test_a_failure_is_raised_in_one_line_with_a_hint(tmp_path: Path) -> None:
    records = keeper(tmp_path, "none/stats.txt")
    words = r"statistics .* to .*/stats\.txt: No such.*; the .* to .*/stats\.json: No such file"
    with pytest.raises(VkmoeError, match=words) as caught:
        write(records)
    assert "\n" not in str(caught.value) and caught.value.hint and caught.value.exit_code == 1


def test_every_failure_is_told_and_the_other_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "stats.txt").mkdir()
    records = keeper(tmp_path, "stats.txt", "none/p.json")
    with pytest.raises(VkmoeError) as caught:
        write(records)
    assert f"statistics could not be written to {tmp_path}/stats.txt: Is a dir" in str(caught.value)
    assert f"profile could not be written to {tmp_path}/none/p.json: No such" in str(caught.value)
    assert (tmp_path / "stats.json").is_file()
    records = keeper(tmp_path, "stats.txt", "p.json")
    with pytest.raises(VkmoeError):
        write(records)
    assert load_profile(tmp_path / "p.json", MODEL, SPEC.n_vocab) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the first"), SystemExit(3)])
def test_an_error_under_way_is_not_replaced(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    records = keeper(tmp_path, "none/stats", "none/p")
    caplog.clear()
    with pytest.raises(type(error)) as caught:
        try:
            raise error
        finally:
            write(records)
    assert caught.value is error
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR] * 3
    for entry, name in zip(caplog.records, ("stats", "stats.json", "p"), strict=True):
        assert f"none/{name}: No such" in entry.getMessage()


def test_a_path_that_will_fail_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    keeper(tmp_path, "none/stats", "file/p")
    keeper(tmp_path, "folder")
    messages = [entry.getMessage() for entry in caplog.records]
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING] * 3
    assert messages[0].endswith(f"statistics will not be written at the end: no folder "
                                f"{tmp_path}/none")  # fmt: skip
    assert messages[1].endswith(
        f"profile will not be written at the end: no folder {tmp_path}/file"
    )
    assert messages[2].endswith(f"{tmp_path}/folder is a folder")


def test_a_folder_without_permission_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may write
    keeper(tmp_path, "stats")
    assert f"no permission to write in {tmp_path}" in caplog.text


def test_a_good_path_is_not_worth_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p").write_text(profile_text(MODEL, LEFT))
    (tmp_path / "stats").write_text("older")
    write(keeper(tmp_path, "stats", "p"))
    assert caplog.text == ""
    assert "older" not in (tmp_path / "stats").read_text()


def test_a_damaged_profile_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("{")
    with pytest.raises(VkmoeError, match="not an expert profile"):
        keeper(tmp_path, profile="p")
    assert (tmp_path / "p").read_text() == "{"


@pytest.mark.parametrize(
    ("stats", "profile", "words"),
    [
        ("model.gguf", None, "--expert-stats .* has the name of a model"),
        (None, "model.GGUF", "--expert-profile .* has the name of a model"),
        ("blob", None, "--expert-stats .*blob would overwrite a model"),
        (None, "blob", "--expert-profile .*blob would overwrite a model"),
        ("link", None, "--expert-stats .*link would overwrite a model"),
        (None, "link", "--expert-profile .*link would overwrite a model"),
        ("blob.json", None, "--expert-stats .*blob.txt would overwrite a model"),
        ("run.json", "run.json", "--expert-stats and --expert-profile would both write"),
        ("run.txt", "run.json", "--expert-stats and --expert-profile would both write"),
        ("run", "run", "--expert-stats and --expert-profile would both write"),
        ("run", "run.json", "--expert-stats and --expert-profile would both write"),
        ("old", "old link", "--expert-stats and --expert-profile would both write"),
        ("loop", "loop", "--expert-stats and --expert-profile would both write"),
    ],
)
def test_dangerous_paths_are_refused(
    tmp_path: Path, stats: str | None, profile: str | None, words: str
) -> None:
    for name in ("blob", "blob.txt"):
        shutil.copy(model_path("moe_plain"), tmp_path / name)
    (tmp_path / "old").write_text("older")
    for link, target in (("link", "blob"), ("old link", "old"), ("loop", "loop")):
        (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(UsageError, match=words) as caught:
        keeper(tmp_path, stats, profile)
    assert caught.value.hint and "\n" not in str(caught.value)


@pytest.mark.parametrize(("asked", "other"), [("a.json", "a.txt"), ("a.txt", "a.json"),
                                              ("a", "a.json")])  # fmt: skip
def test_only_the_named_file_may_be_anything(tmp_path: Path, asked: str, other: str) -> None:
    (tmp_path / asked).write_text("was named, and may go")
    for content in ("my notes", '{"format": "mine"}', "{"):
        (tmp_path / other).write_text(content)
        with pytest.raises(UsageError, match=f"would overwrite .*/{other} too") as caught:
            keeper(tmp_path, asked)
        assert (tmp_path / other).read_text() == content and caught.value.hint
    (tmp_path / other).write_text("")  # nothing is lost
    write(keeper(tmp_path, asked))
    first = [(tmp_path / name).read_text() for name in (asked, other)]
    records = keeper(tmp_path, asked)  # both are ours now
    records.write(report(2), LEFT)
    second = [(tmp_path / name).read_text() for name in (asked, other)]
    assert first[0] != second[0] and first[1] != second[1]
    document = tmp_path / "a.json"
    document.write_text(json.dumps(json.loads(document.read_text()), indent=4))
    keeper(tmp_path, asked)  # laid out anew by another program


# ----- any file: whole or not at all -----


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"older")
    return tmp_path / "file"


def test_a_file_is_made_as_any_other(tmp_path: Path) -> None:
    write_whole(tmp_path / "new", "data")
    (tmp_path / "plain").touch()
    assert (tmp_path / "new").read_bytes() == b"data"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_ends_early_keeps_the_older_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(source: Path, target: Path) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_whole(path, "newer")
    assert os.listdir(path.parent) == [path.name], "a temporary file was left"
    assert path.read_bytes() == b"older"


def test_a_link_keeps_its_place_and_a_file_its_permissions(path: Path) -> None:
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    write_whole(link, "newer")
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() == b"newer" and len(os.listdir(path.parent)) == 2


def test_a_long_name_is_no_reason_to_fail(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_whole(path, "data")
    assert path.read_bytes() == b"data"


def test_what_was_foreseen_is_what_happens(path: Path) -> None:
    folder = path.parent
    for bad in (Path("/"), Path(""), folder, folder / "none" / "x", path / "x"):
        assert reason_against_writing(bad)
        with pytest.raises(OSError):
            write_whole(bad, "newer")
    for good in (path, folder / "new", Path(os.devnull)):
        assert reason_against_writing(good) is None
        write_whole(good, "newer")
    assert Path(os.devnull).is_char_device(), "it was replaced"


# ----- what may not be replaced -----


def test_a_file_that_is_read_is_not_replaced(path: Path) -> None:
    link, other = path.with_name("link"), path.with_name("other")
    link.symlink_to(path)
    other.touch()
    for bad, source in ((path, path), (link, path), (path, link)):
        with pytest.raises(UsageError, match=f"--flag {bad} would overwrite {source}, which is"):
            check_outputs([("--flag", bad)], [str(other), source])
    check_outputs([("--flag", path)], [other])


def test_what_harms_nothing_is_not_refused(path: Path) -> None:
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)  # to open it would wait for a writer
    path.with_name("short").write_bytes(b"GGU")
    for good in (path, pipe, path.with_name("new"), path.with_name("short"), path.parent,
                 path / "below", Path(os.devnull), path.with_name("n" * 999)):  # fmt: skip
        check_outputs([("--flag", good)], [path.parent])


def test_one_file_has_many_names_before_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    for first, second in (("file", "link"), ("none/../file", "file")):
        with pytest.raises(UsageError, match="--flag and --other would both write "):
            check_outputs([("--flag", tmp_path / first), ("--other", tmp_path / second)])
    for first in ("file", "loop"):
        check_outputs([("--flag", tmp_path / first), ("--other", tmp_path / "other")])
