"""`vkmoe selftest` with invented cases."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from .conftest import Run


def invent(monkeypatch: pytest.MonkeyPatch, *, ok: bool) -> None:
    cases = [
        SimpleNamespace(name="matvec.q4_k", ok=True, error=1e-7, limit=1e-5, where=""),
        SimpleNamespace(name="finish", ok=ok, error=0.5, limit=1.0,
                        where="" if ok else "log; element [0]: expected 1, found 2"),
    ]  # fmt: skip

    def chosen(device: str | None, only: str) -> object:
        return (case for case in cases if only in case.name)

    module = SimpleNamespace(run=chosen)
    monkeypatch.setitem(sys.modules, "vkmoe.selftest", module)


def test_a_line_for_every_case(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, ok=True)
    done = run("selftest")
    assert done.code == 0
    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["matvec.q4_k", "ok"],
        ["finish", "ok"],
    ]
    assert "all 2 cases agree" in done.err


def test_json_is_one_document(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, ok=True)
    document = json.loads(run("selftest", "--json").out)
    assert [case["ok"] for case in document["cases"]] == [True, True]


def test_a_wrong_kernel_is_named_and_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, ok=False)
    done = run("selftest")
    assert done.code == 1
    assert "WRONG" in done.out
    assert "error: 1 of 2 cases compute wrongly" in done.err
    assert "finish" in done.err
    assert done.out.splitlines()[-1].endswith("; log; element [0]: expected 1, found 2")


def test_some_kernels_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, ok=True)
    done = run("selftest", "--only", "matvec")
    assert done.out.startswith("matvec.q4_k") and len(done.out.splitlines()) == 1
    monkeypatch.undo()
    nothing = run("selftest", "--only", "matvecs")
    assert nothing.code == 2 and "no kernel of this device has 'matvecs' in its name" in nothing.err
    assert "matvec_residual" in nothing.err, "the hint lists what there is"
