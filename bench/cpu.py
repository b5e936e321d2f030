"""Speed of the CPU device beside llama.cpp's CPU backend, on the same file with as many threads.

python -m bench.cpu --llama-bench PATH/llama-bench --record
python -m bench.cpu --llama-bench PATH/llama-bench --preset qwen3-30b-a3b --busy 1

Prompts of each length and decoding take turns with llama.cpp's own benchmark, which runs with
weights as the file has them and with repacked ones, its default. The model is that of bench.speed
unless told otherwise. --busy leaves less than all cores to both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.models import add_model_options, chosen_model
from bench.worker import LLAMA, VKMOE, Worker, WorkerError, own_worker, some_tokens
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.cpu.device import n_cores
from vkmoe.devices import CPU, choose_device, list_devices

WAYS = {f"{LLAMA} plain": "0", f"{LLAMA} repacked": "1"}  # of its option --repack


def main() -> None:
    """Measure all in turns, then report."""
    parser = command_line(__doc__)
    parser.set_defaults(device=CPU)
    add_model_options(parser)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's own benchmark")
    parser.add_argument("--threads", type=int, default=n_cores(), help="default: physical cores")
    parser.add_argument("--busy", type=int, default=0, help="foreign processes that only compute")
    parser.add_argument("--tokens", type=int, default=48, help="decoded per repeat (default: 48)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8, 32, 128, 512], help="prompts")
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    card |= {"threads": options.threads, "busy": options.busy}
    print_card(card)
    model = chosen_model(options)
    context = max([*options.lengths, options.tokens]) + 1
    own = ["--device", options.device, "--threads", str(options.threads)]
    with _busy(options.busy), own_worker(model, context, *own) as worker:
        arms = _arms(worker, model, options)
        for arm in arms.values():
            arm()
        speeds = take_turns(arms, options.repeats, "tok/s")
    finish(
        "cpu_busy" if options.busy else "cpu",
        card,
        {"model": model.name, **_results(speeds, card, options)},
        options.record,
    )


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


def _arms(
    worker: Worker, model: Path, options: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    """All that is measured, by its name: tokens per second of each kind of work."""
    arms: dict[str, Callable[[], float]] = {}
    for n in options.lengths:
        arms[f"{VKMOE} prompt {n}"] = _prompt(worker, n)
        for name, repack in WAYS.items() if options.llama_bench else ():
            arms[f"{name} prompt {n}"] = _rival(model, options, repack, n, 0)
    arms[f"{VKMOE} decode"] = _decode(worker, options.tokens)
    for name, repack in WAYS.items() if options.llama_bench else ():
        arms[f"{name} decode"] = _rival(model, options, repack, 0, options.tokens)
    return arms


def _prompt(worker: Worker, n_tokens: int) -> Callable[[], float]:
    return lambda: n_tokens / worker.prompt(some_tokens(n_tokens))


def _decode(worker: Worker, n_tokens: int) -> Callable[[], float]:
    return lambda: n_tokens / sum(worker.decode(some_tokens(1), n_tokens)[1])


def _rival(
    model: Path, options: argparse.Namespace, repack: str, n_prompt: int, n_decoded: int
) -> Callable[[], float]:
    command = [str(options.llama_bench), "-m", str(model), "-t", str(options.threads), "-r", "1"]
    command += ["-p", str(n_prompt), "-n", str(n_decoded), "--repack", repack, "-o", "json"]

    def measured() -> float:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise WorkerError(f"{options.llama_bench} failed: {done.stderr[-300:]}")
        return float(json.loads(done.stdout)[0]["avg_ts"])

    return measured


def _results(speeds: Arms, card: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    rows = [Row(name, speeds.summary(name), speeds.unit, "host_wall") for name in speeds.names]
    print(*rows, "", sep="\n")
    ratios = {}
    for work in [*(f"prompt {n}" for n in options.lengths), "decode"]:
        for rival in WAYS if options.llama_bench and options.repeats >= MIN_REPEATS else ():
            ratio = speeds.ratio(f"{VKMOE} {work}", f"{rival} {work}", card)
            ratios[f"{work}: {VKMOE} / {rival}"] = ratio
            print(f"{work}: {VKMOE} / {rival} = {ratio} (medians, 95 % interval, in turns)")
    return {"rows": rows, "ratios": ratios, "values": {n: speeds.values(n) for n in speeds.names}}


if __name__ == "__main__":
    run_main(main)
