"""Checks that docstrings are sentences about things: how they begin, and words kept for people."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "vkmoe"
# A first line that leans on what stands before it: a reader may have come here directly.
LEANS = re.compile(r"(Of|The same|These|Those|As|That|Both|Also|Likewise|Else|And|Or)\b")
# A first word that no verb follows as a rule: "What is read.", "Bytes of a row."
NO_VERB = re.compile(r"(What|Which|Where|How|Whether|Bytes)\b")
# A function does something: it begins with a verb, and not with what it returns.
NOT_DONE = re.compile(r"(The|A|An|All|One|Every|Each|Several|Some|Its|Number)\b")
# Words for people. Experts, bytes and devices are things.
FOR_PEOPLE = re.compile(r"\b(who|whom|whoever|nobody|somebody|everybody|told|said)\b", re.I)


def _docstrings(path: Path) -> Iterator[tuple[int, bool, str]]:
    """Yield the docstrings of a module, its classes and functions: line, if of a function, text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            is_function = not isinstance(node, ast.Module | ast.ClassDef)
            yield getattr(node, "lineno", 1), is_function, text


def _faults(path: Path) -> Iterator[str]:
    for line, is_function, text in _docstrings(path):
        first = text.partition("\n\n")[0]
        if LEANS.match(first) or NO_VERB.match(first):
            yield f"{line}: begins like a clause: {first!r}"
        if is_function and NOT_DONE.match(first):
            yield f"{line}: does not begin with a verb: {first!r}"
        if not first.rstrip().endswith((".", ":")):
            yield f"{line}: does not end like a sentence: {first!r}"
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := FOR_PEOPLE.search(text):
            yield f"{line}: {found[0]!r} is for people: {text.strip()}"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""Of both."""', "begins like a clause"),
        ('"""What is read."""', "begins like a clause"),
        ('def f(): """The bytes of a row."""', "does not begin with a verb"),
        ('"""Reads a file"""', "does not end like a sentence"),
        ("x = 1  # nobody reads it", "is for people"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, source: str, fault: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source + "\n", encoding="utf-8")
    (found,) = _faults(path)
    assert fault in found


def test_docstrings_are_sentences_about_things() -> None:
    faults = [f"{p.relative_to(PACKAGE)}:{x}" for p in PACKAGE.rglob("*.py") for x in _faults(p)]
    assert not faults, "\n".join(faults)
