"""This module opens one file: it maps it, or reads it by position, with a clear error for all that
can go wrong.

It owns mappings, descriptors, and the stamp that tells whether a file is still the one it was. A
mapped file that is cut off ends the process; read by position it is an error. It does not look at
the bytes.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from vkmoe.closing import Closing
from vkmoe.errors import ModelFileError

Bytes = npt.NDArray[np.uint8]
_CHANGED_HINT = "do not write to a model file while vkmoe runs; start again"
_DISK_HINT = "look in the kernel log; the disk or the network it is on may be failing"


class FileStamp(NamedTuple):
    """Tells one file, and its contents at one time, from another."""

    device: int
    inode: int
    n_bytes: int
    written_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class MappedFile(NamedTuple):
    """Holds a mapping, and the file that it shows."""

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
            inside = min(path.glob("*.gguf"), default=None)
            hint = f"did you mean {inside}?" if inside else "name the .gguf file itself"
            raise ModelFileError(f"{path} is a directory, not a GGUF file", hint)
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is not a regular file", "vkmoe maps files into memory")
        with open(path, "rb") as stream:
            stamp = FileStamp.of(stream.fileno())
            if stamp.n_bytes == 0:
                raise ModelFileError(f"{path} is empty", "download or convert the model again")
            return MappedFile(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), path, stamp)
    except FileNotFoundError:
        hint = f"{path.parent} does not exist either"
        raise ModelFileError(
            f"{path} does not exist", "check the spelling" if path.parent.is_dir() else hint
        ) from None
    except PermissionError:
        raise ModelFileError(
            f"{path} cannot be read: permission denied", f"try: ls -l {path}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(f"{str(path)!r} cannot be opened: {reason}") from None


class PositionedFile(Closing):
    """Reads one open file, which must stay as it was. Several threads may read at the same time.

    Raises ModelFileError, when made or when it reads, if the file is not the one of `stamp`.
    """

    def __init__(self, path: Path, stamp: FileStamp) -> None:
        self._path, self._stamp = path, stamp
        self._lock = threading.Lock()
        self._n_reading = 0
        self._closing = False
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ModelFileError(f"{path} cannot be opened again: {error.strerror}") from None
        self._advise(0, 0, "POSIX_FADV_RANDOM")  # only what is asked for
        if FileStamp.of(self._descriptor) != stamp:
            self.close()
            self._refuse("is not the file that was opened before")

    def read_into(self, out: Bytes, offset: int, what: str) -> None:
        """Fill `out` (uint8, one dimension, contiguous) with the bytes from `offset` on.

        Raises ModelFileError, saying that `what` was asked for, if they are not there, cannot be
        read, or may be others than before; `out` is undefined then.
        """
        done, target = 0, out.data
        with self._held(what) as descriptor:
            while done < out.size:
                n_bytes = os.preadv(descriptor, [target[done:]], offset + done)
                if n_bytes == 0:
                    left = FileStamp.of(descriptor).n_bytes
                    self._refuse(
                        f"ends after {left} bytes, {self._stamp.n_bytes} before; {what} is at "
                        f"bytes {offset} to {offset + out.size}"
                    )
                done += n_bytes
            if FileStamp.of(descriptor) != self._stamp:
                self._refuse(f"was written to before {what} could be read")

    def will_read(self, offset: int, n_bytes: int) -> None:
        """Have the kernel begin to fetch these bytes. Only a hint: nothing follows from it."""
        self._advise(offset, n_bytes, "POSIX_FADV_WILLNEED")

    def drop(self, offset: int, n_bytes: int) -> None:
        """Take the pages of these bytes out of the page cache, where the system can (0: to the
        end); pages that are mapped stay.
        """
        self._advise(offset, n_bytes, "POSIX_FADV_DONTNEED")

    def close(self) -> None:
        """Let no read begin any more. The last one under way, in another thread, closes the file.

        May be called twice.
        """
        with self._lock:
            idle, self._closing = not self._closing and self._n_reading == 0, True
        if idle:
            os.close(self._descriptor)

    # ----- inside -----

    @contextmanager
    def _held(self, what: str) -> Iterator[int]:
        """Yield a descriptor that stays open: closed early, its number may be another file's."""
        with self._lock:
            if self._closing:
                raise ModelFileError(f"{self._path} is closed; {what} cannot be read")
            self._n_reading += 1
        try:
            yield self._descriptor
        except OSError as error:
            reason = error.strerror or str(error)
            raise ModelFileError(
                f"{self._path}: {what} cannot be read: {reason}", _DISK_HINT
            ) from None
        finally:
            with self._lock:
                self._n_reading -= 1
                last = self._closing and self._n_reading == 0
            if last:
                os.close(self._descriptor)

    def _advise(self, offset: int, n_bytes: int, advice: str) -> None:
        """Give the kernel a hint about the file's pages, where the system takes such."""
        with suppress(ModelFileError), self._held("") as descriptor:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, offset, n_bytes, getattr(os, advice))

    def _refuse(self, complaint: str) -> NoReturn:
        raise ModelFileError(f"{self._path} {complaint}", _CHANGED_HINT)


_N_SAMPLES, _SAMPLE_BYTES = 16, 4 << 20


def read_speed(path: Path) -> float:
    """Measure how fast pieces of a file are read from its disk, in bytes per second.

    The pieces are spread over the file, and the kernel is asked to drop them first: a file that
    other processes map may be read from memory all the same. 0: the file cannot be read.
    """
    n_read = 0
    try:
        with open(path, "rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            last = max(0, size - _SAMPLE_BYTES)
            offsets = sorted({last * i // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)})
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for offset in offsets:
                    advice = os.POSIX_FADV_DONTNEED
                    os.posix_fadvise(stream.fileno(), offset, _SAMPLE_BYTES, advice)
            began = time.perf_counter()
            for offset in offsets:
                n_read += len(os.pread(stream.fileno(), _SAMPLE_BYTES, offset))
            return n_read / (time.perf_counter() - began)
    except OSError:
        return 0.0
