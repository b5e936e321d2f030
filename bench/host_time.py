"""Host time per token: what Python and the driver's front end cost the calling thread.

python -m bench.host_time

A qwen3moe model with 48 layers of 128 experts, 8 used, whose matrices are as small as its kernels
allow (hidden 32), so that the program has its full number of commands and next to no arithmetic.
`time.thread_time()` around `Engine.run_token` counts the CPU time of this thread only: on a CPU
device the driver's own threads do not count. The target is under 0.3 ms.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.environment import describe, print_card
from bench.measure import MIN_REPEATS, Row, command_line, finish, percentile, run_main, summarise
from bench.models import custom_model, default_cache, shape_of
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine

TARGET_MS = 0.3
CONTEXT = 256
N_WARM = 5
SMALLEST = {
    "hidden": 32,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_size": 32,
    "n_experts": 128,
    "n_experts_used": 8,
    "expert_size": 32,
    "n_tokens": 320,
    "context": CONTEXT,
}


class _Times(NamedTuple):
    """Of one token, in milliseconds."""

    thread: float
    wall: float


def main() -> None:
    """Make the model, warm up, measure."""
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS)
    parser.add_argument("--layers", type=int, default=48, help="default: 48")
    parser.add_argument("--tokens", type=int, default=20, help="per repeat (default: 20)")
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    if not 1 <= options.tokens <= CONTEXT:
        parser.error(f"--tokens must be between 1 and {CONTEXT}")
    shape = shape_of("tiny", n_layers=options.layers, **SMALLEST)
    model = custom_model(f"smallest-{options.layers}", shape, "q8_0", options.cache)
    config = EngineConfig(device=options.device, ctx_size=CONTEXT)
    with Engine(model, config) as engine:
        card = describe(engine.device.info)
        print_card(card)
        program = engine.program()
        print(
            f"program: {len(program.commands)} commands, {program.n_dispatches} dispatches, "
            f"{options.layers} layers\n",
            flush=True,
        )
        repeats = _measure(engine, options)
    finish("host_time", card, _results(repeats, program.n_dispatches), options.record)


def _measure(engine: Engine, options: argparse.Namespace) -> list[list[_Times]]:
    """Tokens of each repeat; every one must have been computed."""
    for position in range(N_WARM):
        engine.run_token(1, position)
    repeats = []
    for _ in range(options.repeats):
        repeats.append([_token(engine, position) for position in range(options.tokens)])
    return repeats


def _token(engine: Engine, position: int) -> _Times:
    wall, thread = time.perf_counter(), time.thread_time()
    top = engine.run_token(position % 256, position)
    times = _Times(1e3 * (time.thread_time() - thread), 1e3 * (time.perf_counter() - wall))
    assert top is not None and not top.has_nan, "the token was not computed"
    return times


def _results(repeats: list[list[_Times]], n_dispatches: int) -> dict[str, Any]:
    every = [times.thread for tokens in repeats for times in tokens]
    per_repeat = [percentile([times.thread for times in tokens], 50) for tokens in repeats]
    walls = [percentile([times.wall for times in tokens], 50) for tokens in repeats]
    tail = f"of single tokens p50 {percentile(every, 50):.3f} p99 {percentile(every, 99):.3f}"
    rows = [
        Row("host time per token", summarise(per_repeat), "ms", "thread_time", tail),
        Row("the same tokens by the wall clock", summarise(walls), "ms", "host_wall"),
    ]
    for row in rows:
        print(row)
    met = rows[0].value.median < TARGET_MS
    print(f"target: under {TARGET_MS} ms {'met' if met else 'MISSED'}\n")
    return {"rows": rows, "target_met": met, "dispatches": n_dispatches}


if __name__ == "__main__":
    run_main(main)
