"""This module reads the header of one GGUF file: where its metadata values and tensors lie.

It owns the header's layout and every check on it, the thirteen kinds of values, and the rule that
nothing is read before its bytes are known to exist. A file that passes has sane, aligned tensors
that lie inside it and do not cut into each other. It does not know about split files (file.py).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from vkmoe.errors import ModelFileError
from vkmoe.gguf_file.disk import MappedFile
from vkmoe.quants.types import BY_ID, FORMER, QuantType

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
_OTHER_FORMATS = {
    (b"version https://git-lfs",): "this is a Git LFS pointer, not the file: run `git lfs pull`",
    (b"<",): "this looks like a web page: the download went wrong",
    (b"PK\x03\x04",): "this is a zip or PyTorch file: convert the model to GGUF first",
    (b"lmgg", b"tjgg", b"fmgg"): "this is an old GGML file: convert the model to GGUF",
}


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
        return math.prod(self.shape)


class GgufPart(Mapping[str, Value]):
    """Shows the metadata of one mapped file; a value is parsed each time it is asked for.

    Scalars are int, float, bool or str; arrays are NumPy arrays of numbers, lists of str, or lists
    of arrays. `tensors` are in file order. Raises ModelFileError for anything that is not a sound
    little-endian GGUF of version 2 or 3.
    """

    def __init__(self, mapped: MappedFile, index: int = 0, n_bytes: int | None = None) -> None:
        """Read and check the header of file `index` of a model.

        Of a file of `n_bytes` the mapping may have no more than its header.
        """
        self.buffer, self.path, self.stamp = mapped
        cursor = self._cursor(0)
        self.version = _read_version(cursor)
        n_tensors = cursor.u64("the number of tensors")
        n_pairs = cursor.u64("the number of metadata keys")
        _check_count(cursor, n_pairs, _SMALLEST_PAIR_BYTES, "metadata keys")
        _check_count(cursor, n_tensors, _SMALLEST_TENSOR_BYTES, "tensors")
        self._places = _read_places(cursor, n_pairs)
        alignment = self._alignment()
        tensors = [_read_tensor(cursor, alignment, index) for _ in range(n_tensors)]
        data_start = -(-cursor.at // alignment) * alignment
        self.tensors = _placed(tensors, data_start, cursor.label, n_bytes or cursor.end)

    def __getitem__(self, key: str) -> Value:
        kind, at = self._places[key]
        return _read_value(self._cursor(at), kind, key)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def describe(self, key: str) -> str:
        """Describe a value without parsing arrays: "uint32 7", "array of 3 strings"."""
        kind, at = self._places[key]
        if kind == _ARRAY:
            kind, count, _ = _read_array_head(self._cursor(at), key)
            return f"array of {count} {_KINDS[kind]}s"
        if kind == _STRING:
            return f"string of {self._cursor(at).u64(key)} bytes"
        return f"{_KINDS[kind]} {self[key]}"

    def integer(self, key: str) -> int | None:
        """Read the whole number under `key`, or None if there is no such key."""
        value = self.get(key)
        if value is not None and type(value) is not int:
            refuse(self.path, f"{key} is a {self.describe(key)}, not a whole number")
        return value

    def _cursor(self, at: int) -> _Cursor:
        return _Cursor(self.buffer, str(self.path), at)

    def _alignment(self) -> int:
        value = self.integer("general.alignment")
        if value is None:
            return _DEFAULT_ALIGNMENT
        if value < 1 or value & (value - 1):
            refuse(self.path, f"general.alignment is {value}, not a power of two")
        return value


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.buffer[: len(_MAGIC)]
    if magic != _MAGIC:
        start = cursor.buffer[:32].lstrip()
        hints = (hint for marks, hint in _OTHER_FORMATS.items() if start.startswith(marks))
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


def _check_count(cursor: _Cursor, count: int, smallest_bytes: int, what: str) -> None:
    if count * smallest_bytes > cursor.end - cursor.at:
        refuse(cursor.label, f"claims {count} {what}, more than its {cursor.end} bytes can hold")


def _read_places(cursor: _Cursor, n_pairs: int) -> dict[str, tuple[int, int]]:
    """Find the kind of each value and the byte that it begins at."""
    places: dict[str, tuple[int, int]] = {}
    for index in range(n_pairs):
        key = cursor.text(f"metadata key {index}", _LONGEST_NAME)
        if not key or key in places:
            fault = "comes twice" if key else "is empty"
            refuse(cursor.label, f"metadata key {shown(key)} {fault}")
        kind = _read_kind(cursor, key)
        places[key] = kind, cursor.at
        _skip_value(cursor, kind, key)
    return places


def _read_tensor(cursor: _Cursor, alignment: int, part: int) -> TensorInfo:
    """Read one tensor's description; `offset` is still relative to the start of the data."""
    name = cursor.text("a tensor's name", _LONGEST_NAME)
    if not name:
        refuse(cursor.label, "a tensor has no name")
    what = f"tensor {shown(name)}"
    n_dimensions = cursor.u32(f"the description of {what}")
    if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
        refuse(cursor.label, f"{what} has {n_dimensions} dimensions (1 to 4 are possible)")
    sizes = [cursor.u64(f"the description of {what}") for _ in range(n_dimensions)]
    type_id = cursor.u32(f"the description of {what}")
    offset = cursor.u64(f"the description of {what}")
    quant_type = BY_ID.get(type_id)
    if quant_type is None:
        _refuse_type(cursor.label, what, type_id)
    n_bytes = _tensor_bytes(cursor, what, sizes, quant_type)
    if offset % alignment:
        refuse(cursor.label, f"{what} starts at {offset}, not a multiple of {alignment}")
    return TensorInfo(name, quant_type.name, tuple(reversed(sizes)), n_bytes, part, offset)


