"""This module has one base for all that holds device memory: a context manager, closed on exit."""

from __future__ import annotations

from typing import Self


class Closing:
    """Gives `with` support to a class that has `close()`, which may be called twice."""

    def close(self) -> None:
        """Free what is held."""
        raise AssertionError(f"{type(self).__name__} has no close()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
