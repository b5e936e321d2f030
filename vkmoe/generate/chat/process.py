"""This module runs a chat template within limits of time and memory.

It owns the process that does so (worker.py), its start and its end. It does not own what
the template is given, nor what its failures mean (template.py).
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIME_LIMIT = 5.0  # seconds, for a rendering; real templates take milliseconds
_MEMORY_LIMIT = 1 << 30  # bytes of addresses
_WORKER = Path(__file__).with_name("worker.py")


class TemplateFailed(Exception):
    """Says in one line why a template cannot be compiled or rendered."""


class TemplateProcess:
    """Renders a template in a process of its own, which an alarm ends when it takes too long.

    A template is a foreign program. It can loop for ever, also inside one call of a built-in
    function (`9 ** 9 ** 9`), and build texts that take all memory. Python can stop neither in a
    thread; an operating system can in a process, and nothing is left spinning. The process starts
    once, in about a tenth of a second, and anew after it had to end. It may be used on any thread.
    """

    def __init__(self, source: str, seconds: float = TIME_LIMIT) -> None:
        """Start the process and compile `source`. Raises TemplateFailed if that is not possible."""
        self._first = {"source": source, "seconds": seconds, "memory_bytes": _MEMORY_LIMIT}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start()

    def render(self, names: dict[str, Any], now: str, more: Mapping[str, Any] | None = None) -> str:
        """Return the text for `names`, at the date `now` in ISO's form.

        Where it fails, `more` names are tried beside them, or instead of those of the same name.
        Raises TemplateFailed with what the template says; ValueError, TypeError or RecursionError
        for names that cannot be written as JSON.
        """
        line = json.dumps({"names": names, "now": now, "more": dict(more or {})})
        with self._lock:
            if self._process is None:
                self._start()
            return str(self._ask(line))

    def _start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for vkmoe
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        try:
            self._ask(json.dumps(self._first))
        except TemplateFailed:
            self._stop()
            raise

    def _ask(self, line: str) -> object:
        """Send a line and return the result of the answer."""
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # such as Ctrl-C: its answer must not be that of another question
            self._stop()
            raise
        if not answer.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)  # it is ending: its own status tells why
            if (status := self._stop()) == -signal.SIGALRM:
                raise TemplateFailed(f"it takes longer than {self._seconds:g} seconds")
            raise TemplateFailed(f"its process ended with status {status}")
        document = json.loads(answer)
        if "error" in document:
            raise TemplateFailed(document["error"])
        return document["result"]

    def _stop(self) -> int | None:
        """End the process; the next rendering starts another. Returns its exit status."""
        process, self._process = self._process, None
        self._end()
        return process.returncode if process is not None else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and wait for it: one that has ended by itself keeps its own status."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    if process.poll() is None:
        process.kill()
    process.wait()