def _refuse_type(label: str, what: str, type_id: int) -> NoReturn:
    if type_id not in FORMER:
        hint = "the file is damaged, or newer than this vkmoe"
        refuse(label, f"{what} has the unknown weight type {type_id}", hint)
    name, instead = FORMER[type_id]
    hint = f"get the model in {instead}, which holds the same weights"
    refuse(label, f"{what} has the weight type {name} ({type_id}), which is no longer in use", hint)


def _tensor_bytes(cursor: _Cursor, what: str, sizes: list[int], quant_type: QuantType) -> int:
    if 0 in sizes:
        refuse(cursor.label, f"{what} has a dimension of size 0: {sizes}")
    if sizes[0] % quant_type.block_weights:
        refuse(
            cursor.label,
            f"{what} has rows of {sizes[0]} weights, but {quant_type.name} stores blocks of "
            f"{quant_type.block_weights}",
        )
    return math.prod(sizes) // quant_type.block_weights * quant_type.block_bytes


def _placed(
    tensors: list[TensorInfo], data_start: int, label: str, n_bytes: int
) -> list[TensorInfo]:
    """Give tensors their offsets into the file of `n_bytes`.

    Refuses those that end outside it or share bytes: all together are no larger than the file.
    """
    placed = [tensor._replace(offset=data_start + tensor.offset) for tensor in tensors]
    for tensor in placed:
        if tensor.offset + tensor.n_bytes > n_bytes:
            refuse(
                label,
                f"tensor {shown(tensor.name)} {tensor.shape} needs {tensor.n_bytes} bytes at byte "
                f"{tensor.offset}, but the file ends at {n_bytes}",
            )
    for first, second in pairwise(sorted(placed, key=lambda tensor: tensor.offset)):
        if second.offset < first.offset + first.n_bytes:
            refuse(label, f"tensors {shown(first.name)} and {shown(second.name)} overlap")
    return placed


# ----- metadata values: found while the header is read, parsed when asked for -----

_KINDS = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32",
    "bool", "string", "array", "uint64", "int64", "float64",
)  # fmt: skip
_STRING, _ARRAY = _KINDS.index("string"), _KINDS.index("array")
_DTYPES = {
    kind: np.dtype(name).newbyteorder("<")
    for kind, name in enumerate(_KINDS)
    if kind not in (_STRING, _ARRAY)
}
_ARRAY_HEAD_BYTES = 12
_DEEPEST_ARRAY = 4


def _read_kind(cursor: _Cursor, key: str) -> int:
    kind = cursor.u32(f"the kind of {shown(key)}")
    if kind >= len(_KINDS):
        refuse(cursor.label, f"key {shown(key)} has the unknown value kind {kind}")
    return kind


