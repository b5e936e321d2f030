"""Every command and every line of Python in README.md is run here.

Three commands are special: `tools/demo` is run for real from its own folder and timed; `tools/test`
would run this very test, so it is compared with what CI runs; `pip install .` becomes a wheel that
is unpacked beside the dependencies and used, which spares a second download of those.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.needs import need_cpu
from vkmoe.cli import main
from vkmoe.placement import remembered

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
DEMO_MODEL = ROOT / "vkmoe" / "data" / "demo.gguf"
GPT_OSS = ROOT / "tests" / "fixtures" / "models" / "gptoss_mxfp4.gguf"
SPECIAL = ("tools/demo", "tools/test", "pip install .")
CHAT_INPUT = "def add(a, b):\n/clear\n/exit\n"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines of the bash blocks without their comments."""
    lines = "".join(blocks("bash")).splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def run(command: str | list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run as a reader would who has activated the environment; `more` adds variables."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | more
    arguments = ["bash", "-c", command] if isinstance(command, str) else command
    return subprocess.run(
        arguments, cwd=folder, env=environment, input=CHAT_INPUT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that README's examples name."""
    path = tmp_path_factory.mktemp("readme")
    (path / "prompt.txt").write_text("class Point:\n")
    (path / "prompts.jsonl").write_text('{"prompt": "def f():", "max_tokens": 4}\n')
    (path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 9)
    (path / "model.gguf").symlink_to(DEMO_MODEL)
    (path / "gpt-oss-20b-mxfp4.gguf").symlink_to(GPT_OSS)
    return path


def test_readme_begins_with_the_two_commands() -> None:
    """In the first minute nobody reads further than the first block."""
    assert tuple(commands()[:3]) == SPECIAL


@pytest.mark.parametrize("command", [line for line in commands() if line not in SPECIAL])
def test_command(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It succeeds, prints something and shows no traceback. Short replies do where -n is absent.

    A shell runs those that need one; the others are run in this process, which saves its start.
    """
    if re.search("--device cpu|--cpu-moe|--expert-mode hybrid", command):
        need_cpu()
    if re.match("vkmoe ", command) and not re.search("[|&]", command):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(
            remembered, "remembered_path", lambda device, what="": folder / f"{what}.json"
        )
        monkeypatch.setenv("VKMOE_MAX_TOKENS", "8")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(CHAT_INPUT.encode())))
        code = main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
    else:
        done = run(command, folder, VKMOE_MAX_TOKENS="8")
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, err
    assert out.strip()
    assert "Traceback" not in err


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str, folder: Path) -> None:
    """It runs without a warning and prints what it says: logits of three tokens come last."""
    done = run([sys.executable, "-W", "error", "-c", code], folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\(3, \d+\)\n$", done.stdout)


def test_demo_writes_what_readme_shows() -> None:
    """Other drivers may round otherwise and go on differently: only the beginning is compared."""
    need_cpu()
    shown = blocks("text")[0]
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


DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Relative links name files of the repository."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
