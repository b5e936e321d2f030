"""tools/with_gpu_driver where its drivers are not there, or what is asked for is not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.gpu_drivers import GPUS

SCRIPT = Path(__file__).resolve().parent.parent.parent / "tools" / "with_gpu_driver"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("navi31", "true"), 77, "tools/fetch_gpu_drivers gets them"),
        (("navi99", "true"), 2, ", ".join(GPUS)),
        (("navi31",), 2, "usage: tools/with_gpu_driver GPU COMMAND..."),
    ],
)
def test_what_is_missing_is_said(
    arguments: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "") and words in done.stderr
