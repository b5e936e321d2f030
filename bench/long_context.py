"""How memory follows a text that grows to 30,000 tokens, and how fast it is decoded meanwhile.

python -m bench.long_context --record --picture docs/context.png

A synthetic model with 6 layers of 128 experts is on the device, taken for a card with memory of its
own that holds most of the experts beside a short text. A prompt is read in steps;
behind each, tokens are decoded and taken back. Then another text begins, and ends short. Said are
the bytes of the KV caches and of the slots, and the speeds before, while and after the caches grow.
The logits at the end of the long text must be those of a card with room for everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from bench.command import command_line, finish, run_main
from bench.models import custom_model, default_cache, shape_of
from bench.plans_worker import bound
from vkmoe.batch import TokenBatch
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.bench.plot import COLOURS
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.gpu import arena
from vkmoe.placement import experts

SIZES = {"n_layers": 6, "n_experts": 128, "n_experts_used": 4, "context": 32_768}
CARD_BYTES = 604 << 20  # of which most is left to the desktop
CHUNK_BYTES = 1 << 20
TYPES: dict[str, Any] = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
STEP, N_DECODED, N_SHORT = 1000, 8, 1000  # tokens
MB = 1e6


class Moment(NamedTuple):
    """What was measured behind a step."""

    seconds: float  # since the text began
    n_tokens: int  # of the text
    cache_bytes: int
    slot_bytes: int
    step_seconds: float  # that the step's part of the prompt took, with what moved
    rate: float  # tokens per second of a reply


def main() -> None:
    """Measure, compare, report, draw."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=30_000, help="of the text (default: 30000)")
    parser.add_argument("--picture", type=Path, help="draw it (needs matplotlib)")
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    model = custom_model("long-6x128", shape_of("tiny", **SIZES), "q4_k_m", options.cache)
    tokens = np.random.default_rng(0).integers(0, 1000, options.tokens).tolist()
    print(f"reading {options.tokens:,} tokens with a cache that does not move ...", flush=True)
    with Engine(model, EngineConfig(options.device, options.tokens, **TYPES)) as engine:
        wanted = logits_behind(engine, tokens)
    # Slots give memory back in chunks: of a small card small ones.
    chunks = [patch.object(module, "SLOT_CHUNK", CHUNK_BYTES) for module in (arena, experts)]
    with bound(CARD_BYTES), chunks[0], chunks[1], _on_card(model, options.device) as engine:
        began = time.perf_counter()
        long = list(_told(moments(engine, tokens, began)))
        same = bool(np.array_equal(engine.full_logits(), wanted))
        short = list(_told(moments(engine, tokens[::-1][:N_SHORT], began)))
    if not same:
        raise VkmoeError("a cache that grew gives other logits", "this is a bug, please report it")
    found = {"model": model.name, "same_logits": same, "rows": [*_rows(long, short)]}
    found["moments"] = [each._asdict() for each in (*long, *short)]
    if options.picture is not None:
        _draw(long, short, options.picture, card)
    finish("long_context", card, found, options.record)


def _on_card(model: Path, device: str) -> Engine:
    engine = Engine(model, EngineConfig(device, expert_mode="cache", **TYPES))
    assert engine.plan.gives_slots, engine.plan
    return engine


def _told(found: Iterator[Moment]) -> Iterator[Moment]:
    """Print each as it comes."""
    for each in found:
        sizes = f"KV caches {each.cache_bytes / MB:6.1f} MB  slots {each.slot_bytes / MB:6.1f} MB"
        rate = f"{each.rate:5.1f} tok/s"
        print(f"{each.seconds:7.1f} s  {each.n_tokens:6} tokens  {sizes}  {rate}", flush=True)
        yield each


def logits_behind(engine: Engine, tokens: list[int]) -> Any:
    """Read a prompt, and return its last logits."""
    engine.run_prompt(tokens)
    return engine.full_logits().copy()


