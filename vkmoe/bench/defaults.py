"""This module says how much `vkmoe bench` measures where nothing is asked, once for all.

The options' help reads it at every start of the command line, so it imports nothing heavy.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Default(NamedTuple, Generic[T]):
    """Holds what is measured by default, in a quick run, and on a GPU where that differs."""

    usual: T
    quick: T
    on_gpu: T | None = None

    def chosen(self, asked: T | None, quick: bool, is_cpu: bool = True) -> T:
        """Return what was asked, which always counts, or the default."""
        if asked is not None:
            return asked
        if quick:
            return self.quick
        return self.usual if is_cpu or self.on_gpu is None else self.on_gpu

    def __str__(self) -> str:
        """Write it for a help text."""
        on_gpu = "" if self.on_gpu is None else f"; on a GPU {_words(self.on_gpu)}"
        return f"Default: {_words(self.usual)}{on_gpu}; with --quick {_words(self.quick)}."


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" for item in value)
    return "no limit" if value == float("inf") else f"{value:g}"


Sizes = tuple[float, ...]

MODEL = "qwen3-30b-a3b"
REPEATS = Default(10, 5)
TOKENS = Default(32, 8)  # of a repeat
SUBMITS = Default(1000, 200)
DISPATCHES = Default(1000, 200)
LARGEST_MIB = Default(256.0, 16.0, float("inf"))  # larger ones take CPU cores many seconds
COPY_MIB: Default[Sizes] = Default((0.25, 1, 3, 8, 64), (0.25, 1, 3, 8))
READ_MIB: Default[Sizes] = Default((8,), (2,), (9, 256))  # a GPU's: eight experts' gates or more
