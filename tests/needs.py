"""What a test needs besides the checkout: CI must have it, other machines may go without."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from vkmoe.cpu.variants import has_cpu


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where the variable CI has any value, as CI systems set it."""
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, but {reason}", pytrace=False)
    pytest.skip(reason)


def need_cpu() -> None:
    """Go on where vkmoe has kernels for the CPU: a build with -DVKMOE_CPU=OFF has none."""
    if not has_cpu():
        missing("vkmoe has no kernels for the CPU")
