"""The documents that are checked, what stands in their fenced blocks, and how a reader runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SPECIAL = ("tools/demo", "tools/test", "pip install .")  # README's first; test_readme.py
CHAT_INPUT = "def add(a, b):\n/clear\n/exit\n"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return [block[2] for block in _FENCED.finditer(text) if block[1] == language]


def shown_outputs(text: str) -> list[tuple[str, str]]:
    """Each bash block that a text block follows at once, and that block: what is printed."""
    return [
        (script[2], output[2])
        for script, output in pairwise(_FENCED.finditer(text))
        if (script[1], output[1]) == ("bash", "text") and script.end() + 1 == output.start()
    ]


def command_lines(script: str) -> list[str]:
    """The commands of a bash block, each on one line without its comment."""
    lines = re.sub(r"\s*\\\n\s*", " ", script).splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def run(command: str | list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run as a reader would who has activated the environment; `more` adds variables."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | more
    arguments = ["bash", "-c", command] if isinstance(command, str) else command
    return subprocess.run(
        arguments, cwd=folder, env=environment, input=CHAT_INPUT, capture_output=True, text=True
    )
