"""Prompts whose experts cross a slow link: how busy it is, and whether the cache ever costs time.

python -m bench.prompt_link --record
python -m bench.prompt_link --model FILE --lengths 64,512 --slowness 2

Prompts of --lengths tokens, drawn at random, in chunks of --ubatch-size rows, of a synthetic model
with 12 layers of 64 experts or of --model: with --share % of the experts in slots, with one slot in
each layer, and without any, all experts at home. The arms take turns, and their logits must be
equal to the last bit. First they run on the device as it is; then, with its memory taken for its
own, over a link by injection (bench/slow_link.py) that takes --slowness times as long for what a
chunk with slots moves as the device needs to compute it. Give --link-speed to compare two versions
of vkmoe: the share in which the link is busy grows by bytes that come for nothing too. Said are
seconds of a prompt, in what share of them the link carried bytes, and the ratios to the arm without
slots. Commands between two barriers run beside the link. On a CPU device those that bring experts
take their time besides.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from bench.arms import take_turns
from bench.command import command_line, finish, run_main
from bench.models import custom_model, default_cache, shape_of
from bench.slow_link import SlowLink, SlowPrompts
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row, summarise
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.models import open_model

SIZES = {"n_layers": 12, "n_experts": 64, "n_experts_used": 4, "context": 4096}
OFF, ONE = "no slots", "one slot"
FAST = 1e15  # bytes per second: no link at all


class _Arm:
    """The model with so many slots."""

    def __init__(self, name: str, model: Path, link: SlowLink, config: EngineConfig) -> None:
        self.name, self._model, self._config, self._link = name, model, config, link
        self._engine: Engine | None = None
        self.logits: list[NDArray[np.float32]] = []  # after each turn
        self.shares: list[float] = []  # of a turn's time, in %, in which the link carried bytes

    @contextmanager
    def opened(self) -> Iterator[None]:
        with ExitStack() as self._stack, Engine(self._model, self._config) as self._engine:
            yield
            self._stack.close()  # before the engine
        self._engine = None

    def slow(self) -> None:
        """From here on bytes cross the link."""
        self._stack.enter_context(closing(SlowPrompts(self.engine, self._link)))

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def turn(self, length: int) -> float:
        """Seconds that a prompt takes."""
        engine, link = self.engine, self._link
        tokens = np.random.default_rng(length).integers(0, engine.n_vocab, length).tolist()
        engine.rewind(0, 0)
        before, began = link.n_bytes, time.perf_counter()
        engine.run_prompt(tokens)
        seconds = time.perf_counter() - began
        engine.settle()
        busy_s = (link.n_bytes - before) / link.bytes_per_second
        self.shares.append(100 * busy_s / seconds)
        self.logits.append(engine.full_logits().copy())
        return seconds


def main() -> None:
    """Open, warm up, take turns without the link and with it."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file instead of a synthetic model")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--lengths", type=_numbers, default=(64, 512, 2048))
    parser.add_argument("--ubatch-size", type=int, default=512, help="default: 512")
    parser.add_argument("--share", type=float, default=50.0, help="%% in slots (default: 50)")
    parser.add_argument("--slowness", type=float, default=2.0, help="default: 2")
    parser.add_argument("--link-speed", type=float, help="MB/s of the link, instead of --slowness")
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    model = options.model
    if model is None:
        model = custom_model("prompts-12x64", shape_of("tiny", **SIZES), "q4_k_m", options.cache)
    link = SlowLink(FAST)
    arms = _arms(model, link, options)
    results: dict[str, Any] = {"model": model.name, "chunk": options.ubatch_size}
    with _opened(arms, options.lengths):
        rows = [*_turns("as it is", arms, options, card)]
    with patch.object(DeviceInfo, "is_uma", False), _opened(arms, options.lengths):
        for arm in arms:
            arm.slow()
            arm.turn(max(options.lengths))
        if options.link_speed is None:
            link.bytes_per_second = _speed(link, arms[::-1], options)
        else:
            link.bytes_per_second = options.link_speed * 1e6
        speed = link.bytes_per_second / 1e6
        results |= {"slowness": options.slowness, "link_mb_per_s": speed}
        rows += _turns(f"link of {speed:.3g} MB/s", arms, options, card)
    finish("prompt_link", card, results | {"rows": rows}, options.record)


