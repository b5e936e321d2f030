"""Decode speed of synthetic models, alone or beside llama.cpp on the same device and file.

python -m bench.decode
python -m bench.decode --llama-python LLAMA_VENV/bin/python --record

The model defaults to a synthetic OLMoE-1B-7B with 4 layers (hidden 2048, 64 experts,
8 used, of width 1024; Q4_K with Q6_K down), made once into a cache folder. With --llama-python (an
interpreter that has llama-cpp-python) both sides run as processes with the model loaded, take turns
on the same prompt, and only decoding is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.models import add_model_options, chosen_model
from bench.worker import Worker, WorkerError
from vkmoe.bench.decode import TokenBytes, token_bytes
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.models import open_model

ROOT = Path(__file__).resolve().parent.parent
VKMOE, LLAMA = "vkmoe", "llama.cpp"
CONTEXT = 512
PROMPT_STEP = 37  # the prompt's tokens: far apart, all in a vocabulary of 300
MIN_CORRELATION = 0.98  # of the two sides' logits: the same model, not the same rounding
LLAMA_DEVICE_WORDS = ("ggml_vulkan: 0", "using device", "offloaded")


def main() -> None:
    """Check, then time, then report."""
    parser = command_line(__doc__)
    add_model_options(parser)
    parser.add_argument("--tokens", type=int, default=16, help="decoded per repeat (default: 16)")
    parser.add_argument("--prompt", type=int, default=4, help="prompt tokens (default: 4)")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    options = parser.parse_args()
    if options.tokens < 1 or options.prompt < 1 or options.prompt + options.tokens >= CONTEXT:
        parser.error(f"--prompt and --tokens: at least 1 each, less than {CONTEXT} together")
    if options.llama_python and options.repeats < MIN_REPEATS:
        parser.error(f"a ratio needs --repeats {MIN_REPEATS} or more")
    info = choose_device(list_devices(), options.device)
    card = describe(info)
    print_card(card)
    model = chosen_model(options)
    with open_model(model) as file:
        sizes = token_bytes(file)
    _print_static(model, sizes)
    prompt = [PROMPT_STEP * index % 251 for index in range(1, options.prompt + 1)]
    with ExitStack() as stack:
        workers = [stack.enter_context(worker) for worker in _workers(options, model, info)]
        checks = _check(workers, prompt, options.tokens)
        arms = _measure(workers, prompt, options)
        results = _results(arms, sizes, card)
        results |= {"model": model.name, "checks": checks, "arms": _arm_cards(workers)}
    results |= {"prompt": options.prompt, "tokens": options.tokens, "context": CONTEXT}
    finish("decode", card, results, options.record)


def _print_static(model: Path, sizes: TokenBytes) -> None:
    """What a token must read, before anything is measured."""
    print(f"model {model.name}, {model.stat().st_size / 1e6:.0f} MB")
    print(
        f"a token reads {sizes.total / 1e6:.1f} MB of weights: {sizes.trunk / 1e6:.1f} MB trunk, "
        f"{sizes.experts / 1e6:.1f} MB experts; 1 GB/s would be {1e9 / sizes.total:.2f} tok/s\n",
        flush=True,
    )


def _workers(options: argparse.Namespace, model: Path, info: DeviceInfo) -> list[Worker]:
    """The arms, loaded one after the other."""
    path, context = str(model.resolve()), str(CONTEXT)
    own = [sys.executable, "-m", "bench.decode_worker", path, "--ctx", context]
    workers = [Worker(VKMOE, [*own, "--device", str(info.index)], os.environ, ROOT)]
    if options.llama_python:
        script = str(ROOT / "bench" / "llama_cpp_worker.py")
        environment = os.environ | {"GGML_VK_VISIBLE_DEVICES": str(info.index)}
        command = [options.llama_python, script, path, "--ctx", context]
        try:
            workers.append(Worker(LLAMA, command, environment, ROOT))
        except BaseException:
            workers[0].close()
            raise
    for worker in workers:
        print(f"{worker.name}: {worker.card['runs_on']}; {worker.card['kernels']}", flush=True)
    return workers


def _check(workers: list[Worker], prompt: list[int], n_tokens: int) -> dict[str, Any]:
    """The arms must compute the same model, and vkmoe must repeat itself; also warms them up."""
    logits = [worker.logits(prompt) for worker in workers]
    for worker, values in zip(workers, logits, strict=True):
        if not np.isfinite(values).all() or values.std() == 0:
            raise WorkerError(f"{worker.name} computes no finite logits")
    checks: dict[str, Any] = {}
    if len(workers) == 2:
        checks["logits_correlation"] = float(np.corrcoef(logits[0], logits[1])[0, 1])
        print(f"logits of the two sides correlate to {checks['logits_correlation']:.5f}")
        if checks["logits_correlation"] < MIN_CORRELATION:
            raise WorkerError("the two sides compute different models", "use the same file")
    tokens = [worker.decode(prompt, n_tokens)[0] for worker in workers]
    again = [worker.decode(prompt, n_tokens)[0] for worker in workers]
    checks["repeats_itself"] = {w.name: tokens[i] == again[i] for i, w in enumerate(workers)}
    if not checks["repeats_itself"][VKMOE]:
        raise WorkerError("vkmoe decodes other tokens each time")
    if len(workers) == 2:
        checks["same_greedy_tokens"] = sum(a == b for a, b in zip(*tokens, strict=True))
        print(f"{checks['same_greedy_tokens']} of {n_tokens + 1} greedy tokens are equal")
    return checks


def _measure(workers: list[Worker], prompt: list[int], options: argparse.Namespace) -> Arms:
    def once(worker: Worker) -> Callable[[], float]:
        def tokens_per_second() -> float:
            seconds = worker.decode(prompt, options.tokens)[1]
            speed = len(seconds) / sum(seconds)
            slowest = max(seconds) / statistics.median(seconds)
            print(
                f"  {worker.name}: {speed:.2f} tok/s, slowest token {slowest:.1f} x the median",
                flush=True,
            )
            return speed

        return tokens_per_second

    return take_turns({worker.name: once(worker) for worker in workers}, options.repeats, "tok/s")


def _results(arms: Arms, sizes: TokenBytes, card: dict[str, Any]) -> dict[str, Any]:
    """Rows, and the ratio if there is one to take."""
    print()
    results: dict[str, Any] = {"bytes_per_token": sizes.total, "rows": []}
    for name in arms.names:
        speed = arms.summary(name)
        row = Row(f"{name} decode", speed, arms.unit, "host_wall")
        results["rows"].append(row)
        print(row)
        print(f"{speed.median * sizes.total / 1e9:>30.3f} GB/s of weights")
    if len(arms.names) == 2:
        ratio = arms.ratio(VKMOE, LLAMA, card)
        results["ratio"] = {"of": f"{VKMOE} / {LLAMA}", **ratio._asdict()}
        print(f"{VKMOE} / {LLAMA} = {ratio} (medians, 95 % interval, taken in turns)")
    results["values"] = {name: arms.values(name) for name in arms.names}
    return results


def _arm_cards(workers: list[Worker]) -> dict[str, Any]:
    """What each arm says it ran on, with the lines llama.cpp logs of its devices."""
    cards = {worker.name: dict(worker.card) for worker in workers}
    if len(workers) == 2:
        cards[LLAMA]["log"] = workers[1].log_lines(*LLAMA_DEVICE_WORDS)
        print("\n".join(cards[LLAMA]["log"]))
    return cards


if __name__ == "__main__":
    run_main(main)
