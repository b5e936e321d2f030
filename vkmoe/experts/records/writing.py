"""Writes a small file whole or not at all, and refuses to write over what a run needs.

Owns what may not be replaced: any model, files that are being read, and other files that the same
run writes. Does not own what is written.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from vkmoe.errors import UsageError

__all__ = ["check_outputs", "is_special", "reason_against_writing", "write_whole"]

_DESCRIPTORS = ("/dev/fd/", "/proc/")  # a plain file is someone's open file there
_STREAMS = (1, 2)  # stdout and stderr
_MODEL_BEGINS = b"GGUF"  # models of ollama and of Hugging Face's cache have no ending


def write_whole(path: Path, text: str) -> None:
    """Write a temporary file beside `path` and put it in its place. Raises OSError.

    A link stays a link, a file keeps its permissions. What `is_special` is added to instead.
    """
    data = text.encode("utf-8", "replace")
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
    """Return why `write_whole` would fail, as far as one can know before; None: it may work."""
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


def check_outputs(outputs: Sequence[tuple[str, Path]], inputs: Iterable[str | Path] = ()) -> None:
    """Raise UsageError where files to write would replace a model, one of `inputs` or each other.

    `outputs` are options and the files they ask for. Links are followed. Any file that begins as
    GGUF is a model, in use or not; so is any name that ends in .gguf.
    """
    for option, path in outputs:
        _refuse_to_replace(option, path, inputs)
    for (option, path), (other, second) in combinations(outputs, 2):
        if option != other and _same_file(path, second) and not is_special(path):
            raise UsageError(
                f"{option} and {other} would both write {path}", "give one of them another name"
            )


def _refuse_to_replace(option: str, path: Path, inputs: Iterable[str | Path]) -> None:
    if "\0" in str(path):
        raise UsageError(f"{option} has a null character in it", "give a path")
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{option} {path} has the name of a model", "give it another name")
    if not os.path.isfile(path):
        return
    for source in inputs:
        if _same_file(path, Path(source)):
            raise UsageError(
                f"{option} {path} would overwrite {source}, which is read", "give another path"
            )
    with suppress(OSError), open(path, "rb") as stream:
        if stream.read(len(_MODEL_BEGINS)) == _MODEL_BEGINS:
            raise UsageError(f"{option} {path} would overwrite a model", "give another path")


def _same_file(first: Path, second: Path) -> bool:
    """Return whether both name one file, through links too; it need not be there yet."""
    try:
        return first.samefile(second)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)


def is_special(path: Path) -> bool:
    """Return whether `path` is no plain file (a pipe, a terminal), or takes stdout or stderr.

    Such a file is written to as it is: a new one in its place would not reach its reader.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):  # it is not there, or its name has a null character
        return False
    if not stat.S_ISREG(found.st_mode):
        return not stat.S_ISDIR(found.st_mode)
    return str(path).startswith(_DESCRIPTORS) or any(_is_open(fd, found) for fd in _STREAMS)


def _is_open(descriptor: int, found: os.stat_result) -> bool:
    """Return whether `descriptor` is that file."""
    try:
        return os.path.samestat(os.fstat(descriptor), found)
    except OSError:  # it is closed
        return False
