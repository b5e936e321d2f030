"""Writes a small file whole or not at all: a reader never sees half of it."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["is_special", "reason_against_writing", "write_whole"]

_DEVICES = ("/dev/", "/proc/")


def write_whole(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path` and put it in its place. Raises OSError.

    A link stays a link, a file keeps its permissions. What is no plain file, such as a pipe or a
    terminal, is written to directly.
    """
    if is_special(path):
        with open(path, "ab", buffering=0) as stream:
            stream.write(data)
        return
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    beside = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}")
    try:
        with open(beside, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileNotFoundError):
            os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def reason_against_writing(path: Path) -> str | None:
    """Why `write_whole` would fail, as far as one can know before; None: it may work."""
    try:
        if is_special(path):
            return None
        target = Path(os.path.realpath(path))
        folder = target.parent
        if target.is_dir():
            return f"{path} is a folder"
        if not folder.is_dir():
            return f"{folder} is not a folder" if folder.exists() else f"no folder {folder}"
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"no permission to write in {folder}"
    except OSError as error:
        return str(error)
    return None


def is_special(path: Path) -> bool:
    """Whether `path` is something to write to that is no plain file."""
    if str(path).startswith(_DEVICES):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
