"""The simulator's hits are the engine's, layer by layer, for the trace that the engine recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import recache
from tests.engine.test_placement_law import mixed
from tests.experts.pins import named, warm
from vkmoe.batch import Phase, RunResult, TokenBatch
from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.experts.decide.keys import Mask
from vkmoe.experts.decide.settings import CacheSettings, cache_settings, host_pools, make_pools
from vkmoe.experts.decide.token_table import History
from vkmoe.experts.records.trace import Trace, TraceWriter, joined, read_trace
from vkmoe.experts.store.cache import ExpertCache
from vkmoe.experts.study.replay import SimulationResult, simulate
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.llm import LLM, demo_model_path
from vkmoe.weights.sizes import trace_header

pytestmark = pytest.mark.usefixtures("one_device")

__all__ = ["mixed"]

# As on a device that shares the host's memory: there a copy is in its slot for the next token.
AT_ONCE: dict[str, Any] = {"expert_copies": "wait", "promote_on_read": False}
TEXT = (Path(__file__).parent / "tiny.py").read_text()
PROFILE = 2.0 ** -(np.arange(6 * 32) % 13)  # counts of some earlier run


def record(engine: Engine, tokens: Sequence[int], path: Path) -> Trace:
    """The trace of a sequence, by way of a file."""
    with TraceWriter(path, trace_header(engine.spec, engine.model.tensors), b"salt") as writer:
        for position, token in enumerate(tokens):
            engine.run_token(token, position, with_logits=False)
            writer.write(engine.routing(), is_prompt=False, token=token)
    return read_trace(path)


def note_hits(cache: ExpertCache, n_hits: list[int]) -> None:
    """From now on note the hits of each run."""
    after_run = cache.after_run

    def noted(*arguments: Any) -> Mask:
        hits = after_run(*arguments)
        n_hits.append(int(hits.sum()))
        return hits

    cache.after_run = noted  # type: ignore[method-assign,assignment]


def assert_agrees(engine: Engine, result: SimulationResult) -> None:
    """Uses and hits of each layer, and the bytes read in place."""
    profiler, trace = engine.profiler, result.trace
    assert profiler is not None and profiler.n_tokens == trace.n_tokens
    uses = [np.bincount(layer.ravel(), minlength=profiler.space.n_experts)
            for layer in trace.routing.transpose(1, 0, 2)]  # fmt: skip
    assert np.array_equal(profiler.counts[0], uses)
    assert profiler.counts[1].sum(axis=1).tolist() == result.layer_hits.tolist()
    if engine.cache is not None:
        assert engine.cache.counters.missed_bytes == round(result.read_bytes * trace.n_tokens)


# ----- as users open it -----


@pytest.mark.parametrize(
    ("options", "seed"),
    [
        ({"expert_slots": 8}, None),
        ({"expert_slots": 9, "expert_allocation": "global", "expert_policy": "lfru",
          "moe_warmpin": 3, "moe_warmpin_after": 20}, None),
        ({"expert_cache": "7MiB", "expert_policy": "slru"}, None),
        ({"expert_slots": 16, "expert_resident_ids": "5,1,30", "moe_warmpin": 0,
          "expert_policy": "lru"}, None),
        ({"expert_slots": 8}, PROFILE),
        ({"expert_slots": 32}, None),
        ({"expert_slots": 6, "moe_predict_prefetch": False}, None),
        ({"expert_slots": 6, "expert_policy": "slru"}, PROFILE),
        ({"expert_slots": 6, "executor": "stepped"}, None),
    ],
    ids=["layer", "global", "uneven", "manual", "profile", "all",
         "no prefetch", "slru", "stepped"],
)  # fmt: skip
@pytest.mark.sample(3)
def test_with_the_options_of_the_engine(tmp_path: Path, options: dict[str, Any], seed: Any) -> None:
    """Two prompts one after the other through one cache."""
    config, model = EngineConfig(ctx_size=64, **AT_ONCE, **options), demo_model_path()
    with Engine(model, config, seed=None if seed is None else History(seed)) as engine:
        tokens = Tokenizer.from_file(engine.model.file).encode(TEXT)
        parts = [tokens[:34], tokens[200:224]]
        trace = joined([record(engine, part, tmp_path / "t.jsonl") for part in parts])
        assert trace.starts == (0, 34)
        slots = engine.plan.expert_slots or (32,) * 6
        pools = make_pools(slots, trace.header.span_bytes, 4, config.expert_allocation)
        settings = cache_settings(config, engine.spec.name, engine.spec.experts, engine.plan)
        result = simulate(trace, settings, pools, seed)
        assert_agrees(engine, result)
        assert result.hit_rate == 1 or 0.1 < result.hit_rate < 0.95


@pytest.mark.parametrize("host_pool", ["15000KiB", "17MiB", "22MiB"])
@pytest.mark.sample(1)
def test_where_experts_exchange_places(tmp_path: Path, host_pool: str) -> None:
    """With a few places to spare, with many, and with nearly all homes."""
    config = EngineConfig(ctx_size=64, **AT_ONCE, expert_slots=12, host_pool=host_pool)
    with Engine(demo_model_path(), config) as engine:
        tokens = Tokenizer.from_file(engine.model.file).encode(TEXT)[:60]
        trace = record(engine, tokens, tmp_path / "t.jsonl")
        made, spans = engine.plan, trace.header.span_bytes
        assert made.exchanges and made.executor == "fused"
        pools = make_pools(made.expert_slots, spans, 4, config.expert_allocation)
        settings = cache_settings(config, engine.spec.name, engine.spec.experts, made)
        result = simulate(trace, settings, pools, places=host_pools(made.host_slots, spans, 4))
        assert_agrees(engine, result)
        assert 0.1 < result.hit_rate < 0.95


@pytest.mark.parametrize("n_rows", [1, 5])
def test_with_prompts_whose_tokens_are_known_ahead(n_rows: int, n_slots: int = 6) -> None:
    """Token by token, the hits of every single one; and in chunks, where the last has fewer rows.

    Then two tokens that are known one by one, as in a reply.
    """
    config = EngineConfig(ctx_size=64, **AT_ONCE, expert_slots=n_slots)
    with Engine(demo_model_path(), config) as engine:
        tokens = Tokenizer.from_file(engine.model.file).encode(TEXT)[:34]
        n_prompt = len(tokens) - 2
        runs = [*range(0, n_prompt, n_rows), n_prompt, n_prompt + 1]
        routing, cache = [], engine.cache
        n_hits: list[int] = []
        assert cache is not None
        note_hits(cache, n_hits)
        for first, end in pairwise([*runs, len(tokens)]):
            rows = range(first, end)
            later = tuple(tokens[end:n_prompt])
            phase: Phase = "prompt" if n_rows > 1 and first < n_prompt else "decode"
            wants, alone = (False,) * len(rows), (0,) * len(rows)
            chunk = tuple(tokens[first:end])
            routing.append(
                engine.run(TokenBatch(chunk, tuple(rows), alone, wants, phase, later)).routing
            )
        trace = Trace(
            trace_header(engine.spec, engine.model.tensors),
            np.concatenate(routing),
            np.arange(len(tokens)) < n_prompt,
            ids=np.array(tokens),
            runs=tuple(runs),
        )
        settings = cache_settings(config, engine.spec.name, engine.spec.experts, engine.plan)
        pools = make_pools((n_slots,) * 6, trace.header.span_bytes, 4, "layer")
        result = simulate(trace, settings, pools)
        ends = np.array([*runs, len(tokens)])
        assert n_hits == [result.hits[a:b].sum() for a, b in pairwise(ends)]
        engine.settle()
        assert engine.cache is not None
        assert engine.cache.counters.n_uploads == result.n_promoted.sum() > 0


def test_with_replies_one_after_the_other() -> None:
    """What moves after a reply is decided when the next prompt is known. Runs are of one row."""
    config = EngineConfig(ctx_size=64, **AT_ONCE, expert_slots=8, ubatch_size=1)
    with LLM(config=config) as llm:
        routing: list[NDArray[np.uint32]] = []
        tokens: list[int] = []
        is_prompt: list[bool] = []
        starts: list[int] = []
        n_hits: list[int] = []
        cache = llm.engine.cache
        assert cache is not None

        def record(batch: TokenBatch, result: RunResult) -> None:
            if batch.positions == (0,):
                starts.append(len(tokens))
            routing.append(result.routing)
            tokens.extend(batch.tokens)
            is_prompt.append(batch.positions[0] < 9)

        note_hits(cache, n_hits)
        llm.scheduler.after_run = record
        text = llm.tokenizer.encode(TEXT)
        for first in (0, 40, 80, 120):
            llm.forget()
            llm.generate(text[first : first + 9], max_tokens=6, ignore_eos=True, seed=1)
        assert len(starts) == 4 and len(tokens) == len(n_hits) == 4 * 14
        engine = llm.engine
        header = trace_header(engine.spec, engine.model.tensors)
        trace = Trace(header, np.concatenate(routing), np.array(is_prompt), tuple(starts),
                      ids=np.array(tokens))  # fmt: skip
        settings = cache_settings(config, engine.spec.name, engine.spec.experts, engine.plan)
        result = simulate(trace, settings, make_pools((8,) * 6, header.span_bytes, 4, "layer"))
        assert n_hits == result.hits.sum(axis=1).tolist()


# ----- every policy and choice, in an engine opened once -----

CHOICES: list[dict[str, Any]] = [
    {},
    {"pins": (warm(2, 12),)},
    {"pins": (named(0, 1, 2), warm(1))},
    {"pins": (named(6, 3),)},
]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
OPENINGS: list[tuple[str, int, SlotSharing]] = [
    ("demo", 8, "global"),
    ("demo", 12, "layer"),
    ("mixed", 1, "layer"),
    ("mixed", 2, "global"),
    ("mixed", 5, "layer"),
    ("mixed", 7, "global"),
]


SAMPLE = (("demo", 12, "layer"), ("mixed", 2, "global"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(item, id="-".join(map(str, item)), marks=[pytest.mark.full][item in SAMPLE :])
        for item in OPENINGS
    ],
)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Path, int, SlotSharing]]:
    name, n_slots, allocation = request.param
    model = demo_model_path() if name == "demo" else request.getfixturevalue("mixed")
    config = EngineConfig(
        ctx_size=64, **AT_ONCE, expert_slots=n_slots, expert_allocation=allocation
    )
    with Engine(model, config) as engine:
        yield engine, model, n_slots, allocation


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sample(3)
def test_with_every_policy_and_choice(
    opened: tuple[Engine, Path, int, SlotSharing], policy: PolicyName, tmp_path: Path
) -> None:
    engine, model, n_slots, allocation = opened
    assert engine.spec.experts is not None
    n_used, n_vocab = engine.spec.experts.n_used, engine.n_vocab
    n_tokens = 36 if model != demo_model_path() else 24
    tokens = [(7 * i * i + 3 * (i % 4)) % (n_vocab - 1) + 1 for i in range(n_tokens)]
    n_hits = []
    # Tokens of the demo model take long; its engine is opened with other choices above.
    for choice in CHOICES if model != demo_model_path() else CHOICES[1:4:2]:
        if any(rule.n > n_slots for rule in choice.get("pins", ())):
            continue
        settings = CacheSettings(policy, **choice)
        recache(engine, settings)
        trace = record(engine, tokens, tmp_path / "t.jsonl")
        slots = (n_slots,) * trace.header.n_layers
        result = simulate(
            trace, settings, make_pools(slots, trace.header.span_bytes, n_used, allocation)
        )
        assert_agrees(engine, result)
        n_hits.append(result.hits.sum())
    assert min(n_hits) > 0
    assert n_slots == 1 or len(set(n_hits)) > 1, "the choices decided nothing"
