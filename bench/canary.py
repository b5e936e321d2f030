"""Times how long a model's kernels are compared before its first token, and what that adds.

python -m bench.canary demo qwen3-30b-a3b

A model is `demo` or a preset of tools/synthetic, which is described without weights: comparing
needs none. For each, a process compares all kernels with nothing remembered, first with empty
caches of the driver (Mesa's; others keep theirs), then again, then with all remembered. Then the
demo model gives its first token in processes of their own, with and without, in turns: the time
from the start of the process on, with empty caches and with those of the turn before. A driver
without its GPU (tools/with_gpu_driver) computes nothing, but compiles as it would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.command import command_line, finish, run_main
from tools.pipelines import Described
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.canary.check import passing
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices, open_device
from vkmoe.errors import MiscompiledError
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.llm import demo_model_path
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import decide
from vkmoe.placement.remembered import remembered_path

HOST_BYTES = 64 << 30  # of the machine that a preset is planned for
ROUNDS = ("compiled too", "compared", "remembered")
_WORKER = "--worker"


def main() -> None:
    """Measure in processes of their own, and report."""
    if sys.argv[1:2] == [_WORKER]:
        print(json.dumps(_compare(*sys.argv[2:])))
        return
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="*", default=["demo", "qwen3-30b-a3b"])
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    rows = [row for name in options.models for row in _rows(name, options)]
    if "demo" in options.models:
        rows += _first_tokens(options)
    for row in rows:
        print(row)
    finish("canary", card, {"rows": rows}, options.record)


def _rows(name: str, options: Any) -> Iterator[Row]:
    """Measure how long one model's kernels take."""
    found: list[dict[str, float]] = []
    for _ in range(options.repeats):
        with _fresh() as environment:
            words = [sys.executable, "-m", "bench.canary", _WORKER, name, options.device]
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
            found.append(json.loads(done.stdout))
    for what in ROUNDS:
        times = summarise([each[what] for each in found])
        yield Row(f"{name}, {what}", times, "s", "host_wall")


def _first_tokens(options: Any) -> list[Row]:
    """Measure the demo model's first token."""
    times: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for flag in ("--canary", "--no-canary"):
            with _fresh() as environment:
                for what in ("empty caches", "full caches"):
                    words = [sys.executable, "-m", "vkmoe", "generate", "-q", flag, "-n", "1"]
                    words += ["--device", options.device, "-p", "def main():"]
                    began = time.perf_counter()
                    subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)
                    name = f"first token of the demo, {flag}, {what}"
                    times.setdefault(name, []).append(time.perf_counter() - began)
                    shutil.rmtree(Path(environment["XDG_CACHE_HOME"], "vkmoe"), ignore_errors=True)
    return [Row(name, summarise(found), "s", "host_wall") for name, found in times.items()]


@contextmanager
def _fresh() -> Iterator[dict[str, str]]:
    """Yield an environment in which nothing is remembered or compiled."""
    with tempfile.TemporaryDirectory() as folder:
        drivers = {"MESA_SHADER_CACHE_DIR": f"{folder}/driver"}
        yield os.environ | drivers | {"XDG_CACHE_HOME": folder}


def _compare(name: str, wanted: str) -> dict[str, float]:
    """Compare a model's kernels three times; seconds of each."""
    seconds = {}
    with open_device(wanted) as device, _model(name) as model:
        info = device.info
        for what in ROUNDS:
            if what != "remembered":
                remembered_path(info, "canary").unlink(missing_ok=True)
            began = time.perf_counter()
            try:
                passing(
                    device,
                    model,
                    choose_tuning(info),
                    lambda tuning: decide(
                        EngineConfig(), model, info, tuning, available_host_bytes=HOST_BYTES
                    ),
                )
            except MiscompiledError as error:
                print(f"{name}: {error}", file=sys.stderr)
            seconds[what] = time.perf_counter() - began
    return seconds


def _model(name: str) -> ModelFile:
    return open_model(demo_model_path()) if name == "demo" else Described(name).as_quantised()


if __name__ == "__main__":
    run_main(main)
