"""A file is written whole or not at all, and nothing but plain files is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vkmoe.experts.writing import reason_against_writing, write_whole


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"older")
    return tmp_path / "file"


def test_a_file_is_made_as_any_other(tmp_path: Path) -> None:
    write_whole(tmp_path / "new", b"data")
    (tmp_path / "plain").touch()
    assert (tmp_path / "new").read_bytes() == b"data"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_keeps_the_older_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"newer")
    assert os.listdir(path.parent) == [path.name], "a temporary file was left"
    assert path.read_bytes() == b"older"


def test_ctrl_c_while_writing_leaves_no_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"newer")
    assert os.listdir(path.parent) == [path.name] and path.read_bytes() == b"older"


def test_a_link_keeps_its_place_and_a_file_its_permissions(path: Path) -> None:
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    write_whole(link, b"newer")
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() == b"newer" and len(os.listdir(path.parent)) == 2


def test_a_long_name_is_no_reason_to_fail(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_whole(path, b"data")
    assert path.read_bytes() == b"data"


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_whole(Path(os.devnull), b"data")
    assert Path(os.devnull).is_char_device()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"data")
        assert os.read(reader, 99) == b"data"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_what_was_foreseen_is_what_happens(path: Path) -> None:
    folder = path.parent
    for bad in (folder, folder / "none" / "x", path / "x"):
        assert reason_against_writing(bad)
        with pytest.raises(OSError):
            write_whole(bad, b"newer")
    for good in (path, folder / "new", Path(os.devnull)):
        assert reason_against_writing(good) is None
        write_whole(good, b"newer")