def moments(engine: Engine, tokens: list[int], since: float) -> Iterator[Moment]:
    """Read a text in steps; behind each, decode tokens and take them back."""
    engine.rewind(0, 0)
    engine.settle()  # what the text before does not need any more goes back to the slots
    for first in range(0, len(tokens), STEP):
        step, began = tokens[first : first + STEP], time.perf_counter()
        _read(engine, step, first)
        read = time.perf_counter()
        end = first + len(step)
        for position in range(end, min(end + N_DECODED, engine.ctx_size)):
            engine.run_token(tokens[position % len(tokens)], position)
        decoded = time.perf_counter()
        engine.rewind(0, end)
        _read(engine, step[-1:], end - 1)  # its logits are the last ones again
        cache = engine.cache
        assert cache is not None
        slots = cache.residency.locations
        held = zip(slots.capacities.tolist(), slots.pools, strict=True)
        n_bytes = sum(n_slots * pool.slot_bytes for n_slots, pool in held)
        rate = N_DECODED / (decoded - read)
        yield Moment(decoded - since, end, engine._caches.n_bytes, n_bytes, read - began, rate)


def _read(engine: Engine, tokens: list[int], position: int) -> None:
    """Process a part of a prompt; its last token leaves logits."""
    rows = engine.prompt_rows
    for first in range(0, len(tokens), rows):
        part = tuple(tokens[first : first + rows])
        n, start = len(part), position + first
        wants = (False,) * (n - 1) + (True,)
        engine.run(TokenBatch(part, tuple(range(start, start + n)), (0,) * n, wants, "prompt"))


def _rows(long: list[Moment], short: list[Moment]) -> Iterator[Row]:
    """Sum up speeds of replies behind short and long texts, and what growing costs a step."""
    third = max(1, len(long) // 3)
    parts = {
        "behind the first third of the text": [each.rate for each in long[:third]],
        "behind the last third of it": [each.rate for each in long[-third:]],
        "behind a short text afterwards": [each.rate for each in short],
    }
    for what, rates in parts.items():
        yield Row(f"decode {what}", summarise(rates), "tok/s", "host_wall")
    grown = [i for i in range(1, len(long)) if long[i].cache_bytes > long[i - 1].cache_bytes]
    shares = []
    for i in grown:
        around = long[max(0, i - 1) : i] + long[i + 1 : i + 2]
        shares.append(long[i].step_seconds / mean(each.step_seconds for each in around))
    if shares:
        what = f"a step of {STEP} tokens in which the caches grew, beside those around it"
        yield Row(what, summarise(shares), "x", "host_wall")
    yield Row("times that the caches grew", summarise([float(len(grown))]), "", "count")


def _draw(long: list[Moment], short: list[Moment], path: Path, card: dict[str, Any]) -> None:
    """Draw bytes and speeds over time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    # What was seen behind a step is drawn for all of it.
    moments, figure = [*long, *short], Figure(figsize=(8, 5), layout="constrained")
    memory, speed = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    seconds = [each.seconds for each in moments]
    parts = {
        "slots of experts": [each.slot_bytes / MB for each in moments],
        "KV caches": [each.cache_bytes / MB for each in moments],
    }
    memory.stackplot(seconds, *parts.values(), labels=parts, colors=COLOURS, step="pre", alpha=0.8)
    memory.set_ylabel("device memory, MB")
    memory.legend(loc="lower left")
    speed.plot(seconds, [each.rate for each in moments], color=COLOURS[2], drawstyle="steps-pre")
    speed.set_ylabel("reply, tok/s")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("seconds")
    for axes in (memory, speed):
        axes.axvline(long[-1].seconds, color="black", linewidth=0.8, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
    memory.set_title(
        f"A text of {long[-1].n_tokens:,} tokens, then one of {short[-1].n_tokens:,} "
        f"({card['device'].partition('(')[0].strip()} taken for a card)", fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run_main(main)
