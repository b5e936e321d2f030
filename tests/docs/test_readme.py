"""Every line of Python in README.md is run here, and its three special commands are.

The other commands are examples (test_examples.py). `tools/demo` is run for real from its own
folder; `tools/test` would run this very test, so it is compared with what CI runs; `pip install .`
becomes a wheel that is unpacked beside the dependencies and used, which spares a second download
of those.
"""

from __future__ import annotations

import os
import re
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, SPECIAL, blocks, command_lines, run
from tests.needs import need_cpu

README = (ROOT / "README.md").read_text()


def test_readme_begins_with_the_two_commands() -> None:
    """In the first minute nobody reads further than the first block."""
    first, second = blocks(README, "bash")[:2]
    assert (*command_lines(first), *command_lines(second)) == SPECIAL


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_python(code: str, tmp_path: Path) -> None:
    """It runs without a warning and prints what it says: logits of three tokens come last."""
    done = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\(3, \d+\)\n$", done.stdout)


def test_demo_writes_what_readme_shows() -> None:
    """Other processors round otherwise and go on differently: only the beginning is compared."""
    need_cpu()
    shown = blocks(README, "text")[0]
    done = run([str(ROOT / "tools" / "demo")], ROOT, VKMOE_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    assert ("def read_lines(path):" + done.stdout)[:80] == shown[:80]


def test_demo_says_when_there_is_no_gpu() -> None:
    """With lavapipe alone, the user is told why it is slow."""
    driver = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    only = {"VK_DRIVER_FILES": str(driver), "VK_ICD_FILENAMES": str(driver)}
    done = run([str(ROOT / "tools" / "demo"), "-n", "1"], ROOT, **only)
    assert done.returncode == 0
    assert "no GPU found: running on the CPU" in done.stderr


def test_ci_runs_the_test_command() -> None:
    """CI hides nothing: it runs `tools/test` as readers do, and more besides."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "tools/test || failed+=(tools/test)" in lines
    for script in (".ci/run", "tools/test", "tools/demo", "tools/setup"):
        assert os.access(ROOT / script, os.X_OK), script


@pytest.mark.full
def test_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """What `pip install .` installs holds extension, kernels and demo model, and generates."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    built = run([*build, "-w", str(tmp_path), str(ROOT)], tmp_path)
    assert built.returncode == 0, built.stderr
    venv.create(tmp_path / "venv")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    with zipfile.ZipFile(next(tmp_path.glob("vkmoe-*.whl"))) as wheel:
        wheel.extractall(site)
    shipped = {each.name for each in site.glob("vkmoe-*.dist-info/licenses/*")}
    assert shipped == {"LICENSE", "NOTICE"}
    # A plain line of a .pth file adds the dependencies, not the hook that finds the checkout.
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(dependencies + "\n")
    code = (
        "import vkmoe; print(vkmoe.__file__)\n"
        "with vkmoe.LLM() as llm: print(llm.generate('import ', max_tokens=4, temp=0).text)"
    )
    used = run([str(tmp_path / "venv" / "bin" / "python"), "-c", code], tmp_path)
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(str(site))
    assert len(used.stdout.splitlines()) >= 2, "no text"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Relative links name files of the repository."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
