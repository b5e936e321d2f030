"""Every program of examples/ runs on the demo model and prints what it promises.

tools/test checks their types, as strictly as vkmoe's own.
"""

from __future__ import annotations

import ast
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.needs import missing
from vkmoe.cpu.variants import has_cpu

FOLDER = Path(__file__).resolve().parents[2] / "examples"
MOST_LINES = 50  # so that one takes a minute to read
# What each prints, as a regular expression of the whole.
PRINTS = {
    "agent": r'add\({"a": ?\d+, ?"b": ?\d+}\) = \d+\nanswer: .+',
    "async_gather": r"def add\(a, b\):.+def sub\(a, b\):.+def mul\(a, b\):.+",
    "async_stream": r".+\n\[length\]\nstopped after 3 lines\n",
    "chat": r"> import os\n.+\n> def read\(path\):\n.+",
    "expert_statistics": r"planned in device memory: [\d.]+ MiB\n.+\n"
    r"25% of the experts have a place\n[1-9]\d* uses, [1-9]\d* of them found there\n",
    "forms": r"[0-2]\d:[0-5]\d\n(today|tomorrow)\n\[\d+(,\d+)*\]\n",
    "generate": r".+\nended by (length|stop), \d+ tokens/s\n",
    "json_schema": r".{1,20} (19|20)\d\d (English|French|German)\n",
    "langchain_model": r".{10,}",
    "perplexity": r"(after \d+ tokens: [1-9]\.\d\d\n){3,}",
    "score_batch": r"' os\\n' +-\d\.\d\d over 2 tokens\n"
    r"' banana\\n' +-\d\d\.\d\d over \d tokens\n' sys\\n' .+",
    "several_prompts": r"('.+'\n){4}(prompt \d is done after \d tokens\n){4}",
    "stream": r".{100,}\n",
    "tokens": r"\[\d+(, \d+)+\]\n\['def'.+\]\n'.*Hello.*'\nthe vocabulary has 4096 tokens\n",
    "tool_call": r"weather\(\{'city': '.{0,12}', 'days': [1-7]\}\)\n",
}


def test_all_examples_are_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PRINTS) and len(PRINTS) >= 15


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs_and_prints(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program of its own would, but for the time that a new process takes."""
    if name == "langchain_model":
        if find_spec("langchain_core") is None:
            missing("langchain-core is not installed")
        monkeypatch.setenv("LANGSMITH_TRACING", "false")
    if has_cpu():
        monkeypatch.setenv("VKMOE_DEVICE", "cpu")
    with ThreadPoolExecutor(1) as threads:  # where no event loop of another test runs
        threads.submit(runpy.run_path, str(FOLDER / f"{name}.py"), run_name="__main__").result()
    printed = capsys.readouterr().out
    assert re.fullmatch(PRINTS[name], printed, re.DOTALL), printed


@pytest.mark.parametrize("name", PRINTS)
def test_it_is_short_and_says_what_it_shows(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    words = ast.get_docstring(ast.parse(text))
    assert words and words.endswith(".") and words.count(". ") < 2
    assert len(text.splitlines()) <= MOST_LINES
