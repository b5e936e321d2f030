"""SIGTERM and a closed terminal: what a run writes at its end is written, Ctrl-C or not."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkmoe.llm import Piece

from .conftest import FakeLLM, Run


@pytest.fixture(autouse=True)
def default_hangup() -> Iterator[None]:
    """Tests may have been started under nohup, and their processes would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def ended_by(fake: type[FakeLLM], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model gets this signal twice: in its second piece, and while it is closed."""
    close = fake.__exit__

    def pieces(self: FakeLLM, *_: object, **named: object) -> Iterator[Piece]:
        yield Piece(0, "one ")
        signal.raise_signal(number)
        yield Piece(1, "never")

    def closed(self: FakeLLM, *error: Any) -> None:
        signal.raise_signal(number)
        close(self, *error)

    monkeypatch.setattr(fake, "_stream", pieces)
    monkeypatch.setattr(fake, "__exit__", closed)


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_the_command_and_closes_the_model(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, command: str, name: str,
    code: int,
) -> None:  # fmt: skip
    number = getattr(signal, name)
    ended_by(fake, number, monkeypatch)
    words = ("-p", "x") if command == "generate" else ()
    done = run(command, "-q", *words, stdin=b"hello\nagain\n")
    assert (done.code, done.err) == (code, f"error: ended by {name}\n")
    assert done.out.strip() == "one" and fake.calls[-1] == {"closed": True}
    assert signal.getsignal(number) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under nohup."""
    ended_by(fake, signal.SIGHUP, monkeypatch)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("generate", "-p", "x", "-q").out == "one never\n"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_closed_terminal_leaves_statistics_and_profile(tmp_path: Path) -> None:
    """All of it real: the terminal goes away in the middle of a reply."""
    stats, profile = tmp_path / "s.json", tmp_path / "p.json"
    words = ["generate", "-p", "x", "-n", "900", "--ignore-eos", "--expert-slots", "8"]
    words += ["--expert-copies", "overlap"]  # a thread that copies has to end too
    files = ["--expert-stats", str(stats), "--expert-profile", str(profile)]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "vkmoe", *words, "-q", *files],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    assert os.read(ours, 1)
    process.send_signal(signal.SIGHUP)  # as the kernel does where it is the controlling terminal
    os.close(ours)  # after it: a write to a terminal that is gone fails, and may come first
    assert process.wait(20) == 129
    assert json.loads(stats.read_text())["n_tokens"] > 0
    assert json.loads(profile.read_text())["format"] == "vkmoe expert profile"
