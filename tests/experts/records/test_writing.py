"""A file is written whole or not at all, and nothing but plain files is replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.engine.tiny import model_path
from vkmoe.errors import UsageError
from vkmoe.experts.records.writing import (
    check_outputs,
    is_special,
    reason_against_writing,
    write_whole,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"older")
    return tmp_path / "file"


def test_a_file_is_made_as_any_other(tmp_path: Path) -> None:
    write_whole(tmp_path / "new", "data")
    (tmp_path / "plain").touch()
    assert (tmp_path / "new").read_bytes() == b"data"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_keeps_the_older_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "newer")
    assert os.listdir(path.parent) == [path.name], "a temporary file was left"
    assert path.read_bytes() == b"older"


def test_ctrl_c_while_writing_leaves_no_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "newer")
    assert os.listdir(path.parent) == [path.name] and path.read_bytes() == b"older"


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


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_whole(Path(os.devnull), "data")
    assert Path(os.devnull).is_char_device()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "data")
        assert os.read(reader, 99) == b"data"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_what_was_foreseen_is_what_happens(path: Path) -> None:
    folder = path.parent
    for bad in (folder, folder / "none" / "x", path / "x"):
        assert reason_against_writing(bad)
        with pytest.raises(OSError):
            write_whole(bad, "newer")
    for good in (path, folder / "new", Path(os.devnull)):
        assert reason_against_writing(good) is None
        write_whole(good, "newer")


# ----- what is no plain file -----


def test_a_plain_file_among_the_devices_is_a_plain_file() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "file"
        path.write_bytes(b"older")
        assert not is_special(path)
        write_whole(path, "newer")
        assert path.read_bytes() == b"newer", "added to, not replaced"
        assert reason_against_writing(Path(folder) / "none" / "x")
    assert is_special(Path(os.devnull))


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/fd/9", "log"])
def test_a_file_that_the_shell_writes_to_is_added_to(tmp_path: Path, name: str) -> None:
    """A new file in its place would leave what was printed in a file without a name."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from vkmoe.experts.records.writing import write_whole\n"
        "os.write(int(sys.argv[2]), b'text, '); write_whole(Path(sys.argv[1]), 'statistics')"
    )
    descriptor = {"/dev/stderr": "2", "/dev/fd/9": "9"}.get(name, "1")
    subprocess.run(
        ["sh", "-c", f'exec "$@" {descriptor}>>log', "sh", sys.executable, "-c", code, name,
         descriptor],
        cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert (tmp_path / "log").read_bytes() == b"text, statistics"
    assert os.listdir(tmp_path) == ["log"]


# ----- what may not be replaced -----


def as_link(model: Path, path: Path) -> None:
    path.symlink_to(model)


@pytest.mark.parametrize("make", [shutil.copy, as_link, os.link])
def test_a_model_is_not_replaced_whatever_its_name(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    model, path = tmp_path / "sha256-1234", tmp_path / "stats.txt"
    shutil.copy(model_path("moe_plain"), model)
    make(model, path)
    for bad in (model, path):
        with pytest.raises(UsageError, match=r"--flag .* would overwrite a model") as caught:
            check_outputs([("--flag", bad)])
        assert str(bad) in str(caught.value) and caught.value.hint


def test_no_part_of_a_split_model_is_replaced(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "test", split_max_tensors=1)
    for name in "abc":
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for number, part in enumerate(parts):
        link = tmp_path / f"part{number}"
        link.symlink_to(part)
        with pytest.raises(UsageError, match="would overwrite a model"):
            check_outputs([("--flag", link)])


@pytest.mark.parametrize("name", ["m.gguf", "M.GGUF", "a\0b"])
def test_names_that_are_never_right(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--flag ") as caught:
        check_outputs([("--flag", tmp_path / name)])
    assert caught.value.hint


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
    (tmp_path / "there").touch()
    os.link(tmp_path / "there", tmp_path / "hard link")
    for first, second in (("there", "hard link"), ("file", "link"), ("none/../file", "file")):
        with pytest.raises(UsageError, match="--flag and --other would both write "):
            check_outputs([("--flag", tmp_path / first), ("--other", tmp_path / second)])
    for first in ("file", "loop"):
        check_outputs([("--flag", tmp_path / first), ("--other", tmp_path / "other")])
