"""This module reads the header of one GGUF file: where its metadata values and tensors lie.

It owns the header's layout and every check on it, the thirteen kinds of values, and the rule that
nothing is read before its bytes are known to exist. A file that passes has sane, aligned tensors
that lie inside it and do not cut into each other. Scalars become int, float, bool or str, arrays of
numbers NumPy arrays, arrays of strings lists of str, arrays of arrays lists. It does not know about
split files (file.py).
"""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from vkmoe.errors import ModelFileError
from vkmoe.quants.types import BY_ID, QuantType

__all__ = [
    "Cursor",
    "Entry",
    "Header",
    "TensorInfo",
    "Value",
    "describe_value",
    "read_header",
    "read_value",
    "refuse",
    "shown",
]

_Numbers: TypeAlias = npt.NDArray[np.generic]
_ArrayValue: TypeAlias = "_Numbers | list[str] | list[_ArrayValue]"
Value: TypeAlias = "int | float | bool | str | _ArrayValue"

_MAGIC = b"GGUF"
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


class Entry(NamedTuple):
    """Says where one value lies: its kind and the byte it starts at."""

    kind: int
    at: int


class TensorInfo(NamedTuple):
    """Describes a tensor: `shape` is row-major, the last number is the length of a row.

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
        """Count the weights."""
        return math.prod(self.shape)


class Header(NamedTuple):
    """Holds what one file says: its version, its metadata entries and its tensors in file order."""

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
    magic = cursor.buffer[: len(_MAGIC)]
    if magic != _MAGIC:
        start = cursor.buffer[:32].lstrip()
        hints = (hint for mark, hint in _OTHER_FORMATS.items() if start.startswith(mark))
        refuse(
            cursor.label,
            f"is not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}",
            next(hints, "vkmoe reads models in the GGUF format"),
        )
    cursor.skip(len(_MAGIC), "the magic")
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
        _skip_value(cursor, kind, key)
    return entries


def _alignment(cursor: Cursor, entries: dict[str, Entry]) -> int:
    key = "general.alignment"
    if key not in entries:
        return _DEFAULT_ALIGNMENT
    kind, at = entries[key]
    if kind not in _INTEGER_KINDS:
        refuse(cursor.label, f"{key} is a {_kind_name(kind)}, not a whole number")
    value = read_value(Cursor(cursor.buffer, cursor.label, at), kind, key)
    assert isinstance(value, int)
    if value < 1 or value & (value - 1):
        refuse(cursor.label, f"{key} is {value}, not a power of two")
    return value


def _read_tensor(cursor: Cursor, alignment: int, part: int) -> TensorInfo:
    """Read one tensor's description; `offset` is still relative to the start of the data."""
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
    """Give tensors their offsets into the file, once each is known to lie in it."""
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
            )
        placed.append(tensor._replace(offset=offset))
    _check_overlap(sorted(placed, key=lambda tensor: tensor.offset), cursor)
    return placed


def _check_overlap(by_offset: list[TensorInfo], cursor: Cursor) -> None:
    """Refuse tensors that share bytes, so that all together are no larger than the file."""
    for first, second in pairwise(by_offset):
        if second.offset < first.offset + first.n_bytes:
            refuse(cursor.label, f"tensors {shown(first.name)} and {shown(second.name)} overlap")


# ----- metadata values: found while the header is read, parsed when asked for -----

_NAMES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32",
    "bool", "string", "array", "uint64", "int64", "float64",
)  # fmt: skip
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f",
    7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_DTYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ARRAY_HEAD_BYTES = 12
_DEEPEST_ARRAY = 4


def _kind_name(kind: int) -> str:
    """Name a value kind as the format does."""
    return _NAMES[kind] if 0 <= kind < len(_NAMES) else f"kind {kind}"


def _skip_value(cursor: Cursor, kind: int, key: str, depth: int = 0) -> None:
    """Move past a value, refusing one that is cut off, unknown or nested too deeply."""
    if kind == _STRING:
        what = f"the value of {shown(key)}"
        cursor.skip(cursor.u64(f"the length of {what}"), what)
    elif kind == _ARRAY:
        _skip_array(cursor, key, depth)
    elif kind in _SCALARS:
        cursor.skip(struct.calcsize(_SCALARS[kind]), f"the value of {shown(key)}")
    else:
        refuse(cursor.label, f"key {shown(key)} has the unknown value kind {kind}")


def describe_value(cursor: Cursor, kind: int, key: str) -> str:
    """Describe the value at the cursor in a few words: "uint32 7", "array of 3 strings"."""
    if kind == _ARRAY:
        kind, count = _read_array_head(cursor, key)
        return f"array of {count} {_kind_name(kind)}s"
    if kind == _STRING:
        return f"string of {cursor.u64(shown(key))} bytes"
    return f"{_kind_name(kind)} {read_value(cursor, kind, key)}"


def _skip_array(cursor: Cursor, key: str, depth: int) -> None:
    if depth >= _DEEPEST_ARRAY:
        refuse(cursor.label, f"key {shown(key)} nests arrays more than {_DEEPEST_ARRAY} deep")
    kind, count = _read_array_head(cursor, key)
    what = f"the array {shown(key)} of {count} values"
    if kind == _STRING:
        cursor.skip_texts(count, what)
    elif kind == _ARRAY:
        cursor.need(count * _ARRAY_HEAD_BYTES, what)
        for _ in range(count):
            _skip_array(cursor, key, depth + 1)
    else:
        cursor.skip(count * np.dtype(_DTYPES[kind]).itemsize, what)


