"""What each type of KV caches costs in quality, with and without the transform before rounding.

python -m bench.kv_types --device cpu --record

Two measures. The perplexity of a model (the demo model, or --model) on Python files (those of
--text), in windows of 512 tokens, for keys and values of each type. And the error of attention's
outputs, as the square root of their mean square relative to the outputs', for random queries over
random keys and values of 128 dims: normal ones; keys with four channels that are far from zero, as
those of trained models are; and keys and values with heavy tails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from bench.command import command_line, finish, run_main
from vkmoe import kv_types
from vkmoe.bench.environment import describe, print_card
from vkmoe.choices import KvType
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices
from vkmoe.generate.perplexity import Windows
from vkmoe.kernels.attention.caches import cache_row, hadamard
from vkmoe.kernels.attention.twins import prompt_attention
from vkmoe.kv_types import KV_NUMBERS, TRANSFORMED, hadamard_block
from vkmoe.llm import LLM
from vkmoe.llm.files import demo_model_path

Floats = NDArray[np.float64]
WINDOW = 512  # tokens
DIMS, N_SEEN, N_QUERIES, N_DRAWN = 128, 512, 64, 8
KINDS = ("normal", "outlying channels of keys", "heavy tails of keys and values")
TEXT = Path(__file__).resolve().parent.parent / "vkmoe" / "generate"


def main() -> None:
    """Measure both, and report."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--text", type=Path, default=TEXT, help="a folder of .py files")
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(options.text.glob("*.py")))
    rows = [*perplexities(options.model, options.device, text), *errors()]
    results = {"model": options.model.name, "text": options.text.name, "rows": rows}
    finish("kv_types", card, results, options.record)


def forms() -> Iterator[tuple[KvType, bool]]:
    """Yield each type, and whether it is transformed."""
    for kv_type in KV_NUMBERS:
        yield kv_type, False
        if kv_type in TRANSFORMED:
            yield kv_type, True


def perplexities(model: Path, device: str, text: str) -> Iterator[dict[str, Any]]:
    """Yield the perplexity of a text with caches in each form."""
    for kv_type, is_transformed in forms():
        types: dict[str, Any] = {"cache_type_k": kv_type, "cache_type_v": kv_type}
        changed = TRANSFORMED if is_transformed else frozenset[KvType]()
        with (
            patch.object(kv_types, "TRANSFORMED", changed),
            LLM(model, EngineConfig(device=device, ctx_size=WINDOW, **types)) as llm,
        ):
            *_, last = llm.perplexity(text, Windows(WINDOW))
        found, doubt = last.perplexity, last.standard_error
        print(f"perplexity {found:8.4f} +/- {doubt:.2f}  {named(kv_type, is_transformed)}")
        yield {"type": kv_type, "transformed": is_transformed, "perplexity": found}


def named(kv_type: KvType, is_transformed: bool) -> str:
    return f"{kv_type}{', transformed' if is_transformed else ''}"


def errors() -> Iterator[dict[str, Any]]:
    """Yield the error of attention's outputs in each form, over numbers of each kind."""
    for kind in KINDS:
        rng = np.random.default_rng(0)
        drawn = [draw(rng, kind) for _ in range(N_DRAWN)]
        for kv_type, is_transformed in forms():
            block = hadamard_block(kv_type, DIMS) if is_transformed else 1
            found = float(np.mean([error_of(*each, kv_type, block) for each in drawn]))
            print(f"error {100 * found:6.2f} %  {named(kv_type, is_transformed)}: {kind}")
            yield {"type": kv_type, "transformed": is_transformed, "of": kind, "error": found}


def draw(rng: np.random.Generator, kind: str) -> tuple[Floats, Floats, Floats]:
    """Draw queries [n, dims], keys and values [n_seen, dims]."""
    queries = rng.normal(0, 1.5, (N_QUERIES, DIMS))
    keys, values = rng.normal(size=(2, N_SEEN, DIMS))
    if kind == "outlying channels of keys":
        channels = rng.choice(DIMS, 4, replace=False)
        keys[:, channels] += rng.uniform(8, 20, 4) * rng.choice([-1, 1], 4)
    elif kind == "heavy tails of keys and values":
        keys, values = rng.standard_t(2.5, (2, N_SEEN, DIMS))
        keys, values = keys / keys.std(), values / values.std()
    return queries, keys, values


def error_of(queries: Floats, keys: Floats, values: Floats, kv_type: KvType, block: int) -> float:
    """Return the error of outputs over rounded keys and values, relative to the outputs."""
    rounded = (cache_row(hadamard(rows, block), kv_type) for rows in (keys, values))
    exact = attended(queries, keys, values)
    found = hadamard(attended(hadamard(queries, block), *rounded), block)
    return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))


def attended(queries: Floats, keys: NDArray[np.floating], values: NDArray[np.floating]) -> Floats:
    """Return the outputs [n, dims] of queries that see all keys."""
    scaled = (queries * DIMS**-0.5)[None]  # heads of one row
    (found,) = prompt_attention(scaled, keys[None, None], values[None, None], [len(keys) - 1])
    return np.asarray(found, np.float64)


if __name__ == "__main__":
    run_main(main)
