"""Speed of prompts and of decoding, alone or beside llama.cpp on the same device and file.

python -m bench.speed
python -m bench.speed --llama-python LLAMA_VENV/bin/python --llama-lengths 32 --record
python -m bench.speed --device cpu --llama-bench PATH/llama-bench --lengths 8,32,128 --busy 1

The model defaults to a synthetic OLMoE-1B-7B with 4 layers (hidden 2048, 64 experts, 8 used, of
width 1024; Q4_K with Q6_K down), made once into a cache folder. Prompts of each length begin anew,
in turns with decoding. With --llama-python (an interpreter that has llama-cpp-python) both sides
run as processes with the model loaded, must compute the same logits, and take turns in decoding and
in prompts of the lengths that the rival is given time for. With --llama-bench llama.cpp's own
benchmark takes turns on the CPU, with weights as the file has them and with repacked ones, its
default; --busy leaves less than all cores to both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.models import add_model_options, chosen_model
from bench.worker import LLAMA, VKMOE, Worker, WorkerError, own_worker, rival_worker, some_tokens
from vkmoe.bench.decode import token_bytes
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.cpu.device import n_cores
from vkmoe.devices import choose_device, list_devices
from vkmoe.models import open_model

N_BEFORE = 4  # tokens of the prompt before those that are decoded
MIN_CORRELATION = 0.98  # of the two sides' logits: the same model, not the same rounding
LLAMA_DEVICE_WORDS = ("ggml_vulkan: 0", "using device", "offloaded")
REPACK = {f"{LLAMA} plain": "0", f"{LLAMA} repacked": "1"}  # an option of llama.cpp's benchmark


def main() -> None:
    """Check, then time, then report."""
    parser = command_line(__doc__)
    add_model_options(parser)
    parser.add_argument("--lengths", type=numbers, default=(32, 128, 512), help="of prompts")
    parser.add_argument("--tokens", type=int, default=16, help="decoded per repeat (default: 16)")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--llama-lengths", type=numbers, default=(32,), help="default: 32")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's own benchmark, on the CPU")
    parser.add_argument("--threads", type=int, default=n_cores(), help="default: physical cores")
    parser.add_argument("--busy", type=int, default=0, help="foreign processes that only compute")
    options = parser.parse_args()
    if options.llama_python and not set(options.llama_lengths) <= set(options.lengths):
        parser.error(f"--llama-lengths: among {options.lengths}")
    info = choose_device(list_devices(), options.device)
    card = describe(info) | {"threads": options.threads, "busy": options.busy}
    print_card(card)
    model = chosen_model(options)
    with open_model(model) as file:
        n_bytes = token_bytes(file).total
    print(f"{model.name}: a token reads {n_bytes / 1e6:.1f} MB of weights\n", flush=True)
    context = max(max(options.lengths), N_BEFORE + options.tokens) + 1
    results: dict[str, Any] = {"model": model.name, "bytes_per_token": n_bytes}
    with ExitStack() as stack:
        stack.enter_context(_busy(options.busy))
        asked = ("--device", str(info.index), "--threads", str(options.threads))
        worker = stack.enter_context(own_worker(model, context, *asked))
        arms = _arms(worker, options.lengths, options.tokens)
        if options.llama_python:
            python = options.llama_python
            rival = stack.enter_context(rival_worker(python, model, context, str(info.index)))
            results["logits_correlation"] = _compare(worker, rival)
            results["rival"] = rival.card | {"log": rival.log_lines(*LLAMA_DEVICE_WORDS)}
            arms |= _arms(rival, options.llama_lengths, options.tokens)
        if options.llama_bench:
            arms |= _bench_arms(model, options)
        for arm in arms.values():
            arm()  # what is recorded and compiled when it is first used
        shown = {name: _shown(name, arm) for name, arm in arms.items()}
        speeds = take_turns(shown, options.repeats, "tok/s")
    finish("speed", card, results | _results(speeds, card, options.repeats), options.record)


@contextmanager
def _busy(n: int) -> Iterator[None]:
    """Keep so many cores busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def numbers(text: str) -> tuple[int, ...]:
    """Read an option's different numbers."""
    found = tuple(int(piece) for piece in text.split(","))
    if min(found) < 1 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError("different numbers from 1 on")
    return found


def _compare(worker: Worker, rival: Worker) -> float:
    """Raise WorkerError unless both compute the same model."""
    found = np.corrcoef(worker.logits(some_tokens(N_BEFORE)), rival.logits(some_tokens(N_BEFORE)))
    print(f"logits of the two sides correlate to {found[0, 1]:.5f}\n", flush=True)
    if not found[0, 1] >= MIN_CORRELATION:
        raise WorkerError("the two sides compute different models", "use the same file")
    return float(found[0, 1])


def _arms(worker: Worker, lengths: tuple[int, ...], n_tokens: int) -> dict[str, Any]:
    """Return what is timed of a side, by its name: tokens per second of each kind of work."""

    def prompt(n: int) -> Callable[[], float]:
        return lambda: n / worker.prompt(some_tokens(n))

    def decode() -> float:
        return n_tokens / sum(worker.decode(some_tokens(N_BEFORE), n_tokens)[1])

    return {f"{worker.name} prompt {n}": prompt(n) for n in lengths} | {
        f"{worker.name} decode": decode
    }


def _bench_arms(model: Path, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return the same kinds of work as llama.cpp's own benchmark does them."""
    works = {f"prompt {n}": (n, 0) for n in options.lengths} | {"decode": (0, options.tokens)}
    run = [str(options.llama_bench), "-m", str(model), "-t", str(options.threads), "-r", "1"]

    def measured(command: list[str]) -> float:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise WorkerError(f"{options.llama_bench} failed: {done.stderr[-300:]}")
        return float(json.loads(done.stdout)[0]["avg_ts"])

    def arm(repack: str, n_prompt: int, n_decoded: int) -> Callable[[], float]:
        work = ["-p", str(n_prompt), "-n", str(n_decoded), "--repack", repack, "-o", "json"]
        return lambda: measured([*run, *work])

    return {
        f"{name} {work}": arm(repack, *sizes)
        for work, sizes in works.items()
        for name, repack in REPACK.items()
    }


def _shown(name: str, arm: Callable[[], float]) -> Callable[[], float]:
    """Print each value as it comes: a rival may take minutes."""

    def measured() -> float:
        speed = arm()
        print(f"  {name}: {speed:.2f} tok/s", flush=True)
        return speed

    return measured


def _results(speeds: Arms, card: dict[str, Any], repeats: int) -> dict[str, Any]:
    rows = [Row(name, speeds.summary(name), speeds.unit, "host_wall") for name in speeds.names]
    print(*rows, "", sep="\n")
    ours = [name for name in speeds.names if name.startswith(VKMOE)]
    ratios = {}
    for name in ours if repeats >= MIN_REPEATS else ():
        work = name.removeprefix(VKMOE)
        others = [other for other in speeds.names if other.endswith(work) and other != name]
        for below in [*others, *[f"{VKMOE} decode"] * ("prompt" in work)]:
            ratio = ratios[f"{name} / {below}"] = speeds.ratio(name, below, card)
            print(f"{name} / {below} = {ratio} (medians, 95 % interval, in turns)")
    return {"rows": rows, "ratios": ratios, "values": {n: speeds.values(n) for n in speeds.names}}


if __name__ == "__main__":
    run_main(main)
