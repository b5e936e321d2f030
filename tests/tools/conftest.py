"""The folder shared/ beside the checkout, found in one place for all tests."""

from __future__ import annotations

from tests.generate.conftest import shared

__all__ = ["shared"]
