"""llama.cpp's side of bench/speed.py, where llama-cpp-python is.

Speaks the protocol of decode_worker.py; imports nothing of vkmoe. All layers are offloaded; which
device that means is up to GGML_VK_VISIBLE_DEVICES, which bench/worker.py sets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found, unused-ignore]
import numpy as np


def main() -> None:
    """Load, say so, then answer until stdin ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--ctx", type=int, required=True)
    parser.add_argument("--mapped", action="store_true", help="no weights are repacked in memory")
    options = parser.parse_args()
    if options.mapped:
        module = llama_cpp.llama_cpp
        defaults = module.llama_model_default_params()
        defaults.use_extra_bufts = False
        module.llama_model_default_params = lambda: defaults
    llama = llama_cpp.Llama(
        options.model,
        n_ctx=options.ctx,
        n_gpu_layers=-1,
        n_batch=options.ctx,
        n_threads=os.cpu_count(),
        verbose=True,
    )
    offloads = llama_cpp.llama_supports_gpu_offload()
    _say(
        {
            "runs_on": "GPU backend, all layers" if offloads else "CPU backend only",
            "kernels": llama_cpp.llama_print_system_info().decode(),
            "version": llama_cpp.__version__,
        }
    )
    for line in sys.stdin:
        _say(_answer(llama, json.loads(line)))


def _answer(llama: Any, request: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    if request["do"] == "follow":
        for token in request["tokens"]:
            llama.eval([token])
            _logits(llama)
        return {"seconds": time.perf_counter() - started}
    llama.reset()
    llama.eval(request["prompt"])
    if request["do"] == "prompt":
        _logits(llama)  # reading them waits for the device
        return {"seconds": time.perf_counter() - started}
    if request["do"] == "logits":
        np.save(request["out"], _logits(llama))
        return {}
    return _decode(llama, request["tokens"])


def _decode(llama: Any, n_tokens: int) -> dict[str, Any]:
    """Greedy tokens and the seconds each took."""
    tokens, seconds = [int(_logits(llama).argmax())], []
    for _ in range(n_tokens):
        started = time.perf_counter()
        llama.eval([tokens[-1]])
        tokens.append(int(_logits(llama).argmax()))  # reading the logits waits for the device
        seconds.append(time.perf_counter() - started)
    return {"tokens": tokens, "seconds": seconds}


def _logits(llama: Any) -> Any:
    """The logits of the last token, in place: float32 [n_vocab]."""
    pointer = llama_cpp.llama_get_logits(llama.ctx)
    return np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),))


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
