"""Environments that show a process one Vulkan driver only: SwiftShader, or lavapipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.needs import missing

ROOT = Path(__file__).resolve().parent.parent.parent
SWIFTSHADER = ROOT / ".venv" / "swiftshader" / "vk_swiftshader_icd.json"


def only_driver(icd: Path) -> dict[str, str]:
    """The environment in which the Vulkan loader finds this driver and no other."""
    return os.environ | {"VK_DRIVER_FILES": str(icd), "VK_ICD_FILENAMES": str(icd)}


@pytest.fixture(scope="session")
def swiftshader() -> dict[str, str]:
    """SwiftShader alone. It cannot be had on every system, but CI's must have it."""
    if not SWIFTSHADER.exists():
        missing("no SwiftShader here; python -m tools.fetch_swiftshader gets it from Debian")
    return only_driver(SWIFTSHADER)


@pytest.fixture(scope="session")
def lavapipe() -> dict[str, str]:
    """Mesa's lavapipe alone."""
    return only_driver(next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")))
