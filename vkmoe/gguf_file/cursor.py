"""A bounds-checked position in a mapped file.

Owns the rule that nothing is read, and no memory is asked for, before the bytes are known to exist.
Does not know what the bytes are for: callers say it, so that an error can.
"""

from __future__ import annotations

import mmap
import struct
from typing import NoReturn

from vkmoe.errors import ModelFileError

__all__ = ["Cursor", "refuse", "shown"]

DAMAGED_HINT = (
    "the file is damaged or incomplete: compare its size with the source, or load it again"
)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SHOWN_CHARACTERS = 80


def shown(text: str) -> str:
    """`text` from a file made fit for a one-line message: quoted, escaped, shortened."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return ascii(cut)


def refuse(label: str, message: str, hint: str = DAMAGED_HINT) -> NoReturn:
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
        """The next `n_bytes` bytes."""
        start = self.at
        self.skip(n_bytes, what)
        return self.buffer[start : self.at]

    def u32(self, what: str) -> int:
        """An unsigned 32-bit integer."""
        start = self.at
        self.skip(4, what)
        return int(_U32.unpack_from(self.buffer, start)[0])

    def u64(self, what: str) -> int:
        """An unsigned 64-bit integer."""
        start = self.at
        self.skip(8, what)
        return int(_U64.unpack_from(self.buffer, start)[0])

    def text(self, what: str, longest: int | None = None) -> str:
        """A string: 64-bit length, then UTF-8 bytes, which must be valid."""
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
        """`count` strings that `skip_texts` has already found to lie inside the file."""
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
