"""Opening and mapping one file read-only, with a clear error for everything that can go wrong.

Owns the conversation with the operating system.  Does not look at the bytes.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import NamedTuple

from vkmoe.errors import ModelFileError
from vkmoe.gguf_file.positioned import FileStamp

__all__ = ["MappedFile", "map_file"]


class MappedFile(NamedTuple):
    """A mapping, and which file it is of."""

    buffer: mmap.mmap
    path: Path
    stamp: FileStamp


def map_file(path: Path) -> MappedFile:
    """Map the regular, non-empty file at `path`; raises ModelFileError if that cannot be done.

    The mapping lives until the last NumPy view of it is gone.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path} is a directory, not a GGUF file", _directory_hint(path))
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is not a regular file", "vkmoe maps files into memory")
        with open(path, "rb") as stream:
            stamp = FileStamp.of(stream.fileno())
            if stamp.n_bytes == 0:
                raise ModelFileError(f"{path} is empty", "download or convert the model again")
            return MappedFile(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), path, stamp)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist", _missing_hint(path)) from None
    except PermissionError:
        raise ModelFileError(
            f"{path} cannot be read: permission denied", f"try: ls -l {path}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(f"{str(path)!r} cannot be opened: {reason}") from None


def _directory_hint(path: Path) -> str:
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
    except OSError:
        names = []
    return f"did you mean {path / names[0]}?" if names else "name the .gguf file itself"


def _missing_hint(path: Path) -> str:
    return "check the spelling" if path.parent.is_dir() else f"{path.parent} does not exist either"
