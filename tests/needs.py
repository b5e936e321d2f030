"""What a test needs besides the checkout: CI must have it, other machines may go without.

Says when a need is missing; does not look for anything itself.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

__all__ = ["missing"]


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where the variable CI has any value, as CI systems set it."""
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, but {reason}", pytrace=False)
    pytest.skip(reason)
