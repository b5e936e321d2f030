"""Random arrivals, cancellations and ends on a real engine, as a server would drive it.

Every reply is the one that is generated alone, to the bit of the logits that its tokens were chosen
by; nothing is left behind.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import model_path
from tests.live import live_objects
from vkmoe.batch import TopLogits
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.engine import Engine
from vkmoe.generate.loop import Generation, Piece, Request
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.llm import read_tokenizer

pytestmark = pytest.mark.usefixtures("one_device")

CTX_SIZE, N_REGIONS = 96, 4


class Place(NamedTuple):
    options: dict[str, Any]  # which say where experts are
    model: str = "moe_plain"
    n_rows: int = 40  # of a chunk, and so the margin of rings


KEPT = {"expert_slots": 2, "promote_on_read": True}
EXCHANGING = {"expert_slots": 4, "host_pool": "256KiB", "promote_on_read": True}
STEPPED = {"executor": "stepped", "expert_slots": 2, "host_pool": "200KiB", "miss": "gather"}
PLACES = {
    "resident": Place({}),
    "kept as they are read": Place(KEPT),
    "exchanging": Place(EXCHANGING),
    "stepped, few slots, half a pool": Place(STEPPED),
    "windows in rings": Place({}, "gptoss_odd", 12),
    "states": Place(KEPT, "qwen35moe_odd"),
}


class Watched(Generation):
    """A reply that keeps the bits of the logits that each of its tokens was chosen by."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.logits: list[bytes] = []

    def choose(self, top: TopLogits, fetch_logits: Callable[[], NDArray[np.float32]]) -> int | None:
        self.logits.append(fetch_logits().tobytes())
        return super().choose(top, fetch_logits)


class Reply(NamedTuple):
    pieces: list[Piece]
    logits: list[bytes]
    reason: str | None


def begin(scheduler: Scheduler, request: Request, tokenizer: Tokenizer) -> Watched:
    generation = Watched(request, tokenizer, CTX_SIZE)
    scheduler.submit(generation)
    return generation


def reply_of(generation: Watched) -> Reply:
    return Reply(generation.take_pieces(), generation.logits, generation.finish_reason)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str, Request], Reply]]:
    """The reply of a model's engine that runs nothing else and goes on from nothing."""
    with ExitStack() as stack:

        @cache
        def engine_of(name: str) -> tuple[Engine, Tokenizer]:
            opened = Engine(model_path(name), EngineConfig(ctx_size=CTX_SIZE))
            return stack.enter_context(opened), read_tokenizer(opened.model)

        def generate(name: str, request: Request) -> Reply:
            engine, tokenizer = engine_of(name)
            scheduler = Scheduler(engine)
            generation = begin(scheduler, request, tokenizer)
            while scheduler.has_work:
                scheduler.step()
            return reply_of(generation)

        yield generate


def random_request(draw: random.Random, texts: Sequence[Sequence[int]], n_vocab: int) -> Request:
    text = list(draw.choice(texts))[: draw.choice([70, draw.randrange(1, 48)])]
    text += [draw.randrange(n_vocab) for _ in range(draw.randrange(0, 6))]
    sampling = SamplingConfig(
        temp=draw.choice([0.0, 0.7, 1.2]),
        top_k=draw.choice([0, 3, 40]),
        repeat_penalty=draw.choice([1.0, 1.0, 1.3]),
        seed=draw.randrange(100),
    )
    return Request(
        tuple(text),
        sampling,
        max_tokens=draw.choice([0, 1, 5, 14]),
        stop=draw.choice([(), ("a",), ("e",)]),
        ignore_eos=draw.random() < 0.5,
    )


def run_script(engine: Engine, seed: int) -> list[tuple[Request, Watched]]:
    """Prompts in chunks of any length; some texts go on from replies, some repeat themselves."""
    draw, tokenizer = random.Random(seed), read_tokenizer(engine.model)
    scheduler = Scheduler(engine, "lookup" if seed % 2 else "none")
    texts = [[draw.randrange(engine.n_vocab) for _ in range(n)] * (48 // n) for n in (48, 48, 6)]
    asked: list[tuple[Request, Watched]] = []
    for _ in range(30):
        if draw.random() < 0.25:
            replies = [generation.tokens for _, generation in asked]
            request = random_request(draw, [*texts, *replies], engine.n_vocab)
            asked.append((request, begin(scheduler, request, tokenizer)))
        if asked and draw.random() < 0.06:
            draw.choice(asked)[1].cancel()
        if draw.random() < 0.5:
            n_most = engine.workspace.row_sizes["prompt"][-1]
            engine._programs.prompt_rows = min(n_most, draw.choice([1, 2, 7, 16, 33, 40]))
        scheduler.step()
    while scheduler.has_work:
        scheduler.step()
    assert scheduler.regions.n_free == N_REGIONS, f"script {seed} leaves a region taken"
    return asked


@pytest.mark.usefixtures("own_device")
@pytest.mark.parametrize("n_scripts", [8, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sample(2)
def test_every_reply_equals_the_one_generated_alone(
    place: str, n_scripts: int, alone: Callable[[str, Request], Reply]
) -> None:
    """Scripts are shared out among the places of experts."""
    objects, n_threads = live_objects(), threading.active_count()
    options, name, n_rows = PLACES[place]
    config = EngineConfig(ctx_size=CTX_SIZE, parallel=N_REGIONS, ubatch_size=n_rows, **options)
    seeds = range(list(PLACES).index(place), n_scripts, len(PLACES))
    with Engine(model_path(name), config, checks=True) as engine:
        scripts = {seed: run_script(engine, seed) for seed in seeds}
    del engine
    assert live_objects() == objects and threading.active_count() == n_threads
    for seed, asked in scripts.items():
        for request, generation in asked:
            wanted, found = alone(name, request), reply_of(generation)
            if generation.is_cancelled and found.reason == "interrupt":
                n_logits, n_pieces = len(found.logits), len(found.pieces)
                wanted = Reply(wanted.pieces[:n_pieces], wanted.logits[:n_logits], "interrupt")
            assert found == wanted, f"script {seed}, {request}"
