"""Metadata values: thirteen kinds, found while the header is read, parsed when asked for.

Owns the encoding of values.  Scalars become int, float, bool or str; arrays of numbers become NumPy
arrays, arrays of strings lists of str, arrays of arrays lists.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vkmoe.gguf_file.cursor import Cursor, refuse, shown

__all__ = [
    "ArrayValue",
    "Entry",
    "Value",
    "describe_value",
    "kind_name",
    "read_value",
    "skip_value",
]

Numbers: TypeAlias = npt.NDArray[np.generic]
ArrayValue: TypeAlias = "Numbers | list[str] | list[ArrayValue]"
Value: TypeAlias = "int | float | bool | str | ArrayValue"

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


class Entry(NamedTuple):
    """Where one value lies: its kind and the byte it starts at."""

    kind: int
    at: int


def kind_name(kind: int) -> str:
    """The format's name of a value kind."""
    return _NAMES[kind] if 0 <= kind < len(_NAMES) else f"kind {kind}"


def skip_value(cursor: Cursor, kind: int, key: str, depth: int = 0) -> None:
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
    """What the value at the cursor is, in a few words: "uint32 7", "array of 3 strings"."""
    if kind == _ARRAY:
        kind, count = _read_array_head(cursor, key)
        return f"array of {count} {kind_name(kind)}s"
    if kind == _STRING:
        return f"string of {cursor.u64(shown(key))} bytes"
    return f"{kind_name(kind)} {read_value(cursor, kind, key)}"


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
    """The kind and the number of an array's values."""
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


def _read_array(cursor: Cursor, key: str) -> ArrayValue:
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
