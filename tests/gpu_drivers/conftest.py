"""The drivers, and the GPUs that stand for their makers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import missing
from tools.gpu_drivers import folder, is_complete

# One of each maker, for what takes seconds on every driver.
OF_EACH_MAKER = ("navi31", "nvk-ampere", "anv-dg2")


@pytest.fixture(scope="session")
def drivers() -> Path:
    if not is_complete(folder()):
        missing("no GPU drivers here; tools/fetch_gpu_drivers gets them where apt has Debian's")
    return folder()
