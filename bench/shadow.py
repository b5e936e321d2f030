"""Tokens per second by predictor, on a modelled GPU behind a modelled link.

python -m bench.shadow --record

The host's work is real: the model of bench.host_time (48 layers of 128 experts, 8 used) with empty
programs, which follow routing that its kernels reported before, tokens drawn by Zipf's law. The GPU
and the link are modelled (bench/slow_link.py): a token takes --compute-ms and the time that its
misses take over the link, experts counted as --expert-mb each. What the host does beside a token is
hidden, and what it does between two of them is not; copies beside tokens share the link with the
reads of misses, and copies that are waited for keep the next token waiting. Said of each predictor,
for three speeds of the link.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.arms import take_turns
from bench.command import command_line, finish, run_main
from bench.host_time import OWN_QUEUE, SMALLEST, believe, empty, zipf_text
from bench.models import custom_model, default_cache, shape_of
from bench.slow_link import SlowGpu, SlowLink
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.choices import PredictorName
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu.device import choose_device, list_devices

CONTEXT = 256
PREDICTORS: tuple[PredictorName, ...] = ("none", "correlation", "token")


def main() -> None:
    """For each link, open all arms and let them take turns."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=48, help="default: 48")
    parser.add_argument("--links", type=_numbers, default=(4.0, 12.0, 24.0), help="GB/s: 4,12,24")
    parser.add_argument("--compute-ms", type=float, default=6.0, help="of a token (6)")
    parser.add_argument("--expert-mb", type=float, default=2.65, help="of an expert (2.65)")
    parser.add_argument("--expert-slots", type=int, default=16, help="of 128 (default: 16)")
    parser.add_argument("--warm", type=int, default=300, help="tokens before (default: 300)")
    parser.add_argument("--tokens", type=int, default=40, help="in each turn (default: 40)")
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    model = custom_model(
        f"smallest-{options.layers}",
        shape_of("tiny", n_layers=options.layers, **SMALLEST),
        "q8_0",
        options.cache,
    )
    n_tokens = options.warm + options.repeats * options.tokens
    tokens = zipf_text(np.random.default_rng(0), n_tokens).tolist()
    routing = _routing(model, options, tokens)
    rows: list[Row] = []
    results: dict[str, Any] = {}
    for speed in options.links:
        results[f"{speed:g} GB/s"] = found = _measure(model, options, tokens, routing, speed)
        for name, values in found.items():
            row = Row(
                f"{name}, link of {speed:g} GB/s", summarise(values["speeds"]), "tok/s", "host_wall"
            )
            print(row.line(f"{100 * values['hits']:.1f} % hits"), flush=True)
            rows.append(row)
    settings = {
        name: getattr(options, name) for name in ("compute_ms", "expert_mb", "expert_slots")
    }
    finish("shadow", card, {**settings, "links": results, "rows": rows}, options.record)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(piece) for piece in text.split(","))


def _routing(
    model: Path, options: argparse.Namespace, tokens: Sequence[int]
) -> list[NDArray[np.uint32]]:
    """What the kernels say that each token uses."""
    found = []
    with Engine(model, EngineConfig(options.device, CONTEXT)) as engine:
        for position, token in enumerate(tokens):
            engine.run_token(token, position % CONTEXT)
            found.append(engine.routing())
    return found


def _measure(
    model: Path,
    options: argparse.Namespace,
    tokens: Sequence[int],
    routing: Sequence[NDArray[np.uint32]],
    speed: float,
) -> dict[str, Any]:
    """Tokens per second of each turn, and hits, by arm."""
    with ExitStack() as stack:
        arms: dict[str, _Arm] = {}
        for predictor in PREDICTORS:
            config = EngineConfig(
                options.device,
                CONTEXT,
                expert_slots=options.expert_slots,
                expert_predictor=predictor,
                **OWN_QUEUE,
            )
            engine = stack.enter_context(Engine(model, config))
            link = SlowLink(speed * 1e9)
            gpu = SlowGpu(engine, link, options.compute_ms / 1e3, options.expert_mb * 1e6)
            arms[predictor] = _Arm(gpu, tokens, routing, options)
        speeds = take_turns(
            {name: arm.turn for name, arm in arms.items()}, options.repeats, "tok/s"
        )
        return {
            name: {"speeds": speeds.values(name), "hits": arm.hits} for name, arm in arms.items()
        }


class _Arm:
    """An engine on the modelled GPU, and its place in the text."""

    def __init__(
        self,
        gpu: SlowGpu,
        tokens: Sequence[int],
        routing: Sequence[NDArray[np.uint32]],
        options: argparse.Namespace,
    ) -> None:
        self._gpu, self._next = gpu, 0
        self._n: int = options.tokens
        self._tokens, self._routing = tokens, routing
        empty(gpu.engine)
        self._run(options.warm)
        gpu.begin()

    def turn(self) -> float:
        began = time.perf_counter()
        self._run(self._n)
        return self._n / (time.perf_counter() - began)

    @property
    def hits(self) -> float:
        return self._gpu.n_hits / max(1, self._gpu.n_uses)

    def _run(self, n_tokens: int) -> None:
        for index in range(self._next, self._next + n_tokens):
            believe(self._gpu.engine, self._routing[index])
            self._gpu.expect(self._routing[index])
            self._gpu.engine.run_token(self._tokens[index], index % CONTEXT)
        self._next += n_tokens


if __name__ == "__main__":
    run_main(main)