def _read_array_head(cursor: _Cursor, key: str) -> tuple[int, int, str]:
    """Read the kind and the number of an array's values; the third is the array in words."""
    kind = _read_kind(cursor, key)
    count = cursor.u64(f"the array {shown(key)}")
    return kind, count, f"the array {shown(key)} of {count} values"


def _skip_value(cursor: _Cursor, kind: int, key: str) -> None:
    """Move past a value, refusing one that is cut off or nested too deeply."""
    what = f"the value of {shown(key)}"
    if kind == _ARRAY:
        _skip_array(cursor, key)
    elif kind == _STRING:
        cursor.skip(cursor.u64(f"the length of {what}"), what)
    else:
        cursor.skip(_DTYPES[kind].itemsize, what)


def _skip_array(cursor: _Cursor, key: str, depth: int = 1) -> None:
    if depth > _DEEPEST_ARRAY:
        refuse(cursor.label, f"key {shown(key)} nests arrays more than {_DEEPEST_ARRAY} deep")
    kind, count, what = _read_array_head(cursor, key)
    if kind == _ARRAY:
        cursor.need(count * _ARRAY_HEAD_BYTES, what)
        for _ in range(count):
            _skip_array(cursor, key, depth + 1)
    elif kind == _STRING:
        cursor.skip_texts(count, what)
    else:
        cursor.skip(count * _DTYPES[kind].itemsize, what)


def _read_value(cursor: _Cursor, kind: int, key: str) -> Value:
    """Parse the value at the cursor, which `_skip_value` has passed over before."""
    what = f"the value of {shown(key)}"
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind == _STRING:
        return cursor.text(what)
    value: int | float | bool = _read_numbers(cursor, kind, 1, what)[0].item()
    return value


def _read_array(cursor: _Cursor, key: str) -> _ArrayValue:
    kind, count, what = _read_array_head(cursor, key)
    if kind == _ARRAY:
        return [_read_array(cursor, key) for _ in range(count)]
    if kind == _STRING:
        return cursor.texts(count, what)
    return _read_numbers(cursor, kind, count, what)


def _read_numbers(cursor: _Cursor, kind: int, count: int, what: str) -> _Numbers:
    dtype = _DTYPES[kind]
    raw = cursor.take(count * dtype.itemsize, what)
    if dtype == np.bool_ and raw and max(raw) > 1:
        refuse(cursor.label, f"{what} is of bools but holds {max(raw)}")
    return np.frombuffer(raw, dtype)


# ----- bounds: nothing is read, and no memory asked for, before the bytes are known to exist -----

_DAMAGED_HINT = (
    "the file is damaged or incomplete: compare its size with the source, or load it again"
)
_U64 = struct.Struct("<Q")
_SHOWN_CHARACTERS = 80


def shown(text: str) -> str:
    """Make `text` from a file fit for a one-line message: quoted, escaped, shortened."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return ascii(cut)


def refuse(label: str | Path, message: str, hint: str = _DAMAGED_HINT) -> NoReturn:
    """Raise ModelFileError about the file called `label`."""
    raise ModelFileError(f"{label}: {message}", hint)


class _Cursor:
    """Reads little-endian values one after the other from `buffer`, from byte `at` on."""

    def __init__(self, buffer: mmap.mmap, label: str, at: int) -> None:
        self.buffer, self.label, self.at = buffer, label, at
        self.end = len(buffer)

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
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

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
        buffer, at, last, unpack = self.buffer, self.at, self.end - 8, _U64.unpack_from
        for _ in range(count):
            if at > last:  # the length of this one is cut off
                at += 8
                break
            at += 8 + unpack(buffer, at)[0]
        self.skip(at - self.at, what)

    def texts(self, count: int, what: str) -> list[str]:
        """Read `count` strings that `skip_texts` has already found to lie inside the file."""
        buffer, at, unpack = self.buffer, self.at, _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(buffer, at)[0]
                found.append(buffer[start:at].decode("utf-8"))
        except UnicodeDecodeError as error:
            refuse(self.label, f"string {len(found)} of {what} is not valid UTF-8 ({error.reason})")
        self.at = at
        return found