@contextmanager
def _opened(arms: Sequence[_Arm], lengths: Sequence[int]) -> Iterator[None]:
    """Load the model for each arm, and record and compile what its prompts use."""
    with ExitStack() as stack:
        for arm in arms:
            stack.enter_context(arm.opened())
        for length in lengths:
            for arm in arms:
                arm.turn(length)
        yield


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(piece) for piece in text.split(",")}))


def _arms(model: Path, link: SlowLink, options: argparse.Namespace) -> list[_Arm]:
    with open_model(model) as file:
        experts = file.spec.experts
    if experts is None:
        raise VkmoeError(f"{model} has no experts", "give a mixture-of-experts model")
    slots = max(1, round(options.share / 100 * experts.n_experts))
    asked: dict[str, dict[str, Any]] = {
        OFF: {"expert_cache": "1"},  # byte: not one slot fits
        ONE: {"expert_slots": 1},
        f"{slots} slots": {"expert_slots": slots},
    }
    config = EngineConfig(options.device, max(options.lengths), ubatch_size=options.ubatch_size)
    return [_Arm(name, model, link, replace(config, **more)) for name, more in asked.items()]


def _speed(link: SlowLink, arms: Sequence[_Arm], options: argparse.Namespace) -> float:
    """The link's bytes per second: a chunk's bytes take --slowness times as long as the chunk.

    The chunk is that of the first of these arms which moves any.
    """
    rows = min(options.ubatch_size, max(options.lengths))
    for arm in arms:
        before, found = link.n_bytes, []
        for _ in range(3):
            found.append(arm.turn(rows))
        if n_bytes := (link.n_bytes - before) / len(found):
            return float(n_bytes / (options.slowness * np.median(found)))
    raise VkmoeError("no prompt moves any expert", "give longer ones, or a smaller --share")


def _turns(
    what: str, arms: Sequence[_Arm], options: argparse.Namespace, card: dict[str, Any]
) -> Iterator[Row]:
    """Let the arms take turns at each length; rows of seconds, of the link's share, of ratios."""
    for length in options.lengths:
        for arm in arms:
            arm.shares, arm.logits = [], []
        turns = {arm.name: partial(arm.turn, length) for arm in arms}
        times = take_turns(turns, options.repeats, "s")
        _check_same_logits(arms)
        for arm in arms:
            named = f"prompt of {length}, {arm.name}, {what}"
            yield _shown(Row(named, times.summary(arm.name), "s", "host_wall"))
            if max(arm.shares) >= 1:
                busy = summarise(arm.shares)
                yield _shown(Row(f"the link is busy: {named}", busy, "%", "host_wall"))
            if arm.name != OFF and options.repeats >= MIN_REPEATS:
                ratio = times.ratio(arm.name, OFF, card)
                yield _shown(Row(f"time over {OFF}: {named}", ratio, "x", "host_wall"))


def _check_same_logits(arms: Sequence[_Arm]) -> None:
    """Raise VkmoeError unless the logits of all arms are finite and the same to the last bit."""
    for arm in arms[1:]:
        for ours, theirs in zip(arms[0].logits, arm.logits, strict=True):
            if not (np.isfinite(ours).all() and np.array_equal(ours, theirs)):
                raise VkmoeError(
                    f"{arms[0].name!r} and {arm.name!r} give other logits",
                    "this is a bug, please report it with the card above",
                )


def _shown(row: Row) -> Row:
    print(row, flush=True)
    return row


if __name__ == "__main__":
    run_main(main)
