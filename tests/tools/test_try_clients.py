"""The program that tries client libraries: what it asks passes with those that are here, and what
fails is told from what a library does not have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.server.conftest import serving
from tools.clients import __main__ as checks
from tools.try_clients import CHECKS, IN_NODE, IN_PYTHON, Row, table
from vkmoe.config import EngineConfig
from vkmoe.cpu.variants import has_cpu
from vkmoe.llm import LLM

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    template = (ROOT / "tools" / "clients" / "template.jinja").read_text()
    config = EngineConfig(ctx_size=1024, parallel=2, device="cpu" if has_cpu() else None)
    with serving(lambda: LLM(None, config, chat_template=template)) as served:
        served.wait()
        yield served.address


@pytest.mark.parametrize("name", ["openai", "anthropic", "ollama"])
def test_what_is_asked_of_libraries_is_served(address: str, name: str) -> None:
    library = import_module(f"tools.clients.{name}_package")
    for check in CHECKS:
        getattr(library, check)(address)


def test_checks_go_on_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(address: str) -> None:
        raise ValueError(f"nothing at {address}")

    library = SimpleNamespace(chat=fail, tools=lambda address: None)
    monkeypatch.setitem(sys.modules, "tools.clients.broken", library)
    monkeypatch.setattr(sys, "argv", ["clients", "broken", "here"])
    checks.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == {"chat": "ValueError: nothing at here", "tools": ""}
    row = table([Row("Broken", "1.2", found)]).splitlines()[-1]
    assert row == "| Broken | 1.2 | FAILED | — | yes | — |"


def test_the_page_has_a_row_for_each_library() -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    head = table([]).splitlines()[0]
    rows = page.partition(head)[2].split("\n\n")[0]
    for client in (*IN_PYTHON.values(), *IN_NODE.values()):
        assert f"\n| {client.title} | " in rows
