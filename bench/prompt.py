"""Speed of prompts of a synthetic model, beside decoding, and beside llama.cpp on the same device.

python -m bench.prompt
python -m bench.prompt --llama-python LLAMA_VENV/bin/python --llama-lengths 32 --record

The model is that of bench.decode unless told otherwise. Prompts of each length begin anew, in turns
with decoding and, with --llama-python (an interpreter that has llama-cpp-python), with the rival's
prompts of the lengths that it is given time for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.decode import LLAMA, MIN_CORRELATION, PROMPT_STEP, ROOT, VKMOE
from bench.models import add_model_options, chosen_model
from bench.worker import Worker, WorkerError
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.gpu.device import choose_device, list_devices

N_DECODED = 4  # tokens of a repeat, behind a prompt of as many
DECODE = f"{VKMOE} decode"


def main() -> None:
    """Check, then time, then report."""
    parser = command_line(__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--lengths", type=_numbers, default=(32, 128, 512), help="default: 32,128,512"
    )
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--llama-lengths", type=_numbers, default=(32,), help="default: 32")
    options = parser.parse_args()
    if options.llama_python and not set(options.llama_lengths) <= set(options.lengths):
        parser.error(f"--llama-lengths: among {options.lengths}")
    info = choose_device(list_devices(), options.device)
    card = describe(info)
    print_card(card)
    model = chosen_model(options)
    prompts = {n: [PROMPT_STEP * i % 251 for i in range(1, n + 1)] for n in options.lengths}
    context = str(max(options.lengths) + N_DECODED)
    command = ["-m", "bench.decode_worker", str(model.resolve()), "--ctx", context]
    with ExitStack() as stack:
        own = [sys.executable, *command, "--device", str(info.index)]
        worker = stack.enter_context(Worker(VKMOE, own, os.environ, ROOT))
        arms: dict[str, Callable[[], float]] = {
            _name(VKMOE, n): _prompt(worker, prompt) for n, prompt in prompts.items()
        }
        arms[DECODE] = _decode(worker)
        if options.llama_python:
            rival = stack.enter_context(
                _rival(options.llama_python, model.resolve(), context, info.index)
            )
            _compare(worker, rival)
            for n in options.llama_lengths:
                arms[_name(LLAMA, n)] = _prompt(rival, prompts[n])
        for arm in arms.values():
            arm()  # what is recorded and compiled when it is first used
        shown = {name: _shown(name, arm) for name, arm in arms.items()}
        speeds = take_turns(shown, options.repeats, "tok/s")
    results = _results(speeds, arms, card, options)
    finish("prompt", card, {"model": model.name, **results}, options.record)


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(piece) for piece in text.split(","))
    if min(found) < 1 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError("different numbers from 1 on")
    return found


def _name(who: str, n_tokens: int) -> str:
    return f"{who} prompt {n_tokens}"


def _rival(python: str, model: Any, context: str, device: int) -> Worker:
    script = str(ROOT / "bench" / "llama_cpp_worker.py")
    environment = os.environ | {"GGML_VK_VISIBLE_DEVICES": str(device)}
    return Worker(LLAMA, [python, script, str(model), "--ctx", context], environment, ROOT)


def _compare(worker: Worker, rival: Worker) -> None:
    """Raise WorkerError unless both compute the same model."""
    prompt = [PROMPT_STEP * i % 251 for i in range(1, N_DECODED + 1)]
    found = np.corrcoef(worker.logits(prompt), rival.logits(prompt))[0, 1]
    print(f"logits of the two sides correlate to {found:.5f}\n", flush=True)
    if not found >= MIN_CORRELATION:
        raise WorkerError("the two sides compute different models", "use the same file")


def _prompt(worker: Worker, prompt: list[int]) -> Callable[[], float]:
    return lambda: len(prompt) / worker.prompt(prompt)


def _decode(worker: Worker) -> Callable[[], float]:
    prompt = [PROMPT_STEP * i % 251 for i in range(1, N_DECODED + 1)]
    return lambda: N_DECODED / sum(worker.decode(prompt, N_DECODED)[1])


def _shown(name: str, arm: Callable[[], float]) -> Callable[[], float]:
    """Print each value as it comes: a rival may take minutes."""

    def measured() -> float:
        speed = arm()
        print(f"  {name}: {speed:.2f} tok/s", flush=True)
        return speed

    return measured


def _results(
    speeds: Arms, arms: dict[str, Any], card: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    rows = [Row(name, speeds.summary(name), speeds.unit, "host_wall") for name in arms]
    print(*rows, "", sep="\n")
    ratios = {}
    if options.repeats >= MIN_REPEATS:
        for n in options.lengths:
            for below in (DECODE, _name(LLAMA, n)):
                if below in arms:
                    ratio = speeds.ratio(_name(VKMOE, n), below, card)
                    ratios[f"{_name(VKMOE, n)} / {below}"] = ratio
                    print(
                        f"{_name(VKMOE, n)} / {below} = {ratio} (medians, 95 % interval, in turns)"
                    )
    return {"rows": rows, "ratios": ratios, "values": {name: speeds.values(name) for name in arms}}


if __name__ == "__main__":
    run_main(main)
