"""Which release llama.cpp is, and which glslc compiles its shaders, for bench/gpu_day.

Nothing of llama.cpp is kept in the repository: its sources are those in the source distribution of
llama-cpp-python (pip), and the compiler is Debian's. Runs on Python's own library alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.debian import fetch
from tools.gpu_drivers import SUITE, started, whole

SDIST = "llama-cpp-python==0.3.36"  # its source distribution holds llama.cpp's
VENDORED, SHADERS = Path("vendor/llama.cpp"), Path("ggml/src/ggml-vulkan/vulkan-shaders")


def download_sdist(into: Path) -> Path:
    """Download the source distribution, 77 MB, with pip. Raises CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    options = ["--no-deps", "--no-binary", SDIST.partition("==")[0], "--dest", str(into)]
    subprocess.run([*pip, *options, SDIST], check=True)
    (archive,) = into.glob("*.tar.gz")
    return archive


def fetch_glslc(into: Path) -> list[str]:
    """Fetch Debian's compiler unless it is there; returns how to start it. Raises as `fetch`."""
    if not into.exists():
        with whole(into) as partial:
            fetch(SUITE, ("glslc",), partial)
    return started(into, into / "usr/bin/glslc")
