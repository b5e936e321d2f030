"""Perplexity of a model beside llama.cpp's, on the same file and text.

python -m bench.perplexity --llama-python LLAMA_VENV/bin/python
python -m bench.perplexity --llama-python LLAMA_VENV/bin/python --model MODEL -f FILE --window 512

llama.cpp runs on the CPU, in an interpreter that has llama-cpp-python, by the definition of its
`llama-perplexity`. Both must find the same tokens. The model is the demo and the text the sources
of vkmoe/generate, unless told otherwise: code that the demo was not trained on.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.command import command_line, finish, run_main
from bench.worker import LLAMA, ROOT, VKMOE, WorkerError, rival_worker
from vkmoe.bench.environment import describe, print_card
from vkmoe.cli.options import read_source
from vkmoe.generate.perplexity import Windows
from vkmoe.llm import LLM, demo_model_path

LIMIT = 0.003  # of the ratio of both


def main() -> None:
    """Measure both sides, compare window by window."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="default: the demo")
    parser.add_argument("-f", "--file", help="the text (default: sources of vkmoe)")
    parser.add_argument("--window", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument(
        "--llama-python", required=True, help="an interpreter with llama-cpp-python"
    )
    options = parser.parse_args()
    text = read_source("file", options.file, "text") if options.file else _sources()
    windows = Windows(options.window)
    with LLM(options.model, device=options.device, ctx_size=options.window) as llm:
        card = describe(llm.device_info)
        print_card(card)
        tokens = llm.tokenizer.encode(text, parse_special=False)
        estimates = list(llm.perplexity(text, windows))
    rival = _rival(options, text, len(tokens))
    last = estimates[-1]
    sums = np.diff([0.0, *(each.mean * each.n_tokens for each in estimates)])
    ours = sums / (last.n_tokens // last.n_windows)
    print(f"{last.n_tokens} tokens predicted in {last.n_windows} windows of {windows.length}")
    print(f"{VKMOE}: perplexity {last.perplexity:.4f} +/- {last.standard_error:.4f}")
    print(f"{LLAMA}: perplexity {math.exp(np.mean(rival)):.4f}")
    difference = ours - rival
    ratio = math.exp(difference.mean())
    error = difference.std(ddof=1) / math.sqrt(len(difference)) if len(difference) > 1 else None
    margin = "" if error is None else f" +/- {error:.6f}"
    print(f"{VKMOE} / {LLAMA} = {ratio:.6f}{margin} (by window); wanted: within {LIMIT} of 1\n")
    found = {
        "model": options.model.name,
        "n_tokens": last.n_tokens,
        "n_windows": last.n_windows,
        "window": windows.length,
        "perplexity": {VKMOE: last.perplexity, LLAMA: math.exp(np.mean(rival))},
        "standard_error": last.standard_error,
        "ratio": ratio,
        "ratio_error": error,
        "within_limit": abs(ratio - 1) <= LIMIT,
    }
    finish("perplexity", card, found, options.record)


def _sources() -> str:
    return "".join(path.read_text() for path in sorted((ROOT / "vkmoe/generate").glob("*.py")))


def _rival(options: Any, text: str, n_tokens: int) -> Sequence[float]:
    """The mean of minus the logs of probabilities of each window, as llama.cpp finds it."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        python, window = options.llama_python, options.window
        with rival_worker(python, options.model, window, "", "--all-logits") as worker:
            found, means = worker.perplexity(Path(file.name), options.window)
    if found != n_tokens:
        raise WorkerError(f"the text has {n_tokens} tokens here and {found} there", "")
    return means


if __name__ == "__main__":
    run_main(main)
