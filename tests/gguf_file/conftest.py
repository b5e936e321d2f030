"""The folder of real vocabularies, found in one place for all tests."""

from __future__ import annotations

from tests.generate.conftest import shared

__all__ = ["shared"]
