"""vkmoe's side of bench/speed.py: a process that loads a model and runs it as asked.

The protocol, one JSON document a line (llama_cpp_worker.py speaks it too): the worker's first line
says what it runs on; then stdin asks `{"do": "logits", "prompt": [...], "out": FILE}`,
`{"do": "prompt", "prompt": [...]}` or `{"do": "decode", "prompt": [...], "tokens": N}`. The answer
is `{}`, the seconds that the prompt took, or the tokens decoded and the seconds of each, from one
token's logits to the next one's choice. `{"do": "follow", "behind": N, "tokens": [...]}` decodes
these tokens behind a prompt of N, and answers the seconds that all took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.command import run_main
from vkmoe.bench.decode import best, greedy
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.kernels.experts.operations import DESCRIPTOR_BYTES

SIZES_AT = DESCRIPTOR_BYTES - 3 * 8  # of gate, up and down, behind all addresses


def main() -> None:
    """Load, say so, then answer until stdin ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ctx", type=int, required=True)
    parser.add_argument("--expert-mode", default="auto")
    parser.add_argument("--by-faults", action="store_true", help="never read experts ahead")
    options = parser.parse_args()
    mode, threads = options.expert_mode, options.threads
    config = EngineConfig(options.device, options.ctx, threads=threads, expert_mode=mode)
    with Engine(options.model, config) as engine:
        if options.by_faults:
            _read_by_faults(engine)
        info = engine.device.info
        _say({"runs_on": f"{info.name}, {info.driver}", "kernels": str(engine.tuning)})
        for line in sys.stdin:
            _say(_answer(engine, json.loads(line)))


def _read_by_faults(engine: Engine) -> None:
    """Take the sizes out of the CPU's descriptors of experts (kernels/experts/operations.py)."""
    for address in engine._table.entries.reshape(-1).tolist():
        ctypes.memset(address + SIZES_AT, 0, DESCRIPTOR_BYTES - SIZES_AT)


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "prompt":
        started = time.perf_counter()
        engine.run_prompt(request["prompt"])
        return {"seconds": time.perf_counter() - started}
    if request["do"] == "follow":
        started = time.perf_counter()
        for position, token in enumerate(request["tokens"], request["behind"]):
            engine.run_token(token, position)
        return {"seconds": time.perf_counter() - started}
    top = engine.run_tokens(request["prompt"], 0)
    if request["do"] == "logits":
        np.save(request["out"], engine.full_logits())
        return {}
    tokens, seconds = greedy(engine, best(top), len(request["prompt"]), request["tokens"])
    return {"tokens": tokens, "seconds": seconds}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    run_main(main)
