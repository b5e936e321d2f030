"""This module saves what is in a region of the KV caches to a file, and restores it, bit by bit.

A file has a header, the tokens, the positions at which the model's state can stop, a checksum of
all that; then rows and states as the model passes them on, and their checksum. Numbers are
little-endian. What a header says is compared with the file's size before memory is taken.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TextForm
from vkmoe.errors import StateFileError, UsageError
from vkmoe.experts.records.keeper import new_file
from vkmoe.generate.regions.regions import Regions
from vkmoe.generate.runner import BatchRunner, Bytes

MAGIC, VERSION = b"vkmoe-kv", 1
# Version, fingerprint, bytes of rows and states, tokens, those run as a prompt's, stops.
_HEAD = struct.Struct("<I32sQIII")
_SUM = struct.Struct("<I")
MOST_STOPS = 256
_HINT = "save it again"

Ids = NDArray[np.int32]


class StateCounts(NamedTuple):
    """Says how much of a region was saved or restored."""

    n_tokens: int
    n_bytes: int  # of the file


class _Head(NamedTuple):
    """Holds what stands before rows and states."""

    tokens: Ids
    n_prompt_rows: int
    form: TextForm
    n_bytes: int  # of rows and states


def save_region(runner: BatchRunner, regions: Regions, region: int, path: Path) -> StateCounts:
    """Write a region's tokens, rows and states to a file, which replaces one that was saved before.

    Raises UsageError where a reply uses the region; StateFileError where nothing is in it, the file
    cannot be written, or another kind of file is there; errors of the model.
    """
    check_free(regions, region)
    form = runner.text_form(region)
    tokens = np.array(regions.tokens(region)[: form.n_positions], "<i4")
    if not len(tokens):
        raise StateFileError(f"nothing is in region {region}", "generate a reply in it first")
    n_prompt_rows, n_bytes = regions.n_prompt_rows(region), runner.text_bytes(form)
    assert n_bytes is not None, form
    counts = len(tokens), min(n_prompt_rows, len(tokens)), len(form.stops)
    head = MAGIC + _HEAD.pack(VERSION, runner.text_fingerprint, n_bytes, *counts)
    head += tokens.tobytes() + np.array(form.stops, "<i4").tobytes()
    with _refusing(path, "written"):
        _check_replaceable(path)
        with new_file(path) as stream:
            stream.write(head + _SUM.pack(crc32(head)))
            sums = _Sum()

            def write(block: Bytes) -> None:
                sums.add(block)
                stream.write(block.data)

            runner.write_text(region, form, write)
            stream.write(_SUM.pack(sums.value))
            return StateCounts(len(tokens), stream.tell())


def restore_region(runner: BatchRunner, regions: Regions, region: int, path: Path) -> StateCounts:
    """Fill a region with what a file has; what was in it before is kept in host memory.

    Raises UsageError where a reply uses the region; StateFileError where the file cannot be read,
    is damaged, or is of another model or other types of KV caches; errors of the model. Damage of
    rows or states leaves the region empty, any other error leaves it as it was.
    """
    check_free(regions, region)
    with _refusing(path, "read"), _opened(path) as (stream, size):
        head = _read_head(runner, stream, size, path)
        regions.let_leave(region, 0)
        regions.go_back(region, 0)
        sums = _Sum()

        def read(block: Bytes) -> None:
            _fill(stream, block, path)
            sums.add(block)

        runner.read_text(region, head.form, read)
        if stream.read(_SUM.size) != _SUM.pack(sums.value):
            regions.go_back(region, 0)  # which empties the model's region, too
            _refuse(path, "is damaged: the checksum of its rows differs")
    regions.hold(region, head.tokens.tolist(), head.n_prompt_rows)
    return StateCounts(len(head.tokens), size)


def check_free(regions: Regions, region: int) -> None:
    """Raise UsageError where there is no such region, or a reply uses it."""
    if not 0 <= region < len(regions):
        raise UsageError(f"there is no region {region}", f"there are {len(regions)}, from 0 on")
    if regions.is_taken(region):
        raise UsageError(f"region {region} is in use", "wait until its reply has ended")


# ----- reading -----


def _read_head(runner: BatchRunner, stream: BinaryIO, size: int, path: Path) -> _Head:
    """Read and check all that stands before rows and states.

    Raises StateFileError. Takes no more memory than the file's size.
    """
    begin = stream.read(len(MAGIC) + _HEAD.size)
    if not begin.startswith(MAGIC) or len(begin) != len(MAGIC) + _HEAD.size:
        _refuse(path, "is not a saved state", "give a file that vkmoe saved")
    version, fingerprint, n_bytes, n_tokens, n_prompt_rows, n_stops = _HEAD.unpack(
        begin[len(MAGIC) :]
    )
    if version != VERSION:
        _refuse(path, f"has version {version} of the format; {VERSION} is known")
    n_before = len(begin) + 4 * (n_tokens + n_stops) + _SUM.size
    if size != n_before + n_bytes + _SUM.size or n_stops > MOST_STOPS:
        _refuse(path, "is damaged: its size is not what it says")
    if not 0 < n_tokens <= runner.ctx_size:  # first: a file with holes may be large for nothing
        _refuse(path, f"has {n_tokens} tokens; a context has 1 to {runner.ctx_size}",
                "raise --ctx-size")  # fmt: skip
    rest = stream.read(4 * (n_tokens + n_stops))
    if stream.read(_SUM.size) != _SUM.pack(crc32(rest, crc32(begin))):
        _refuse(path, "is damaged: the checksum of its header differs")
    if fingerprint != runner.text_fingerprint:
        _refuse(
            path,
            "was saved with another model, or with other options",
            "use the model, --cache-type-k, --cache-type-v, --ctx-size, --ubatch-size and --draft "
            "that it was saved with",
        )
    numbers = np.frombuffer(rest, "<i4")
    tokens, stops = numbers[:n_tokens], tuple(numbers[n_tokens:].tolist())
    sound = tokens.min() >= 0 and tokens.max() < runner.n_vocab and n_prompt_rows <= n_tokens
    form = TextForm(n_tokens, stops)
    if not sound or runner.text_bytes(form) != n_bytes:
        _refuse(path, "is damaged: its numbers contradict each other")
    return _Head(tokens.astype(np.int32), n_prompt_rows, form, n_bytes)


def _fill(stream: BinaryIO, block: Bytes, path: Path) -> None:
    """Fill a block with the next bytes. Raises StateFileError where there are too few."""
    view, done = block.data, 0
    while done < len(view):
        n_read = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not n_read:
            _refuse(path, "ends too early")
        done += n_read


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a plain file; yield it with its size. Raises OSError, StateFileError."""
    # A pipe that nothing writes to would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            _refuse(path, "is not a plain file", "give a file that vkmoe saved")
        yield stream, found.st_size


class _Sum:
    """Adds up the checksum of blocks."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, block: Bytes) -> None:
        self.value = crc32(block.data, self.value)


# ----- files that cannot be used -----


def _check_replaceable(path: Path) -> None:
    """Raise StateFileError where another kind of file would be lost."""
    if not path.exists():
        return
    with _opened(path) as (stream, size):
        if size and stream.read(len(MAGIC)) != MAGIC:
            _refuse(path, "is another kind of file, which is not replaced", "give another name")


@contextmanager
def _refusing(path: Path, done: str) -> Iterator[None]:
    """Turn errors of the system into those of the file."""
    try:
        yield
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) else None
        raise StateFileError(f"{path} cannot be {done}: {reason or error}") from None


def _refuse(path: Path, complaint: str, hint: str = _HINT) -> NoReturn:
    raise StateFileError(f"{path} {complaint}", hint)
