"""vkmoe's side of bench/decode.py: a process that loads a model and decodes when told to.

The protocol, one JSON document a line (llama_cpp_worker.py speaks it too): the worker's first line
says what it runs on; then stdin asks `{"do": "logits", "prompt": [...], "out": FILE}` or
`{"do": "decode", "prompt": [...], "tokens": N}`, and the answer is `{}` or the tokens decoded and
the seconds each took. Only decoding is timed: from one token's logits to the next one's choice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import run_main
from vkmoe.batch import TopLogits
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine


def main() -> None:
    """Load, say so, then answer until stdin ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--ctx", type=int, required=True)
    options = parser.parse_args()
    with Engine(options.model, EngineConfig(device=options.device, ctx_size=options.ctx)) as engine:
        info = engine.device.info
        _say({"runs_on": f"{info.name}, {info.driver}", "kernels": str(engine.tuning)})
        for line in sys.stdin:
            _say(_answer(engine, json.loads(line)))


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    top = engine.run_tokens(request["prompt"], 0)
    if request["do"] == "logits":
        np.save(request["out"], engine.full_logits())
        return {}
    return _decode(engine, _best(top), len(request["prompt"]), request["tokens"])


def _decode(engine: Engine, token: int, position: int, n_tokens: int) -> dict[str, Any]:
    """Greedy tokens and the seconds each took."""
    tokens, seconds = [token], []
    for step in range(n_tokens):
        started = time.perf_counter()
        top = engine.run_token(tokens[-1], position + step)
        assert top is not None
        tokens.append(_best(top))
        seconds.append(time.perf_counter() - started)
    return {"tokens": tokens, "seconds": seconds}


def _best(top: TopLogits) -> int:
    return int(top.ids[0])


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    run_main(main)
