"""Run llama.cpp's own tests of its server against `vkmoe serve`, and count what passes.

    python -m tools.judge_server path/to/llama.cpp ../shared/server/llama-server-cases.txt

The first argument is the folder of llama.cpp in the source distribution that the build fetches
(vendor/llama.cpp), the second a list of its cases. The tests need packages of their own: `--python`
names an interpreter with pytest, requests, openai, wget, filelock, aiohttp and numpy.

Tests start the program with their flags and paths as they are. Only what names a model to download
is left out, the demo model is named in its place, and a text may have any words.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from vkmoe.llm import demo_model_path

PROGRAM = """#!/bin/bash
words=()
while (($#)); do
    case $1 in
        --hf-repo|--hf-file) shift 2 ;;
        --offline|--no-jinja) shift ;;
        *) words+=("$1"); shift ;;
    esac
done
exec {python} -m vkmoe serve --model {model} "${{words[@]}}"
"""
PLUGIN = """
import utils

utils.match_regex = lambda pattern, text: isinstance(text, str)
utils.ServerPreset.load_all = staticmethod(lambda: None)  # which would download models


def pytest_collection_modifyitems(items):
    wanted = set(open({cases!r}).read().split("\\n"))
    items[:] = [item for item in items if item.nodeid[item.nodeid.index("unit/"):] in wanted]
"""
RESULT = re.compile(r"^(PASSED|FAILED|ERROR) (?:.*/)?(unit/\w+\.py)(::.*?)?(?: - .*)?$")


def make_folder(folder: Path, sources: Path, cases: Sequence[str]) -> Path:
    """Copy the tests, beside what makes them start vkmoe; return the folder they run in."""
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(sources / "tools" / "server" / "tests", tests)
    (folder / "models").symlink_to(sources.resolve() / "models")
    (folder / "cases.txt").write_text("\n".join(cases))
    (tests / "vkmoe_judge.py").write_text(PLUGIN.format(cases=str(folder / "cases.txt")))
    program = folder / "llama-server"
    program.write_text(PROGRAM.format(python=sys.executable, model=demo_model_path()))
    program.chmod(0o755)
    return tests


def judged(folder: Path, tests: Path, python: str, cases: Sequence[str]) -> Iterator[str]:
    """Run the cases; yield the lines of their results."""
    files = sorted({case.partition("::")[0] for case in cases})
    words = [python, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "vkmoe_judge", *files]
    environment = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(folder / "llama-server")}
    environment |= {"PYTHONPATH": str(tests), "PORT": "8095"}
    done = subprocess.run(words, cwd=tests, env=environment, capture_output=True, text=True)
    yield from done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--python", default=sys.executable)
    asked = parser.parse_args()
    cases = [line for line in asked.cases.read_text().splitlines() if line]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = make_folder(folder, asked.sources, cases)
        found = [RESULT.match(line) for line in judged(folder, tests, asked.python, cases)]
    results = [(match[1], match[2], match[3]) for match in found if match]
    passed = Counter(file for result, file, _ in results if result == "PASSED")
    for file, n in sorted(Counter(case.partition("::")[0] for case in cases).items()):
        print(f"{file:40} {passed[file]:4} of {n:4}")
    print(f"{'all':40} {passed.total():4} of {len(cases):4}")
    for result, file, case in results:
        if result != "PASSED":
            print(f"{result}: {file}{case}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
