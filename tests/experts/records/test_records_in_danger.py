"""The two files of a run: what a failure may not destroy, and what is told of it."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from tests.engine.tiny import model_path
from tests.experts.kept_records import keeper, report, write
from tests.experts.records.test_profile_file import COUNTS, MODEL
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.experts.records.profile import load_profile, profile_text


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
    assert load_profile(tmp_path / "p.json", MODEL) is not None


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
    assert messages[1].endswith(f"profile will not be written at the end: {tmp_path}/file is not a "
                                "folder")  # fmt: skip
    assert messages[2].endswith(f"{tmp_path}/folder is a folder")


def test_a_folder_without_permission_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may write
    keeper(tmp_path, "stats")
    assert f"no permission to write in {tmp_path}" in caplog.text


def test_a_good_path_is_not_worth_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p").write_text(profile_text(MODEL, COUNTS))
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
        ("run\0", None, "null character"),
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
    for content in ("my notes", "on vkmoe expert statistics\n", '{"format": "mine"}', "{"):
        (tmp_path / other).write_text(content)
        with pytest.raises(UsageError, match=f"would overwrite .*/{other} too") as caught:
            keeper(tmp_path, asked)
        assert (tmp_path / other).read_text() == content and caught.value.hint
    (tmp_path / other).write_text("")  # nothing is lost
    write(keeper(tmp_path, asked))
    first = [(tmp_path / name).read_text() for name in (asked, other)]
    records = keeper(tmp_path, asked)  # both are ours now
    records.take(report(2), COUNTS)
    records.write()
    second = [(tmp_path / name).read_text() for name in (asked, other)]
    assert first[0] != second[0] and first[1] != second[1]
    document = tmp_path / "a.json"
    document.write_text(json.dumps(json.loads(document.read_text()), indent=4))
    keeper(tmp_path, asked)  # laid out anew by another program