def _read_array_head(cursor: Cursor, key: str) -> tuple[int, int]:
    """Read the kind and the number of an array's values."""
    kind = cursor.u32(f"the array {shown(key)}")
    if kind not in _DTYPES and kind not in (_STRING, _ARRAY):
        refuse(cursor.label, f"the array {shown(key)} holds the unknown value kind {kind}")
    return kind, cursor.u64(f"the array {shown(key)}")


def read_value(cursor: Cursor, kind: int, key: str) -> Value:
    """Parse the value at the cursor, which `skip_value` has passed over before."""
    what = f"the value of {shown(key)}"
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    raw = cursor.take(struct.calcsize(_SCALARS[kind]), what)
    value: int | float = struct.unpack(_SCALARS[kind], raw)[0]
    if kind != _BOOL:
        return value
    if value not in (0, 1):
        refuse(cursor.label, f"{what} is a bool but holds {value}")
    return bool(value)


def _read_array(cursor: Cursor, key: str) -> _ArrayValue:
    kind, count = _read_array_head(cursor, key)
    what = f"the array {shown(key)} of {count} values"
    if kind == _STRING:
        return cursor.texts(count, what)
    if kind == _ARRAY:
        cursor.need(count * _ARRAY_HEAD_BYTES, what)
        return [_read_array(cursor, key) for _ in range(count)]
    dtype = np.dtype(_DTYPES[kind])
    numbers = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if kind != _BOOL:
        return numbers
    if count and numbers.max() > 1:
        refuse(cursor.label, f"{what} is of bools but holds {numbers.max()}")
    return numbers.astype(np.bool_)


# ----- bounds: nothing is read, and no memory asked for, before the bytes are known to exist -----

_DAMAGED_HINT = (
    "the file is damaged or incomplete: compare its size with the source, or load it again"
)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SHOWN_CHARACTERS = 80


def shown(text: str) -> str:
    """Make `text` from a file fit for a one-line message: quoted, escaped, shortened."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return ascii(cut)


def refuse(label: str, message: str, hint: str = _DAMAGED_HINT) -> NoReturn:
    """Raise ModelFileError about the file called `label`."""
    raise ModelFileError(f"{label}: {message}", hint)


class Cursor:
    """Reads little-endian values one after the other from `buffer`, from byte `at` on."""

    __slots__ = ("at", "buffer", "end", "label")

    def __init__(self, buffer: mmap.mmap, label: str, at: int = 0) -> None:
        self.buffer = buffer
        self.end = len(buffer)
        self.label = label
        self.at = at

    def need(self, n_bytes: int, what: str) -> None:
        """Refuse the file unless `n_bytes` more bytes are there."""
        if n_bytes > self.end - self.at:
            refuse(
                self.label,
                f"{what} needs {n_bytes} bytes at byte {self.at}, but the file ends at {self.end}",
            )

    def skip(self, n_bytes: int, what: str) -> None:
        """Move past `n_bytes` bytes that must exist."""
        self.need(n_bytes, what)
        self.at += n_bytes

    def take(self, n_bytes: int, what: str) -> bytes:
        """Read the next `n_bytes` bytes."""
        start = self.at
        self.skip(n_bytes, what)
        return self.buffer[start : self.at]

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        start = self.at
        self.skip(4, what)
        return int(_U32.unpack_from(self.buffer, start)[0])

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        start = self.at
        self.skip(8, what)
        return int(_U64.unpack_from(self.buffer, start)[0])

    def text(self, what: str, longest: int | None = None) -> str:
        """Read a string: 64-bit length, then UTF-8 bytes, which must be valid."""
        n_bytes = self.u64(f"the length of {what}")
        if longest is not None and n_bytes > longest:
            refuse(self.label, f"{what} is {n_bytes} bytes long, the format allows {longest}")
        raw = self.take(n_bytes, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            refuse(self.label, f"{what} is not valid UTF-8 ({error.reason} at byte {error.start})")

    def skip_texts(self, count: int, what: str) -> None:
        """Move past `count` strings; the loop behind every vocabulary, so it is kept bare."""
        self.need(8 * count, what)
        buffer, at, last = self.buffer, self.at, self.end - 8
        unpack = _U64.unpack_from
        for _ in range(count):
            if at > last:
                self.at = min(at, self.end)
                self.need(8, what)
            at += 8 + unpack(buffer, at)[0]
        self.at = min(at, self.end)
        self.need(at - self.at, what)

    def texts(self, count: int, what: str) -> list[str]:
        """Read `count` strings that `skip_texts` has already found to lie inside the file."""
        self.need(8 * count, what)
        buffer, at = self.buffer, self.at
        unpack = _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(buffer, at)[0]
                found.append(buffer[start:at].decode("utf-8"))
        except UnicodeDecodeError as error:
            refuse(
                self.label,
                f"string {len(found)} of {what} is not valid UTF-8 ({error.reason})",
            )
        self.at = at
        return found
