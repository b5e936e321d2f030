"""This module opens a GGUF model: typed access to its metadata, zero-copy access to its tensors.

It owns the mappings of all parts, how the parts of a split model are named, and the checks that
they belong together. Metadata comes from the first part, tensors from all of them.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from vkmoe.closing import Closing
from vkmoe.gguf_file.disk import PositionedFile, map_file
from vkmoe.gguf_file.header import GgufPart, TensorInfo, Value, refuse, shown

Scalar = TypeVar("Scalar", int, float, bool, str)
_WRONG_FILE_HINT = "the file was converted wrongly or is meant for another program"
_KIND_WORDS = {int: "a whole number", float: "a number", bool: "a bool", str: "a string"}


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open the model at `path`, with all its parts if it is split.

    Raises ModelFileError, with one clear line, for any file that is not sound.
    """
    given = Path(path)
    first = GgufPart(map_file(given))
    paths = _part_paths(first)
    if len(paths) == 1:
        return GgufFile(given, [first])
    parts = [GgufPart(map_file(path), index) for index, path in enumerate(paths)]
    for index, part in enumerate(parts):
        stated, number = part.integer("split.count"), part.integer("split.no")
        if (stated, number) != (len(parts), index):
            refuse(
                part.path,
                f"should be part {index + 1} of {len(parts)} but says split.no = {number}, "
                f"split.count = {stated}",
                _PARTS_HINT,
            )
    return GgufFile(given, parts)


class GgufFile(Closing):
    """Reads an open model. Use it in a `with`, or call `close`; views of tensors outlive both."""

    def __init__(self, path: Path, parts: list[GgufPart]) -> None:
        self.path = path
        self.version = parts[0].version
        self.paths = tuple(part.path for part in parts)
        self.metadata: Mapping[str, Value] = parts[0]
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_merged(parts))
        self._parts: list[GgufPart] | None = parts

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
        value = self._required(key)
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or type(value) is not kind:
            self._wrong_kind(key, _KIND_WORDS[kind])
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(f"metadata key {shown(key)} is {value}")
        return value

    def get(self, key: str, kind: type[Scalar], default: Scalar) -> Scalar:
        """Read a key like `require`, but a missing one gives `default`."""
        return self.require(key, kind) if key in self.metadata else default

    def strings(self, key: str) -> list[str]:
        """Read the array of strings under `key`, every one of which must be valid UTF-8."""
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value[:1]):
            self._wrong_kind(key, "an array of strings")
        return value  # type: ignore[return-value]  # arrays are of one kind: the first item tells

    def numbers(self, key: str) -> npt.NDArray[np.generic]:
        """Read the array of numbers or bools under `key`, in the file's own width."""
        value = self._required(key)
        if not isinstance(value, np.ndarray):
            self._wrong_kind(key, "an array of numbers")
        return value

    def refuse(self, message: str) -> NoReturn:
        """Raise ModelFileError about what the metadata says."""
        refuse(self.path, message, _WRONG_FILE_HINT)

    def _required(self, key: str) -> Value:
        if key not in self.metadata:
            self.refuse(f"has no metadata key {shown(key)}")
        return self.metadata[key]

    def _wrong_kind(self, key: str, wanted: str) -> NoReturn:
        found = self._open_parts()[0].describe(key)
        self.refuse(f"metadata key {shown(key)} should be {wanted} but is {found}")

    def _open_parts(self) -> list[GgufPart]:
        assert self._parts is not None, f"{self.path} is closed"
        return self._parts

    def _buffer(self, tensor: TensorInfo) -> mmap.mmap:
        return self._open_parts()[tensor.part].buffer


def _merged(parts: list[GgufPart]) -> dict[str, TensorInfo]:
    """Merge all parts' tensors by name; refuse a name that comes twice or a wrong total."""
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in tensors:
                refuse(part.path, f"tensor {shown(tensor.name)} comes twice")
            tensors[tensor.name] = tensor
    stated = parts[0].integer("split.tensors.count") if len(parts) > 1 else None
    if stated is not None and stated != len(tensors):
        refuse(parts[0].path, f"announces {stated} tensors, its parts hold {len(tensors)}")
    return tensors


# ----- models split over several files: name-00001-of-00003.gguf and so on -----

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PARTS_HINT = "keep all parts in one directory under their original names"


def _part_paths(part: GgufPart) -> list[Path]:
    """List the files of the model that `part`, any one of them, belongs to, first part first.

    Raises ModelFileError if the name and the metadata disagree or a part is missing.
    """
    path, stated = part.path, part.integer("split.count")
    found = _NAME.fullmatch(path.name)
    named = int(found["count"]) if found else 1
    if stated is None and named > 1:
        refuse(path, f"is named as one of {named} parts but has no split.count", _PARTS_HINT)
    if max(stated or 1, 1) != named:
        refuse(path, f"says it is one of {stated} parts, which its name does not", _PARTS_HINT)
    if found is None or named == 1:
        return [path]
    paths = [
        path.with_name(f"{found['stem']}-{number:05d}-of-{named:05d}.gguf")
        for number in range(1, named + 1)
    ]
    for other in paths:
        if not other.exists():
            refuse(path, f"part {other.name} of {named} is missing from {path.parent}", _PARTS_HINT)
    return paths
