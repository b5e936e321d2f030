"""This module opens a GGUF model: typed access to its metadata, zero-copy access to its tensors.

It owns the mappings of all parts, how the parts of a split model are named, and the checks that
they belong together. Metadata comes from the first part, tensors from all of them.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from vkmoe.gguf_file.disk import MappedFile, PositionedFile, map_file
from vkmoe.gguf_file.header import (
    Cursor,
    Entry,
    Header,
    TensorInfo,
    Value,
    describe_value,
    read_header,
    read_value,
    refuse,
    shown,
)

__all__ = ["GgufFile", "open_gguf"]

Scalar = TypeVar("Scalar", int, float, bool, str)
_WRONG_KIND_HINT = "the file was converted wrongly or is meant for another program"
_KIND_WORDS = {int: "a whole number", float: "a number", bool: "a bool", str: "a string"}


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open the model at `path`, with all its parts if it is split.

    Raises ModelFileError, with one clear line, for any file that is not sound.
    """
    given = Path(path)
    first = _Part(map_file(given))
    paths = _part_paths(given, first.integer)
    if len(paths) == 1:
        return GgufFile(given, [first])
    parts = []
    for index, part_path in enumerate(paths):
        part = _Part(map_file(part_path), index)
        _check_part(part_path, index, len(paths), part.integer)
        parts.append(part)
    return GgufFile(given, parts)


class _Part:
    """Holds one mapped file and its header."""

    def __init__(self, mapped: MappedFile, index: int = 0) -> None:
        self.buffer, self.path, self.stamp = mapped
        self.label = str(mapped.path)
        self.header: Header = read_header(self.buffer, self.label, index)

    def value(self, key: str, entry: Entry) -> Value:
        return read_value(Cursor(self.buffer, self.label, entry.at), entry.kind, key)

    def integer(self, key: str) -> int | None:
        """Read the whole number under `key`, or None if there is no such key."""
        entry = self.header.entries.get(key)
        if entry is None:
            return None
        value = self.value(key, entry)
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(self.label, f"{key} is not a whole number", _WRONG_KIND_HINT)
        return value


class _Metadata(Mapping[str, Value]):
    """Shows the metadata as a mapping that parses a value each time it is asked for."""

    def __init__(self, part: _Part) -> None:
        self._part = part

    def __getitem__(self, key: str) -> Value:
        return self._part.value(key, self._part.header.entries[key])

    def __contains__(self, key: object) -> bool:
        return key in self._part.header.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._part.header.entries)

    def __len__(self) -> int:
        return len(self._part.header.entries)


