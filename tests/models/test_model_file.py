"""A model file is opened once for a load, its tensors are read once, and it is let go of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vkmoe.models
from tests.engine.tiny import model_path, rewrite, with_metadata
from vkmoe.cli import main
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.gguf_file import GgufFile
from vkmoe.llm import LLM

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with model files, in order."""
    done: list[str] = []

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            done.append(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)

    for name in ("open_gguf", "read_tensors"):
        noted(vkmoe.models, name)
    noted(GgufFile, "close")
    return done


ONCE = ["open_gguf", "read_tensors"]


def test_a_load_opens_its_file_once_and_closes_it_at_the_end(calls: list[str]) -> None:
    with LLM(model_path("moe_plain"), ctx_size=16) as llm:
        llm.engine.run_token(1, 0)
        assert calls == ONCE
    assert calls[2:] == ["close"]
    calls.clear()
    with Engine(model_path("moe_plain"), EngineConfig(ctx_size=16)):
        assert calls == ONCE


def test_a_trace_does_not_open_it_again(calls: list[str], tmp_path: Path) -> None:
    assert main(["trace", "-p", "x", "-n", "2", "-q", "-o", str(tmp_path / "t.jsonl")]) == 0
    assert [name for name in calls if name != "close"] == ONCE


@pytest.mark.parametrize("wrong", ["tokenizer", "option"])
def test_a_load_that_fails_leaves_it_closed(wrong: str, calls: list[str], tmp_path: Path) -> None:
    path = model_path("moe_plain")
    if wrong == "tokenizer":
        change = with_metadata({"tokenizer.ggml.model": "unknown"})
        path = rewrite(path, tmp_path / "bad.gguf", change)
        calls.clear()
    with pytest.raises(VkmoeError):
        LLM(path, ctx_size=10**9 if wrong == "option" else 16)
    assert calls[:2] == ONCE and "close" in calls[2:]
