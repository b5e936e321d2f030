"""Reads the metadata below an architecture's prefix: types are checked, every key accounted for.

Does not know what the keys mean: that is the subject of arch/ and rope.py.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.gguf_file import GgufFile
from vkmoe.gguf_file.file import Scalar
from vkmoe.gguf_file.header import shown

# Keys that say nothing the forward pass needs.
HARMLESS = {
    "vocab_size",
    "rope.scaling.finetuned",
    "pooling_type",
    "tokens_per_second",
    "tensor_data_layout",
}
MAX_SIZE = 1 << 24  # no dimension of any real model comes near; absurd files do
MAX_NUMBER = 1e30  # kernels take f32
WRONG_FILE = "the file was converted wrongly or is damaged"  # the hint with what cannot be


class Metadata:
    """Reads the keys `<architecture>.*` of a file. Call `finish()` when all known were read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = file.require("general.architecture", str) + "."
        self._read: set[str] = set()

    @property
    def name(self) -> str:
        """Return the model's name, fit for a one-line message."""
        text = self.file.get("general.name", str, self.file.path.stem)[:80]
        return "".join(char if char.isprintable() else " " for char in text)

    @property
    def n_layers(self) -> int:
        """Read the number of layers, those that guess tokens ahead included."""
        return self.size("block_count", largest=4096)

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def ignore(self, *keys: str) -> None:
        """Count keys that change nothing of an architecture as read."""
        self._read.update(keys)

    def value(self, key: str, kind: type[Scalar], default: Scalar | None) -> Scalar:
        """Read a value; without a default the key must be there."""
        self._read.add(key)
        if default is None:
            return self.file.require(self.prefix + key, kind)
        return self.file.get(self.prefix + key, kind, default)

    def size(self, key: str, default: int | None = None, largest: int = MAX_SIZE) -> int:
        """Read a dimension or count: between 1 and `largest`."""
        value = self.value(key, int, default)
        if not 1 <= value <= largest:
            self.refuse(key, value, f"must be between 1 and {largest}")
        return value

    def per_layer(
        self, key: str, default: int | None = None, largest: int = MAX_SIZE
    ) -> tuple[int, ...]:
        """Read a size of each layer; a file has one for all, or an array with one for each.

        Raises ModelFileError, also for an array of another length.
        """
        values = self._array(key)
        if values is None:
            return (self.size(key, default, largest),) * self.n_layers
        if values.dtype.kind not in "iu":
            self.refuse(key, "an array", "must hold whole numbers")
        for value in values:
            if not 1 <= value <= largest:
                self.refuse(key, f"an array with {value}", f"must be between 1 and {largest}")
        return tuple(int(value) for value in values)

    def pattern(self, key: str, period: int) -> tuple[bool, ...]:
        """Read which layers are of the first of two kinds; a file has a bool for each, or a period.

        With period n, which is `period` where a file is silent, every n-th layer is of the other.
        """
        values = self._array(key)
        if values is None:
            period = self.size(key, period)
            return tuple(layer % period < period - 1 for layer in range(self.n_layers))
        if values.dtype.kind not in "b":
            self.refuse(key, "an array", "must hold true or false")
        return tuple(bool(value) for value in values)

    def count(self, key: str, largest: int) -> int:
        """Read a number of things, which may be none; a missing key says there are none."""
        value = self.value(key, int, 0)
        if not 0 <= value <= largest:
            self.refuse(key, value, f"must be at most {largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, float, default)
        if abs(value) > MAX_NUMBER:
            self.refuse(key, value, f"must be at most {MAX_NUMBER:g}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            self.refuse(key, value, "must be positive")
        return value

    def not_negative(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value < 0:
            self.refuse(key, value, "must not be negative")
        return value

    def finish(self) -> None:
        """Refuse keys that were not read: each might change what the model computes."""
        known = {self.prefix + key for key in self._read | HARMLESS}
        present = {key for key in self.file.metadata if key.startswith(self.prefix)}
        if unknown := sorted(present - known):
            names = ", ".join(shown(key) for key in unknown)
            raise UnsupportedModelError(
                f"{self.file.path}: unknown metadata {names}",
                "the model may need something this version of vkmoe does not do; update vkmoe",
            )

    def refuse(self, key: str, value: object, why: str) -> NoReturn:
        """Raise ModelFileError for a value that cannot be."""
        message = f"{self.file.path}: {self.prefix}{key} is {value}: {why}"
        raise ModelFileError(message, WRONG_FILE)

    def _array(self, key: str) -> NDArray[np.generic] | None:
        """Read an array with a value for each layer; None where the file has no array."""
        if not isinstance(self.file.metadata.get(self.prefix + key), (np.ndarray, list)):
            return None
        self._read.add(key)
        values = self.file.numbers(self.prefix + key)
        if len(values) != self.n_layers:
            self.refuse(key, f"an array of {len(values)}", f"the model has {self.n_layers} layers")
        return values
