"""Every command that a document shows is run here, and what it shows of their output is compared.

Three commands of README are special, and test_readme.py has them. Commands whose output is shown
are run as they stand; of the others replies are short where -n is absent.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import (
    CHAT_INPUT,
    DOCUMENTS,
    ROOT,
    SPECIAL,
    blocks,
    command_lines,
    run,
    shown_outputs,
)
from tests.needs import need_cpu
from vkmoe.cli import main
from vkmoe.placement import remembered

DEMO_MODEL = ROOT / "vkmoe" / "data" / "demo.gguf"
GPT_OSS = ROOT / "tests" / "fixtures" / "models" / "gptoss_mxfp4.gguf"
# Of what a document shows as printed: a driver that rounds otherwise may choose other experts.
TOLERANCE = 0.03


def _commands() -> Iterator[Any]:
    """Yield all commands; CI alone runs those that differ from another in their options only."""
    begun = set()
    for path in DOCUMENTS:
        shown = dict(shown_outputs(path.read_text()))
        scripts = [each for each in blocks(path.read_text(), "bash") if each not in shown]
        for command in (line for script in scripts for line in command_lines(script)):
            kind = tuple(command.split()[:2])
            is_slow = kind in begun or re.match("VKMOE|vkmoe (tune|selftest|perplexity)", command)
            begun.add(kind)
            if command not in SPECIAL:
                marks = [pytest.mark.full] if is_slow else []
                yield pytest.param(command, id=f"{path.name}-{command}", marks=marks)


SHOWN = [
    pytest.param(
        *pair, id=f"{path.name}-{command_lines(pair[0])[-1].split(' -')[0]}", marks=pytest.mark.full
    )
    for path in DOCUMENTS
    for pair in shown_outputs(path.read_text())
]
COMMANDS = [*_commands()]
TEXTS = "".join(path.read_text() for path in DOCUMENTS)
INSTALLS = sorted({what.strip('"') for what in re.findall(r'pip install (\.|"[^"`]+")', TEXTS)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the examples name."""
    (tmp_path / "prompt.txt").write_text("class Point:\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f():", "max_tokens": 4}\n')
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 9)
    (tmp_path / "model.gguf").symlink_to(DEMO_MODEL)
    (tmp_path / "gpt-oss-20b-mxfp4.gguf").symlink_to(GPT_OSS)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.sample(3)
def test_command(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It succeeds, prints something and shows no traceback.

    A shell runs those that need one; the others are run in this process, which saves its start.
    """
    if re.search("--device cpu|--(n-)?cpu-moe|--expert-mode hybrid", command):
        need_cpu()
    if re.match("vkmoe ", command) and not re.search("[|&]", command):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(
            remembered, "remembered_path", lambda device, what="tuning": folder / f"{what}.json"
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


@pytest.mark.parametrize(("script", "shown"), SHOWN)
def test_output_is_what_the_document_shows(script: str, shown: str, folder: Path) -> None:
    """Printed, or written to a text file. Lines may be left out, and a line's end at "..."."""
    done = run(f"set -e\n{script}", folder)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + "".join(path.read_text() for path in folder.glob("*.txt"))
    rest = iter(printed.splitlines())
    for line in filter(None, shown.splitlines()):
        assert any(_alike(line, other) for other in rest), f"{line!r} is not in:\n{printed}"


def _alike(shown: str, printed: str) -> bool:
    """Compare words, and numbers but for those of time."""
    words = printed.split()
    if shown.endswith(" ..."):
        shown = shown.removesuffix(" ...")
        words = words[: len(shown.split())]
    lines = [re.sub(r"[\d.]+ ms", "ms", " ".join(each)) for each in (shown.split(), words)]
    if len({re.sub(r"\d+(\.\d+)?", "0", line) for line in lines}) > 1:
        return False
    numbers = [map(float, re.findall(r"\d+(?:\.\d+)?", line)) for line in lines]
    return all(abs(a - b) <= TOLERANCE * a for a, b in zip(*numbers, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("what", INSTALLS)
def test_pip_finds_what_is_to_be_installed(what: str) -> None:
    """In the checkout, with nothing but what the test's environment has."""
    dry = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    done = run([*dry, "--no-build-isolation", what], ROOT)
    assert done.returncode == 0, done.stderr
    assert "Would install vkmoe-" in done.stdout, done.stdout
    assert "does not provide the extra" not in done.stderr
