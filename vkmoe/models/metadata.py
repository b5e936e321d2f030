"""Reads the metadata below an architecture's prefix: types are checked, every key accounted for.

Does not know what the keys mean: that is the subject of arch/ and rope.py.
"""

from __future__ import annotations

from typing import NoReturn

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.gguf_file import GgufFile
from vkmoe.gguf_file.header import shown

__all__ = ["MAX_SIZE", "WRONG_FILE", "Metadata"]

# Keys that say nothing the forward pass needs.
HARMLESS = frozenset(
    {
        "vocab_size",
        "rope.scaling.finetuned",
        "pooling_type",
        "tokens_per_second",
        "tensor_data_layout",
    }
)
MAX_SIZE = 1 << 24  # no dimension of any real model comes near; absurd files do
MAX_NUMBER = 1e30  # kernels take f32
WRONG_FILE = "the file was converted wrongly or is damaged"  # the hint with what cannot be


class Metadata:
    """The keys `<architecture>.*` of a file. Call `finish()` when all that are known were read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = file.require("general.architecture", str) + "."
        self._read: set[str] = set()

    @property
    def name(self) -> str:
        """The model's name, fit for a one-line message."""
        text = self.file.get("general.name", str, self.file.path.stem)[:80]
        return "".join(char if char.isprintable() else " " for char in text)

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def size(self, key: str, default: int | None = None, largest: int = MAX_SIZE) -> int:
        """A dimension or count: between 1 and `largest`."""
        value = self._int(key, default)
        if not 1 <= value <= largest:
            self.refuse(key, value, f"must be between 1 and {largest}")
        return value

    def count(self, key: str, largest: int) -> int:
        """A number of things of which there may be none; a missing key says there are none."""
        value = self._int(key, 0)
        if not 0 <= value <= largest:
            self.refuse(key, value, f"must be at most {largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        self._read.add(key)
        if default is None:
            value = self.file.require(self.prefix + key, float)
        else:
            value = self.file.get(self.prefix + key, float, default)
        if abs(value) > MAX_NUMBER:
            self.refuse(key, value, f"must be at most {MAX_NUMBER:g}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            self.refuse(key, value, "must be positive")
        return value

    def not_negative(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value < 0:
            self.refuse(key, value, "must not be negative")
        return value

    def flag(self, key: str, default: bool) -> bool:
        self._read.add(key)
        return self.file.get(self.prefix + key, bool, default)

    def text(self, key: str, default: str) -> str:
        self._read.add(key)
        return self.file.get(self.prefix + key, str, default)

    def finish(self) -> None:
        """Refuse keys that were not read: each might change what the model computes."""
        present = {
            key.removeprefix(self.prefix)
            for key in self.file.metadata
            if key.startswith(self.prefix)
        }
        unknown = sorted(present - self._read - HARMLESS)
        if unknown:
            names = ", ".join(shown(self.prefix + key) for key in unknown)
            raise UnsupportedModelError(
                f"{self.file.path}: unknown metadata {names}",
                "the model may need something this version of vkmoe does not do; update vkmoe",
            )

    def refuse(self, key: str, value: object, why: str) -> NoReturn:
        """Raise ModelFileError for a value that cannot be."""
        raise ModelFileError(
            f"{self.file.path}: {self.prefix}{key} is {value}: {why}",
            WRONG_FILE,
        )

    def _int(self, key: str, default: int | None) -> int:
        self._read.add(key)
        if default is None:
            return self.file.require(self.prefix + key, int)
        return self.file.get(self.prefix + key, int, default)