class GgufFile:
    """Reads an open model. Use it in a `with`, or call `close`; views of tensors outlive both."""

    def __init__(self, path: Path, parts: list[_Part]) -> None:
        self.path = path
        self.version = parts[0].header.version
        self.paths = tuple(part.path for part in parts)
        self.metadata: Mapping[str, Value] = _Metadata(parts[0])
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_merged(parts))
        self._parts: list[_Part] | None = parts

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file.  Each mapping is undone when the last view of its tensors is gone."""
        self._parts = None
        self.metadata = MappingProxyType({})

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """View the bytes of tensor `name` in the mapped file: read-only uint8 [n_bytes]."""
        tensor = self.tensors[name]
        return np.frombuffer(self._buffer(tensor), np.uint8, tensor.n_bytes, tensor.offset)

    def drop_pages(self, name: str) -> None:
        """Take the pages wholly inside tensor `name` out of this process's resident memory.

        Views stay valid: a later read brings the bytes back from the page cache or the disk.
        """
        tensor = self.tensors[name]
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._buffer(tensor).madvise(mmap.MADV_DONTNEED, start, end - start)

    def reopen(self) -> tuple[PositionedFile, ...]:
        """Open the parts for reads by position; close each. A tensor is in the one of its `part`.

        Raises ModelFileError, with none left open, if a part is not what was opened here.
        """
        opened: list[PositionedFile] = []
        try:
            for part in self._open_parts():
                opened.append(PositionedFile(part.path, part.stamp))
        except BaseException:
            for file in opened:
                file.close()
            raise
        return tuple(opened)

    def require(self, key: str, kind: type[Scalar]) -> Scalar:
        """Read the value under `key`; raises ModelFileError if it is missing or not of `kind`.

        A float may be stored as a whole number; floats must be finite.
        """
        if key not in self.metadata:
            refuse(str(self.path), f"has no metadata key {shown(key)}", _WRONG_KIND_HINT)
        value = self.metadata[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._wrong_kind(key, _KIND_WORDS[kind])
        if isinstance(value, float) and not math.isfinite(value):
            refuse(str(self.path), f"metadata key {shown(key)} is {value}", _WRONG_KIND_HINT)
        return value

    def get(self, key: str, kind: type[Scalar], default: Scalar) -> Scalar:
        """Read a key like `require`, but a missing one gives `default`."""
        return self.require(key, kind) if key in self.metadata else default

    def strings(self, key: str) -> list[str]:
        """Read the array of strings under `key`, every one of which must be valid UTF-8."""
        value = self._array(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value[:1]):
            self._wrong_kind(key, "an array of strings")
        return value  # type: ignore[return-value]  # arrays are of one kind: the first item tells

    def numbers(self, key: str) -> npt.NDArray[np.generic]:
        """Read the array of numbers or bools under `key`, in the file's own width."""
        value = self._array(key)
        if not isinstance(value, np.ndarray):
            self._wrong_kind(key, "an array of numbers")
        return value

    def describe(self, key: str) -> str:
        """Describe what lies under `key` without parsing arrays: "array of 3 strings"."""
        part = self._open_parts()[0]
        entry = part.header.entries[key]
        return describe_value(Cursor(part.buffer, part.label, entry.at), entry.kind, key)

    def _array(self, key: str) -> Value:
        if key not in self.metadata:
            refuse(str(self.path), f"has no metadata key {shown(key)}", _WRONG_KIND_HINT)
        return self.metadata[key]

    def _wrong_kind(self, key: str, wanted: str) -> NoReturn:
        refuse(
            str(self.path),
            f"metadata key {shown(key)} should be {wanted} but is {self.describe(key)}",
            _WRONG_KIND_HINT,
        )

    def _open_parts(self) -> list[_Part]:
        assert self._parts is not None, f"{self.path} is closed"
        return self._parts

    def _buffer(self, tensor: TensorInfo) -> mmap.mmap:
        return self._open_parts()[tensor.part].buffer


def _merged(parts: list[_Part]) -> dict[str, TensorInfo]:
    """Merge all parts' tensors by name; refuse a name that comes twice or a wrong total."""
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for tensor in part.header.tensors:
            if tensor.name in tensors:
                refuse(part.label, f"tensor {shown(tensor.name)} is also in another part")
            tensors[tensor.name] = tensor
    stated = parts[0].integer("split.tensors.count") if len(parts) > 1 else None
    if stated is not None and stated != len(tensors):
        refuse(parts[0].label, f"announces {stated} tensors, its parts hold {len(tensors)}")
    return tensors


# ----- models split over several files: name-00001-of-00003.gguf and so on -----

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PARTS_HINT = "keep all parts in one directory under their original names"

_Lookup = Callable[[str], int | None]


def _part_paths(path: Path, lookup: _Lookup) -> list[Path]:
    """List the files of the model that `path` belongs to, first part first.

    `lookup` reads an integer from the metadata of `path`.  Any part may be given.
    Raises ModelFileError if the name and the metadata disagree or a part is missing.
    """
    found = _NAME.fullmatch(path.name)
    named = int(found["count"]) if found else 1
    stated = lookup("split.count")
    if stated is None and named > 1:
        refuse(str(path), f"is named as one of {named} parts but has no split.count", _PARTS_HINT)
    if max(stated or 1, 1) != named:
        refuse(str(path), f"says it is one of {stated} parts, which its name does not", _PARTS_HINT)
    if found is None or named == 1:
        return [path]
    names = [f"{found['stem']}-{index:05d}-of-{named:05d}.gguf" for index in range(1, named + 1)]
    for name in names:
        if not (path.parent / name).exists():
            refuse(str(path), f"part {name} of {named} is missing from {path.parent}", _PARTS_HINT)
    return [path.parent / name for name in names]


def _check_part(path: Path, index: int, count: int, lookup: _Lookup) -> None:
    """Refuse `path` unless its metadata says that it is part `index` (from 0) of `count`."""
    stated_count, stated_index = lookup("split.count"), lookup("split.no")
    if stated_count != count or stated_index != index:
        refuse(
            str(path),
            f"should be part {index + 1} of {count} but says split.no = {stated_index}, "
            f"split.count = {stated_count}",
            _PARTS_HINT,
        )
