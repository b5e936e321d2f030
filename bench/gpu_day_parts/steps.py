"""Steps of a GPU day: each a command within a time limit, its result written down at once.

Owns limits, the folder of results and what is skipped. Does not know what the steps measure. Runs
on Python's own library alone: it starts before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

Status = Literal["ok", "failed", "timed out", "skipped"]
OK: Status = "ok"
TAIL = 600  # characters of a failed step's output to keep
LEAST_S = 1.0  # a step with less than this left is not begun
PATIENCE_S = 5.0  # between SIGTERM and SIGKILL


class Step(NamedTuple):
    """One command with its limit, and how its output becomes a result."""

    name: str
    command: Sequence[str]
    limit_s: float
    read: Callable[[str, str], Any] = lambda out, err: None  # of stdout and stderr
    needs: tuple[str, ...] = ()  # steps without which it cannot begin
    environment: Mapping[str, str] = {}


class Record(NamedTuple):
    """What became of a step: one line of results.jsonl."""

    step: str
    status: Status
    seconds: float
    limit_s: float
    command: str
    result: Any = None
    why: str = ""


class Day:
    """Runs steps until the time is up; mutates the folder `out` after each.

    There it keeps results.jsonl, one record a line, and log.txt with all that the steps printed.
    `after_each` is called with all records so far.
    """

    def __init__(
        self,
        out: Path,
        seconds: float,
        patience: float,
        environment: Mapping[str, str],
        after_each: Callable[[Sequence[Record]], None],
    ) -> None:
        self.records: list[Record] = []
        self.environment = dict(environment)
        self._out, self._end = out, time.monotonic() + seconds
        self._patience, self._after_each = patience, after_each
        self._begun: list[_Running] = []
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "log.txt"):
            (out / name).write_text("")

    def result(self, name: str) -> Any:
        """Return the result of a step that went well, else None."""
        found = [r.result for r in self.records if r.step == name and r.status == OK]
        return found[-1] if found else None

    def run(self, step: Step) -> Record:
        """Run a step to its end, its limit or the end of the day, and write it down."""
        return self.finish(self.start(step))

    def start(self, step: Step) -> _Running | Record:
        """Begin a step beside others; `finish` must be called with what is returned."""
        limit = min(step.limit_s * self._patience, self._end - time.monotonic())
        went_well = {record.step for record in self.records if record.status == OK}
        if missing := [name for name in step.needs if name not in went_well]:
            return _skipped(step, f"needs {', '.join(missing)}")
        if limit < LEAST_S:
            return _skipped(step, "no time left")
        running = _Running(step, limit, {**self.environment, **step.environment}, self._out)
        self._begun.append(running)
        return running

    def close(self) -> None:
        """End what was started and is not finished."""
        for running in self._begun:
            running.end()

    def finish(self, running: _Running | Record) -> Record:
        """Wait for a step that was started, and write down what became of it."""
        if isinstance(running, Record):
            record = running
        else:
            record = running.wait()
            self._begun.remove(running)  # another process may get its number
        self.records.append(record)
        with (self._out / "results.jsonl").open("a") as file:
            file.write(json.dumps(record._asdict()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._after_each(self.records)
        note = f": {record.why.splitlines()[-1]}" if record.why else ""
        print(f"{record.seconds:6.1f} s  {record.status:<9} {record.step}{note}", flush=True)
        return record


class _Running:
    """A step's process, in a group of its own so that nothing of it outlives the limit."""

    def __init__(
        self, step: Step, limit_s: float, environment: Mapping[str, str], out: Path
    ) -> None:
        self._step, self._limit_s, self._out = step, limit_s, out
        name = step.name.replace(" ", "-").replace("/", "-")
        self._files = [out / f".{name}.{stream}" for stream in ("out", "err")]
        self._began = time.monotonic()
        with self._files[0].open("w") as stdout, self._files[1].open("w") as stderr:
            try:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    step.command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                    env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._process = None
                stderr.write(f"{step.command[0]}: {error.strerror}\n")
        self._code: int | None = 127  # of a program that is not there
        self._seconds = 0.0
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def wait(self) -> Record:
        """Wait until the end or the limit, and keep the output."""
        self._watcher.join()
        out, err = (file.read_text(errors="replace") for file in self._files)
        self._keep(out, err)
        return self._judge(out, err)

    def _watch(self) -> None:
        """Note when and how the process ends; at the limit end it."""
        if self._process is not None:
            try:
                self._code = self._process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                self._code = None
            self._seconds = time.monotonic() - self._began
            self.end()

    def _judge(self, out: str, err: str) -> Record:
        def record(status: Status, result: Any = None, why: str = "") -> Record:
            command = _plain(" ".join(self._step.command))
            seconds, limit_s = round(self._seconds, 2), round(self._limit_s, 1)
            return Record(self._step.name, status, seconds, limit_s, command, result, why)

        tail = _plain((out + err).strip()[-TAIL:])
        if self._code is None:
            return record("timed out", why=tail or "no output")
        if self._code != 0:
            return record("failed", why=tail or f"exit code {self._code}")
        try:
            return record(OK, self._step.read(out, err))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return record("failed", why=f"its output cannot be read: {error!r}")

    def end(self) -> None:
        """End the process and all that it started; nothing if they have ended."""
        if self._process is None:
            return
        for way in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, way)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
        self._process.wait()

    def _keep(self, out: str, err: str) -> None:
        with (self._out / "log.txt").open("a") as log:
            log.write(f"===== {self._step.name}: {' '.join(self._step.command)}\n{err}{out}\n")
        for file in self._files:
            file.unlink()


def _skipped(step: Step, why: str) -> Record:
    command = _plain(" ".join(step.command))
    return Record(step.name, "skipped", 0.0, step.limit_s, command, None, why)


def _plain(text: str) -> str:
    """Leave the folders of this machine out of a text that records keep."""
    return re.sub(r"(?<![\w.:/])(?:/[\w.+@-]+)+/(?=[\w.+@-])", "", text)


def last_json(text: str) -> Any:
    """Return the JSON document that a text ends with. Raises ValueError."""
    lines = text.rstrip().splitlines()
    for index in range(len(lines) - 1, -1, -1):
        if lines[index][:1] in ("{", "["):
            with suppress(ValueError):
                return json.loads("\n".join(lines[index:]))
    raise ValueError("no JSON document at the end")
