"""Host time per token: what Python and the driver's front end cost the calling thread.

python -m bench.host_time

A qwen3moe model with 48 layers of 128 experts, 8 used, whose matrices are as small as its kernels
allow (hidden 32), so that the program has its full number of commands and next to no arithmetic.
`time.thread_time()` around `Engine.run_token` counts the CPU time of this thread only: on a CPU
device the driver's own threads do not count. Once with all experts in place (target under 0.3 ms)
and once with the expert cache at work (under 1 ms), which takes in the choice of what moves and the
recording of its copies. How much moves is measured too: tokens are drawn by Zipf's law, as in text,
and routed by random weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.environment import describe, print_card
from bench.measure import MIN_REPEATS, Row, command_line, finish, percentile, run_main, summarise
from bench.models import custom_model, default_cache, shape_of
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine

IN_PLACE, CACHED = "in place", "with the cache"
TARGETS_MS = {IN_PLACE: 0.3, CACHED: 1.0}
CONTEXT = 256
N_TOKENS = 320  # vocabulary
N_WARM = 5
SMALLEST = {
    "hidden": 32,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_size": 32,
    "n_experts": 128,
    "n_experts_used": 8,
    "expert_size": 32,
    "n_tokens": N_TOKENS,
    "context": CONTEXT,
}


class _Times(NamedTuple):
    """Of one token, in milliseconds; and the experts that were uploaded for it."""

    thread: float
    wall: float
    n_uploads: int


def main() -> None:
    """Make the model, warm up, measure."""
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS)
    parser.add_argument("--layers", type=int, default=48, help="default: 48")
    parser.add_argument("--tokens", type=int, default=20, help="per repeat (default: 20)")
    parser.add_argument("--expert-slots", type=int, default=64, help="of 128 (default: 64)")
    parser.add_argument(
        "--warm", type=int, default=200, help="tokens before the cache is measured (default: 200)"
    )
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    if not 1 <= options.tokens <= CONTEXT:
        parser.error(f"--tokens must be between 1 and {CONTEXT}")
    if not 1 <= options.expert_slots < SMALLEST["n_experts"]:
        parser.error(f"--expert-slots must be between 1 and {SMALLEST['n_experts'] - 1}")
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine) for name, engine in _engines(options).items()}
        first = next(iter(engines.values()))
        card = describe(first.device.info)
        print_card(card)
        program = first.program()
        print(
            f"program: {len(program.commands)} commands, {program.n_dispatches} dispatches, "
            f"{options.layers} layers\n",
            flush=True,
        )
        repeats, hit_rate = _measure(engines, options)
        results = _results(repeats) | {"hit_rate": hit_rate}
        uploads = results["uploads_per_token"]
        print(f"the cache: {100 * hit_rate:.1f} % hits, {uploads:.1f} uploads per token\n")
        results["dispatches"] = program.n_dispatches
    finish("host_time", card, results, options.record)


def _engines(options: argparse.Namespace) -> dict[str, Engine]:
    """The same model twice."""
    shape = shape_of("tiny", n_layers=options.layers, **SMALLEST)
    model = custom_model(f"smallest-{options.layers}", shape, "q8_0", options.cache)
    slots = (None, options.expert_slots)
    configs = [EngineConfig(options.device, CONTEXT, expert_slots=n) for n in slots]
    return dict(zip(TARGETS_MS, (Engine(model, config) for config in configs), strict=True))


def _measure(
    engines: Mapping[str, Engine], options: argparse.Namespace
) -> tuple[dict[str, list[list[_Times]]], float]:
    """Tokens of each repeat, in turns; the cache's hits per use meanwhile."""
    texts = np.random.default_rng(0)
    for engine, n_warm in zip(engines.values(), (N_WARM, options.warm), strict=True):
        for position, token in enumerate(_text(texts, n_warm).tolist()):
            engine.run_token(token, position % CONTEXT)
    profiler = engines[CACHED].profiler
    assert profiler is not None
    before = profiler.total()
    repeats: dict[str, list[list[_Times]]] = {name: [] for name in engines}
    for _ in range(options.repeats):
        text = _text(texts, options.tokens).tolist()
        for name, engine in engines.items():
            times = [_token(engine, token, position) for position, token in enumerate(text)]
            repeats[name].append(times)
    after = profiler.total()
    return repeats, (after.n_hits - before.n_hits) / (after.n_uses - before.n_uses)


def _text(random: np.random.Generator, n_tokens: int) -> NDArray[np.int64]:
    """Tokens drawn by Zipf's law: the second is half as frequent as the first."""
    weights = 1 / np.arange(1, N_TOKENS + 1)
    return random.choice(N_TOKENS, n_tokens, p=weights / weights.sum())


def _token(engine: Engine, token: int, position: int) -> _Times:
    """Runs one token, which must have been computed."""
    before = _n_uploads(engine)
    wall, thread = time.perf_counter(), time.thread_time()
    top = engine.run_token(token, position)
    thread, wall = time.thread_time() - thread, time.perf_counter() - wall
    assert top is not None and not top.has_nan, "the token was not computed"
    return _Times(1e3 * thread, 1e3 * wall, _n_uploads(engine) - before)


def _n_uploads(engine: Engine) -> int:
    return engine.cache.counters.n_uploads if engine.cache is not None else 0


def _results(repeats: Mapping[str, list[list[_Times]]]) -> dict[str, Any]:
    rows, met = [], {}
    for name, found in repeats.items():
        every = [times.thread for tokens in found for times in tokens]
        per_repeat = [percentile([times.thread for times in tokens], 50) for tokens in found]
        walls = [percentile([times.wall for times in tokens], 50) for tokens in found]
        tail = f"of single tokens p50 {percentile(every, 50):.3f} p99 {percentile(every, 99):.3f}"
        rows += [
            Row(f"host time per token {name}", summarise(per_repeat), "ms", "thread_time", tail),
            Row("the same tokens by the wall clock", summarise(walls), "ms", "host_wall"),
        ]
        met[name] = rows[-2].value.median < TARGETS_MS[name]
        print(*rows[-2:], sep="\n")
        print(f"target: under {TARGETS_MS[name]} ms {'met' if met[name] else 'MISSED'}\n")
    uploads = [times.n_uploads for tokens in repeats[CACHED] for times in tokens]
    return {"rows": rows, "targets_met": met, "uploads_per_token": float(np.mean(uploads))}


if __name__ == "__main__":
    run_main(main)
