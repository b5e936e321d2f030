"""`vkmoe selftest` with invented cases."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from .conftest import Run


def invent(monkeypatch: pytest.MonkeyPatch, *, ok: bool) -> None:
    cases = [
        SimpleNamespace(name="matvec.q4_k", ok=True, error=1e-7, limit=1e-5,
                        gigabytes_per_second=2.5),
        SimpleNamespace(name="finish", ok=ok, error=0.5, limit=1.0, gigabytes_per_second=None),
    ]  # fmt: skip
    module = SimpleNamespace(run=lambda device: iter(cases))
    monkeypatch.setitem(sys.modules, "vkmoe.selftest", module)


def test_a_line_for_every_case(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, ok=True)
    done = run("selftest")
    assert done.code == 0
    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["matvec.q4_k", "ok"],
        ["finish", "ok"],
    ]
    assert "2.50 GB/s" in done.out
    assert "all 2 kernels agree" in done.err


def test_json_is_one_document(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, ok=True)
    document = json.loads(run("selftest", "--json").out)
    assert [case["ok"] for case in document["cases"]] == [True, True]


def test_a_wrong_kernel_is_named_and_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, ok=False)
    done = run("selftest")
    assert done.code == 1
    assert "WRONG" in done.out
    assert "error: 1 of 2 kernels compute wrongly" in done.err
    assert "finish" in done.err
