"""The drivers, and the GPUs that stand for their makers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import missing
from tools.gpu_drivers import GPUS, folder, is_complete

# One of each maker, for what takes seconds on every driver.
OF_EACH_MAKER = ("navi31", "nvk-ampere", "anv-dg2")
# All of them; those beside one of each maker are for CI.
EVERY_GPU = [
    gpu if gpu in OF_EACH_MAKER else pytest.param(gpu, marks=pytest.mark.full) for gpu in GPUS
]


@pytest.fixture(scope="session")
def drivers() -> Path:
    if not is_complete(folder()):
        missing("no GPU drivers here; tools/fetch_gpu_drivers gets them where apt has Debian's")
    return folder()
