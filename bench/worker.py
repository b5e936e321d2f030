"""A worker process of a benchmark: started, asked, ended; the protocol is in decode_worker.py.

Owns the process and the file its stderr goes to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.errors import VkmoeError

ROOT = Path(__file__).resolve().parent.parent
VKMOE, LLAMA = "vkmoe", "llama.cpp"

LOG_TAIL = 800  # characters of a failed worker's stderr to show
END_SECONDS = 60


class WorkerError(VkmoeError):
    """A worker process ended or said something else than asked."""


class Worker(Closing):
    """One arm of the comparison. Use it as a context manager; `card` is what it said of itself."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=dict(environment),
                cwd=folder,
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(
                f"cannot start {command[0]}: {error.strerror}", "name a Python interpreter"
            ) from error
        try:
            self.card = self._receive()
        except BaseException:
            self.close()
            raise

    def logits(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """The logits after the prompt: float32 [n_vocab]."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "logits.npy"
            self._ask({"do": "logits", "prompt": list(prompt), "out": str(out)})
            values: NDArray[np.float32] = np.load(out)
            return values

    def prompt(self, prompt: Sequence[int]) -> float:
        """Return the seconds that a prompt took, with nothing of it processed before."""
        seconds: float = self._ask({"do": "prompt", "prompt": list(prompt)})["seconds"]
        return seconds

    def decode(self, prompt: Sequence[int], n_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens (one more than timed) and the seconds of each of the `n_tokens` steps."""
        answer = self._ask({"do": "decode", "prompt": list(prompt), "tokens": n_tokens})
        return answer["tokens"], answer["seconds"]

    def follow(self, behind: int, tokens: Sequence[int]) -> float:
        """Return the seconds in which these tokens are decoded behind a prompt of that length."""
        seconds: float = self._ask({"do": "follow", "behind": behind, "tokens": list(tokens)})[
            "seconds"
        ]
        return seconds

    def read_bytes(self) -> int:
        """Count the bytes that the worker has had read from a disk (Linux' /proc/PID/io)."""
        lines = Path(f"/proc/{self._process.pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])

    def turn(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Decode these tokens, and return what plans_worker.py answers."""
        return self._ask({"do": "turn", "tokens": list(tokens)})

    def log_lines(self, *words: str) -> list[str]:
        """Lines of the worker's stderr that hold one of the words."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if any(word in line for word in words)]

    def close(self) -> None:
        """Let the worker end by itself; never in the middle of a submit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # of a worker that has ended already
            self._process.stdin.close()
        self._process.wait(END_SECONDS)
        self._process.stdout.close()
        self._log.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries may print lines of their own
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise self._failed()

    def _failed(self) -> WorkerError:
        self._process.wait(END_SECONDS)
        tail = "\n".join(self.log_lines(""))[-LOG_TAIL:]
        return WorkerError(f"the {self.name} worker ended early:\n{tail}")


def own_worker(model: Path, context: int, *options: str) -> Worker:
    """Start vkmoe with a model."""
    command = [sys.executable, "-m", "bench.decode_worker", str(model.resolve())]
    return Worker(VKMOE, [*command, "--ctx", str(context), *options], os.environ, ROOT)


def rival_worker(python: str, model: Path, context: int, device: str, *options: str) -> Worker:
    """Start llama.cpp with a model on a Vulkan device."""
    command = [python, str(ROOT / "bench" / "llama_cpp_worker.py"), str(model.resolve())]
    environment = os.environ | {"GGML_VK_VISIBLE_DEVICES": device}
    return Worker(LLAMA, [*command, "--ctx", str(context), *options], environment, ROOT)


def some_tokens(n: int) -> list[int]:
    """Return a prompt: tokens far apart, all in a vocabulary of 300."""
    return [37 * i % 251 for i in range(1, n + 1)]
