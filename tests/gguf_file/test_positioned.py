"""Reading a file by position: the right bytes, or an error that says what is wrong with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vkmoe.errors import ModelFileError
from vkmoe.gguf_file.disk import FileStamp, PositionedFile

N_BYTES = 40_000
CONTENTS = np.random.default_rng(7).integers(0, 256, N_BYTES).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(CONTENTS.tobytes())
    return made


def stamp_of(path: Path) -> FileStamp:
    with open(path, "rb") as stream:
        return FileStamp.of(stream.fileno())


@pytest.fixture
def opened(path: Path) -> Iterator[PositionedFile]:
    with PositionedFile(path, stamp_of(path)) as file:
        yield file


def read(file: PositionedFile, offset: int = 0, n_bytes: int = 1000) -> np.ndarray:
    out = np.full(n_bytes, 0xAA, np.uint8)
    file.read_into(out, offset, "expert 3")
    return out


@pytest.mark.parametrize(("offset", "n_bytes"), [(0, N_BYTES), (1, 1), (12_345, 20_000), (9, 0)])
def test_bytes_at_a_position(opened: PositionedFile, offset: int, n_bytes: int) -> None:
    assert (read(opened, offset, n_bytes) == CONTENTS[offset : offset + n_bytes]).all()


def test_reads_that_return_early_go_on(
    opened: PositionedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may return fewer bytes than asked for, of a large read always."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: preadv(fd, [out[0][:777]], at))
    assert (read(opened, 5, 10_000) == CONTENTS[5:10_005]).all()


def test_a_file_cut_off_says_where_it_ends(opened: PositionedFile, path: Path) -> None:
    os.truncate(path, 500)
    with pytest.raises(ModelFileError, match=r"ends after 500 bytes, 40000 before; expert 3 is at "
                                             r"bytes 100 to 1100"):  # fmt: skip
        read(opened, 100)


@pytest.mark.parametrize("n_bytes", [30_000, 50_000], ids=["shorter", "longer"])
def test_a_changed_size_is_told_though_the_bytes_are_there(
    opened: PositionedFile, path: Path, n_bytes: int
) -> None:
    os.truncate(path, n_bytes)
    with pytest.raises(ModelFileError, match="was written to before expert 3"):
        read(opened)


def test_a_file_written_to_is_told(opened: PositionedFile, path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.write(b"other")
    os.utime(path, ns=(0, stamp_of(path).written_ns + 1))  # a coarse clock may not have moved on
    with pytest.raises(ModelFileError, match="was written to"):
        read(opened)


def test_a_replaced_file_is_read_as_it_was_opened(opened: PositionedFile, path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(N_BYTES))
    other.replace(path)
    assert (read(opened) == CONTENTS[:1000]).all()
    path.unlink()
    assert (read(opened, 7) == CONTENTS[7:1007]).all()


def test_another_file_under_the_name_is_refused(path: Path) -> None:
    """What the header said may not hold for it."""
    stamp = stamp_of(path)
    other = path.with_name("other")
    other.write_bytes(CONTENTS.tobytes())
    other.replace(path)
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelFileError, match="is not the file that was opened before"):
        PositionedFile(path, stamp)
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be opened again: No such file"):
        PositionedFile(path, stamp)
    assert len(os.listdir("/proc/self/fd")) == n_open


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), OSError("strange")])
def test_an_error_of_the_disk_is_told(
    opened: PositionedFile, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise error

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelFileError, match=f"expert 3 cannot be read: {error.args[-1]}"):
        read(opened)
    monkeypatch.undo()
    assert (read(opened) == CONTENTS[:1000]).all()


def test_a_descriptor_closed_by_others_is_told(path: Path) -> None:
    file = PositionedFile(path, stamp_of(path))
    descriptor = vars(file)["_descriptor"]
    kept = os.dup(descriptor)
    os.close(descriptor)
    with pytest.raises(ModelFileError, match="Bad file descriptor"):
        read(file)
    os.dup2(kept, descriptor)
    os.close(kept)
    file.close()


def test_after_closing_nothing_is_read_and_nothing_is_open(path: Path) -> None:
    n_open = len(os.listdir("/proc/self/fd"))
    file = PositionedFile(path, stamp_of(path))
    assert len(os.listdir("/proc/self/fd")) == n_open + 1
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == n_open
    with pytest.raises(ModelFileError, match="is closed; expert 3 cannot be read"):
        read(file)
    file.will_read(0, 100)
    file.drop(0, 100)


def test_a_read_under_way_keeps_the_file_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed under it, the number of the descriptor could be another file's by then."""
    file = PositionedFile(path, stamp_of(path))
    begun, closed = threading.Event(), threading.Event()
    preadv, results = os.preadv, []

    def slow(descriptor: int, out: list[memoryview], offset: int) -> int:
        begun.set()
        assert closed.wait(10)
        return preadv(descriptor, out, offset)

    monkeypatch.setattr(os, "preadv", slow)
    reader = threading.Thread(target=lambda: results.append(read(file, 50)))
    reader.start()
    assert begun.wait(10)
    n_open = len(os.listdir("/proc/self/fd"))
    file.close()
    other = os.open("/dev/zero", os.O_RDONLY)
    closed.set()
    reader.join(10)
    os.close(other)
    assert (results[0] == CONTENTS[50:1050]).all()
    assert len(os.listdir("/proc/self/fd")) == n_open - 1


@pytest.mark.parametrize("error", [None, OSError(22, "Invalid argument")], ids=["absent", "error"])
def test_hints_that_the_system_does_not_take_do_no_harm(
    path: Path, error: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        assert error is not None
        raise error

    if error is None:
        monkeypatch.delattr(os, "posix_fadvise")
    else:
        monkeypatch.setattr(os, "posix_fadvise", refuse)
    with PositionedFile(path, stamp_of(path)) as file:
        file.will_read(0, 1000)
        assert (read(file) == CONTENTS[:1000]).all()
        file.drop(0, 0)


def test_many_threads_read_at_once(opened: PositionedFile) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for offset in np.random.default_rng(seed).integers(0, 39_000, 200).tolist():
            if not (read(opened, offset) == CONTENTS[offset : offset + 1000]).all():
                wrong.append(offset)
            opened.drop(offset, 1000)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
