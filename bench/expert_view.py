"""What the view of experts costs the engine's thread: nothing unless something asks, then how much.

python -m bench.expert_view

The host's work is real: the model of bench.host_time (48 layers of 128 experts, 8 used) with empty
programs, which follow routing that its kernels reported before, tokens drawn by Zipf's law. Every
second token the view is asked for what changed, as a page does; the same tokens run with nothing
asking. By `time.thread_time()`: what is on the critical path of a token, what is done while it
runs, and an answer as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.command import command_line, finish, run_main
from bench.host_time import CONTEXT, ONE_QUEUE, SMALLEST, believe, empty, zipf_text
from bench.models import custom_model, default_cache, shape_of
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, percentile, summarise
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.view.experts import ExpertView

ALONE, ASKED = "nothing asks", "a view asks"


class _Times:
    """Holds the medians of each repeat, in milliseconds."""

    def __init__(self) -> None:
        self.critical: list[float] = []
        self.hidden: list[float] = []
        self.answers: list[float] = []

    def note(self, critical: list[float], hidden: list[float], answers: list[float]) -> None:
        self.critical.append(percentile(critical, 50))
        self.hidden.append(percentile(hidden, 50))
        if answers:
            self.answers.append(percentile(answers, 50))


def main() -> None:
    """Make the model, warm up, take turns."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=48, help="default: 48")
    parser.add_argument("--tokens", type=int, default=120, help="of each repeat (default: 120)")
    parser.add_argument("--expert-slots", type=int, default=64, help="of 128 (default: 64)")
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    shape = shape_of("tiny", n_layers=options.layers, **SMALLEST)
    model = custom_model(f"smallest-{options.layers}", shape, "q8_0", options.cache)
    tokens = zipf_text(np.random.default_rng(0), min(CONTEXT, options.tokens)).tolist()
    config = EngineConfig(options.device, CONTEXT, expert_slots=options.expert_slots, **ONE_QUEUE)
    with Engine(model, config) as engine:
        card = describe(engine.device.info)
        print_card(card)
        rows = _rows(_measure(engine, tokens, options))
    print(*rows, sep="\n")
    finish("expert_view", card, {"rows": rows}, options.record)


def _measure(
    engine: Engine, tokens: Sequence[int], options: argparse.Namespace
) -> dict[str, _Times]:
    """Run the same tokens with and without a view, in turns; the first pair warms up."""
    routing = []
    for position, token in enumerate(tokens):
        engine.run_token(token, position)
        routing.append(engine.routing())
    empty(engine)
    view, found = ExpertView(engine), {ALONE: _Times(), ASKED: _Times()}
    for repeat in range(options.repeats + 1):
        for name, times in found.items():
            view.close()
            measured = _turn(engine, tokens, routing, view if name == ASKED else None)
            if repeat:
                times.note(*measured)
    return found


def _turn(
    engine: Engine,
    tokens: Sequence[int],
    routing: Sequence[NDArray[np.uint32]],
    view: ExpertView | None,
) -> tuple[list[float], list[float], list[float]]:
    """Return milliseconds of each token, on the critical path and hidden, and of each answer."""
    critical, answers, hidden = [], [], list[float]()
    meanwhile = engine.experts.meanwhile
    engine.experts.meanwhile = lambda: hidden.append(_timed(meanwhile))  # type: ignore[method-assign]
    since = view.snapshot()["version"] if view is not None else 0

    def answer() -> None:
        nonlocal since
        assert view is not None
        delta = view.deltas(since)
        since = delta["version"]
        json.dumps(delta)

    for position, token in enumerate(tokens):
        believe(engine, routing[position])
        took = _timed(lambda t=token, p=position: engine.run_token(t, p))  # type: ignore[misc]
        critical.append(took - hidden[-1])
        if view is not None and position % 2:
            answers.append(_timed(answer))
    engine.experts.meanwhile = meanwhile  # type: ignore[method-assign]
    return critical, hidden, answers


def _timed(act: Callable[[], object]) -> float:
    began = time.thread_time()
    act()
    return 1e3 * (time.thread_time() - began)


def _rows(found: dict[str, _Times]) -> list[Row]:
    rows = []
    for name, times in found.items():
        rows += [
            Row(
                f"critical path of a token, {name}", summarise(times.critical), "ms", "thread_time"
            ),
            Row(f"done while it runs, {name}", summarise(times.hidden), "ms", "thread_time"),
        ]
    answers = summarise(found[ASKED].answers)
    return [*rows, Row("an answer, with its JSON", answers, "ms", "thread_time")]


if __name__ == "__main__":
    run_main(main)
