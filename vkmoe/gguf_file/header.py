"""The header of one GGUF file: where its metadata values and tensors lie.

Owns the header's layout and every check on it.  A file that passes has sane, aligned tensors that
lie inside it and do not cut into each other.  Does not know about split files (split.py).
"""

from __future__ import annotations

import math
import mmap
from itertools import pairwise
from typing import NamedTuple

from vkmoe.gguf_file.cursor import DAMAGED_HINT, Cursor, refuse, shown
from vkmoe.gguf_file.values import Entry, kind_name, read_value, skip_value
from vkmoe.quants.types import BY_ID, QuantType

__all__ = ["Header", "TensorInfo", "read_header"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LONGEST_NAME = 65535
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_SMALLEST_PAIR_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_INTEGER_KINDS = (0, 1, 2, 3, 4, 5, 10, 11)
_OTHER_FORMATS = {
    b"version https://git-lfs": "this is a Git LFS pointer, not the file: run `git lfs pull`",
    b"<": "this looks like a web page: the download went wrong",
    b"PK\x03\x04": "this is a zip or PyTorch file: convert the model to GGUF first",
    b"lmgg": "this is an old GGML file: convert the model to GGUF",
    b"tjgg": "this is an old GGML file: convert the model to GGUF",
    b"fmgg": "this is an old GGML file: convert the model to GGUF",
}


class TensorInfo(NamedTuple):
    """A tensor of the file: `shape` is row-major, the last number is the length of a row.

    `type` is a name of vkmoe.quants.TYPES; the data starts at byte `offset` of file `part`.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int
    part: int = 0
    offset: int = 0

    @property
    def n_weights(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)


class Header(NamedTuple):
    """What one file says: its version, its metadata entries and its tensors in file order."""

    version: int
    entries: dict[str, Entry]
    tensors: list[TensorInfo]


def read_header(buffer: mmap.mmap, label: str, part: int = 0) -> Header:
    """Read and check the header of the mapped file called `label`.

    Raises ModelFileError for anything that is not a sound little-endian GGUF of version 2 or 3.
    """
    cursor = Cursor(buffer, label)
    version = _read_version(cursor)
    n_tensors = cursor.u64("the number of tensors")
    n_pairs = cursor.u64("the number of metadata keys")
    _check_count(cursor, n_pairs, _SMALLEST_PAIR_BYTES, "metadata keys")
    _check_count(cursor, n_tensors, _SMALLEST_TENSOR_BYTES, "tensors")
    entries = _read_entries(cursor, n_pairs)
    alignment = _alignment(cursor, entries)
    tensors = [_read_tensor(cursor, alignment, part) for _ in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    return Header(version, entries, _placed(tensors, data_start, cursor))


def _read_version(cursor: Cursor) -> int:
    magic = cursor.buffer[: len(MAGIC)]
    if magic != MAGIC:
        start = cursor.buffer[:32].lstrip()
        hints = (hint for mark, hint in _OTHER_FORMATS.items() if start.startswith(mark))
        refuse(
            cursor.label,
            f"is not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}",
            next(hints, "vkmoe reads models in the GGUF format"),
        )
    cursor.skip(len(MAGIC), "the magic")
    version = cursor.u32("the version")
    if version in _VERSIONS:
        return version
    if version and not version & 0xFFFF:
        refuse(cursor.label, "is a big-endian GGUF file", "use the little-endian file")
    if version == 1:
        refuse(cursor.label, "is GGUF version 1, which is obsolete", "convert the model again")
    refuse(cursor.label, f"is GGUF version {version}; vkmoe reads versions 2 and 3")


def _check_count(cursor: Cursor, count: int, smallest_bytes: int, what: str) -> None:
    if count * smallest_bytes > cursor.end - cursor.at:
        refuse(cursor.label, f"claims {count} {what}, more than its {cursor.end} bytes can hold")


def _read_entries(cursor: Cursor, n_pairs: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for index in range(n_pairs):
        key = cursor.text(f"metadata key {index}", _LONGEST_NAME)
        if not key or key in entries:
            refuse(
                cursor.label, f"metadata key {shown(key)} {'comes twice' if key else 'is empty'}"
            )
        kind = cursor.u32(f"the kind of {shown(key)}")
        entries[key] = Entry(kind, cursor.at)
        skip_value(cursor, kind, key)
    return entries


def _alignment(cursor: Cursor, entries: dict[str, Entry]) -> int:
    key = "general.alignment"
    if key not in entries:
        return _DEFAULT_ALIGNMENT
    kind, at = entries[key]
    if kind not in _INTEGER_KINDS:
        refuse(cursor.label, f"{key} is a {kind_name(kind)}, not a whole number")
    value = read_value(Cursor(cursor.buffer, cursor.label, at), kind, key)
    assert isinstance(value, int)
    if value < 1 or value & (value - 1):
        refuse(cursor.label, f"{key} is {value}, not a power of two")
    return value


def _read_tensor(cursor: Cursor, alignment: int, part: int) -> TensorInfo:
    """One tensor's description; `offset` is still relative to the start of the data."""
    name = cursor.text("a tensor's name", _LONGEST_NAME)
    what = f"tensor {shown(name)}"
    if not name:
        refuse(cursor.label, "a tensor has no name")
    n_dimensions = cursor.u32(f"the description of {what}")
    if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
        refuse(cursor.label, f"{what} has {n_dimensions} dimensions (1 to 4 are possible)")
    sizes = [cursor.u64(f"the description of {what}") for _ in range(n_dimensions)]
    type_id = cursor.u32(f"the description of {what}")
    offset = cursor.u64(f"the description of {what}")
    quant_type = BY_ID.get(type_id)
    if quant_type is None:
        refuse(
            cursor.label,
            f"{what} has the unknown weight type {type_id}",
            "the file is damaged, or newer than this vkmoe",
        )
    n_bytes = _tensor_bytes(cursor, what, sizes, quant_type)
    if offset % alignment:
        refuse(cursor.label, f"{what} starts at {offset}, not a multiple of {alignment}")
    return TensorInfo(name, quant_type.name, tuple(reversed(sizes)), n_bytes, part, offset)


def _tensor_bytes(cursor: Cursor, what: str, sizes: list[int], quant_type: QuantType) -> int:
    if 0 in sizes:
        refuse(cursor.label, f"{what} has a dimension of size 0: {sizes}")
    if sizes[0] % quant_type.block_weights:
        refuse(
            cursor.label,
            f"{what} has rows of {sizes[0]} weights, but {quant_type.name} stores blocks of "
            f"{quant_type.block_weights}",
        )
    return math.prod(sizes) // quant_type.block_weights * quant_type.block_bytes


def _placed(tensors: list[TensorInfo], data_start: int, cursor: Cursor) -> list[TensorInfo]:
    """The tensors with offsets into the file, once they are known to lie in it one by one."""
    seen: set[str] = set()
    placed: list[TensorInfo] = []
    for tensor in tensors:
        if tensor.name in seen:
            refuse(cursor.label, f"tensor {shown(tensor.name)} comes twice")
        seen.add(tensor.name)
        offset = data_start + tensor.offset
        if offset + tensor.n_bytes > cursor.end:
            refuse(
                cursor.label,
                f"tensor {shown(tensor.name)} {tensor.shape} needs {tensor.n_bytes} bytes at byte "
                f"{offset}, but the file ends at {cursor.end}",
                DAMAGED_HINT,
            )
        placed.append(tensor._replace(offset=offset))
    _check_overlap(sorted(placed, key=lambda tensor: tensor.offset), cursor)
    return placed


def _check_overlap(by_offset: list[TensorInfo], cursor: Cursor) -> None:
    """No two tensors share bytes, so that all of them together are no larger than the file."""
    for first, second in pairwise(by_offset):
        if second.offset < first.offset + first.n_bytes:
            refuse(cursor.label, f"tensors {shown(first.name)} and {shown(second.name)} overlap")
