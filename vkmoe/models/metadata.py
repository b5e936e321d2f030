"""Typed reading of the metadata below an architecture's prefix, with every key accounted for."""

from __future__ import annotations

from typing import NoReturn

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import RopeSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.gguf_file.cursor import shown

__all__ = ["Metadata"]

# Keys that say nothing the forward pass needs.
HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned", "pooling_type", "tokens_per_second"})
MAX_SIZE = 1 << 24  # no dimension of any real model comes near; absurd files do
MAX_NUMBER = 1e30  # kernels take f32


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
            self._refuse(key, value, f"must be between 1 and {largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        self._read.add(key)
        if default is None:
            value = self.file.require(self.prefix + key, float)
        else:
            value = self.file.get(self.prefix + key, float, default)
        if abs(value) > MAX_NUMBER:
            self._refuse(key, value, f"must be at most {MAX_NUMBER:g}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            self._refuse(key, value, "must be positive")
        return value

    def flag(self, key: str, default: bool) -> bool:
        self._read.add(key)
        return self.file.get(self.prefix + key, bool, default)

    def text(self, key: str, default: str) -> str:
        self._read.add(key)
        return self.file.get(self.prefix + key, str, default)

    def rope(self, head_dim: int) -> RopeSpec:
        """The rotary embedding, neox style, with linear or yarn scaling."""
        dim = self.size("rope.dimension_count", head_dim, largest=head_dim)
        if dim % 2:
            self._refuse("rope.dimension_count", dim, "must be even")
        scaling = self.text("rope.scaling.type", "none")
        factor = self.positive("rope.scaling.factor", 1.0)
        original = self._int("rope.scaling.original_context_length", 0)
        attention = self.number("rope.scaling.attn_factor", 0.0)
        fast = self.positive("rope.scaling.yarn_beta_fast", 32.0)
        slow = self.positive("rope.scaling.yarn_beta_slow", 1.0)
        base = self.positive("rope.freq_base", 10000.0)
        if scaling == "yarn" and original < 1:
            self._refuse("rope.scaling.original_context_length", original, "yarn needs it")
        if scaling == "yarn" and base <= 1:
            self._refuse("rope.freq_base", base, "yarn needs more than 1")
        if scaling == "none":
            return RopeSpec(dim, base)
        if scaling == "linear":
            return RopeSpec(dim, base, scaling="linear", factor=factor)
        if scaling == "yarn":
            return RopeSpec(
                dim,
                base,
                scaling="yarn",
                factor=factor,
                original_context=original,
                attention_factor=attention or None,
                beta_fast=fast,
                beta_slow=slow,
            )
        self._refuse("rope.scaling.type", shown(scaling), "vkmoe knows none, linear and yarn")

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

    def _int(self, key: str, default: int | None) -> int:
        self._read.add(key)
        if default is None:
            return self.file.require(self.prefix + key, int)
        return self.file.get(self.prefix + key, int, default)

    def _refuse(self, key: str, value: object, why: str) -> NoReturn:
        raise ModelFileError(
            f"{self.file.path}: {self.prefix}{key} is {value}: {why}",
            "the file was converted wrongly or is damaged",
        )
