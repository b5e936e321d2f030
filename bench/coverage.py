"""Decode speed with a part of the experts on the device, relative to all of them.

python -m bench.coverage
python -m bench.coverage --model MODEL --shares 100,50,25 --record

One engine for each share of the experts, all open at once (--one-at-a-time where memory is too
small for that: each is then opened and warmed up anew in every turn). All run the same pieces of
three texts (bench/prompts/) and must find the same logits to the last bit. Beside the speed: hits,
bytes read in place from host memory, and experts copied. On a device that shares the host's memory
a cache gains nothing; its cost is what is measured there.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.routing import PROMPTS, prompt_text
from bench.same_logits import check_same_logits
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.llm import demo_model_path, read_tokenizer
from vkmoe.models import open_model

SHARES = (100.0, 78.0, 50.0, 25.0)
CONTEXT = 512
MIB = 1 << 20

Pieces = Sequence[Sequence[int]]  # token ids of each


class _Counts(NamedTuple):
    """What an engine did since it was opened, or in some tokens."""

    tokens: int
    uses: int
    hits: int
    missed_bytes: int
    uploads: int


def main() -> None:
    """Open, warm up, take turns."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="default: the demo")
    parser.add_argument("--shares", type=_shares, default=SHARES, help="%%, default: 100,78,50,25")
    parser.add_argument("--tokens", type=int, default=64, help="in each turn (default: 64)")
    parser.add_argument("--warm", type=int, default=6, help="pieces run before (default: 6)")
    parser.add_argument("--one-at-a-time", action="store_true")
    options = parser.parse_args()
    if not 1 <= options.tokens <= CONTEXT or options.warm < 0:
        parser.error(f"--tokens: from 1 to {CONTEXT}; --warm: at least 0")
    with open_model(options.model) as file:
        tokenizer = read_tokenizer(file)
    if file.spec.experts is None:
        raise VkmoeError(f"{options.model} has no experts", "give a mixture-of-experts model")
    pieces = _pieces([tokenizer.encode(prompt_text(name)) for name in PROMPTS], options.tokens)
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    arms = [_Arm(share, file.spec.experts.n_experts, pieces, options) for share in options.shares]
    with ExitStack() as stack:
        for arm in arms:
            if not options.one_at_a_time:
                stack.enter_context(arm.kept_open())
        speeds = take_turns({arm.name: arm.turn for arm in arms}, options.repeats, "tok/s")
    check_same_logits(arms)
    results = {"model": options.model.name, **_results(arms, speeds, card)}
    results |= {"tokens": options.tokens, "warm": options.warm, "context": CONTEXT}
    finish("coverage", card, results, options.record)


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(piece) for piece in text.split(","))
    if not all(0 < share <= 100 for share in shares) or len(set(shares)) < len(shares):
        raise argparse.ArgumentTypeError("different numbers above 0, at most 100")
    return shares


def _pieces(texts: Sequence[Sequence[int]], n_tokens: int) -> Pieces:
    """Pieces of equal length, of the texts in turn."""
    n_each = min(len(text) for text in texts) // n_tokens
    if not n_each:
        raise VkmoeError(f"a text has fewer than {n_tokens} tokens", "lower --tokens")
    starts = range(0, n_each * n_tokens, n_tokens)
    return [text[start : start + n_tokens] for start in starts for text in texts]


class _Arm:
    """The model with one share of its experts on the device."""

    def __init__(
        self, share: float, n_experts: int, pieces: Pieces, options: argparse.Namespace
    ) -> None:
        self.name = f"{share:g} %"
        self.slots = max(1, round(share / 100 * n_experts))
        self.counts = _Counts(0, 0, 0, 0, 0)  # of the timed tokens
        self.logits: list[NDArray[np.float32]] = []  # after each turn
        self._options, self._warm = options, pieces[: options.warm]
        self._upcoming = itertools.islice(itertools.cycle(pieces), options.warm, None)
        self._open: Engine | None = None

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Turns use one engine."""
        with self._opened() as self._open:
            yield
        self._open = None

    def turn(self) -> float:
        """Tokens per second on the next piece."""
        if self._open is not None:
            return self._measure(self._open)
        with self._opened() as engine:
            return self._measure(engine)

    @contextmanager
    def _opened(self) -> Iterator[Engine]:
        """An engine that has been warmed up."""
        options = self._options
        config = EngineConfig(options.device, CONTEXT, expert_slots=self.slots)
        with Engine(options.model, config) as engine:
            for piece in self._warm:
                engine.run_tokens(piece, 0)
            yield engine

    def _measure(self, engine: Engine) -> float:
        piece = next(self._upcoming)
        before, started = _counted(engine), time.perf_counter()
        for position, token in enumerate(piece):
            engine.run_token(token, position)
        speed = len(piece) / (time.perf_counter() - started)
        new = (after - then for after, then in zip(_counted(engine), before, strict=True))
        self.counts = _Counts(*(a + b for a, b in zip(self.counts, new, strict=True)))
        self.logits.append(engine.full_logits().copy())
        print(f"  {self.name}, {self.slots} slots: {speed:.2f} tok/s", flush=True)
        return speed


def _counted(engine: Engine) -> _Counts:
    assert engine.profiler is not None
    total, cache = engine.profiler.served().total, engine.cache
    moved = (cache.counters.missed_bytes, cache.counters.n_uploads) if cache else (0, 0)
    return _Counts(engine.profiler.n_tokens, total.n_uses, total.n_hits, *moved)


def _results(arms: Sequence[_Arm], speeds: Arms, card: dict[str, Any]) -> dict[str, Any]:
    """Rows, what moved, and ratios to the first arm if they were taken often enough."""
    print()
    rows, details = [], {}
    for arm in arms:
        counts = arm.counts
        found: dict[str, Any] = {
            "slots": arm.slots,
            "hit_rate": counts.hits / counts.uses,
            "read_bytes_per_token": counts.missed_bytes / counts.tokens,
            "uploads_per_token": counts.uploads / counts.tokens,
            "values": speeds.values(arm.name),
        }
        note = (
            f"{100 * found['hit_rate']:.1f} % hits; per token {found['uploads_per_token']:.1f} "
            f"uploads, {found['read_bytes_per_token'] / MIB:.2f} MiB read in place"
        )
        what = f"{arm.name} of the experts, {arm.slots} slots"
        rows.append(Row(what, speeds.summary(arm.name), speeds.unit, "host_wall", note))
        print(rows[-1])
        details[arm.name] = found
    print("the logits of all are equal to the last bit\n")
    for arm in arms[1:]:
        if len(speeds.values(arm.name)) >= MIN_REPEATS:
            ratio = speeds.ratio(arm.name, arms[0].name, card)
            details[arm.name]["relative"] = ratio
            print(f"{arm.name} / {arms[0].name} = {ratio} (medians, 95 % interval, in turns)")
    return {"rows": rows, "arms": details}


if __name__ == "__main__":
    run_main(main)
