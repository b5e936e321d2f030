"""GGUF files made byte by byte, so that a test can make any part of one wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from vkmoe.errors import ModelFileError
from vkmoe.gguf_file import GgufFile, open_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
TYPE_F32, TYPE_Q4_K = 0, 12


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(
    name: str | bytes = "a",
    sizes: Sequence[int] = (8,),
    type_id: int = TYPE_F32,
    offset: int = 0,
    n_dimensions: int | None = None,
) -> bytes:
    head = struct.pack("<I", len(sizes) if n_dimensions is None else n_dimensions)
    return text(name) + head + struct.pack(f"<{len(sizes)}QIQ", *sizes, type_id, offset)


def file_bytes(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these pieces; the counts are right unless they are given."""
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def opened(tmp_path: Path, raw: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return open_gguf(path)


def refused(tmp_path: Path, raw: bytes, match: str) -> ModelFileError:
    """The error of opening a file of these bytes: one line that names the file and matches."""
    with pytest.raises(ModelFileError, match=match) as caught:
        opened(tmp_path, raw)
    message = str(caught.value)
    assert "model.gguf" in message and "\n" not in message and len(message) < 400
    assert caught.value.hint
    return caught.value
