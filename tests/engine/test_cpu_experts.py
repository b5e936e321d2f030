"""Experts that the CPU computes beside a GPU: right, and the same bits whatever the timing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cpu_turns import listed_turns
from tests.engine.caches import assert_same_bits, rounding, rows, slow_reads
from tests.engine.test_batches import batch, joined, prompt, tokens_of
from tests.engine.test_logits import PHASES, TOLERANCE, error, run
from tests.engine.tiny import NAMES, ONE_OF_EACH, expected, lengthened, model_path
from tests.samples import sampled
from vkmoe.cli.notes import mode_line, opened
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.llm import LLM, demo_model_path

pytestmark = pytest.mark.usefixtures("one_device", "cpu_native")

ROUNDED_TOLERANCE = 0.03  # of the largest logit, where weights have blocks: activations are rounded
WAYS: dict[str, dict[str, Any]] = {
    "all": {"cpu_moe": True},
    "first layer": {"n_cpu_moe": 1},
    "misses": {"expert_mode": "hybrid", "expert_slots": 2},
}
N_TOKENS = 70


def with_experts(names: tuple[str, ...] | list[str]) -> list[str]:
    kinds = ("dense", "llama", "qwen35")
    return [name for name in names if name.split("_")[0] not in kinds and "dense" not in name]


def in_sample(name: str, way: str) -> bool:
    """Say whether it is one of each kind of model, in one way each; all ways occur."""
    return name in ONE_OF_EACH and [*WAYS][ONE_OF_EACH.index(name) % len(WAYS)] == way


@pytest.mark.parametrize(
    ("name", "way"),
    sampled(product(with_experts(NAMES), WAYS), lambda case: in_sample(*case)),
)
@pytest.mark.sample(3)
def test_tiny_models_agree_with_transformers(name: str, way: str) -> None:
    wanted = expected(name)
    ctx_size = int(wanted["ctx_size"]) if "ctx_size" in wanted else None
    config = EngineConfig(cache_type_k="f32", cache_type_v="f32", ctx_size=ctx_size, **WAYS[way])
    with Engine(model_path(name), config, checks=True) as engine:
        assert engine.plan.cpu_layers > 0
        has_blocks = "mxfp4" in name
        for phase in PHASES:
            logits, routing = run(engine, wanted["tokens"], phase)
            most = rounding(engine, TOLERANCE) if phase == "prompt" else TOLERANCE
            most = ROUNDED_TOLERANCE if has_blocks else most
            assert error(logits, wanted["logits"]) <= most, phase
            if "router_ids" in wanted and not has_blocks:
                np.testing.assert_array_equal(np.sort(routing), np.sort(wanted["router_ids"]))


# ----- the law -----


# Of the sample each model is in one way, and all ways occur.
LAW = [*product(("demo", *with_experts(ONE_OF_EACH)), WAYS)]


@pytest.fixture(
    scope="module",
    params=sampled(((case,) for case in LAW), lambda case: LAW.index(case[0]) % 4 == 0),
    ids=["-".join(case) for case in LAW],
)
def engines(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    """The same model with 1, 2 and 4 threads beside the GPU."""
    name, way = request.param
    path = demo_model_path() if name == "demo" else model_path(name)
    options: dict[str, Any] = {"ctx_size": N_TOKENS + 7, "parallel": 4, "ubatch_size": 64}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Engine(
                    lengthened(path, N_TOKENS + 7), EngineConfig(threads=n, **options, **WAYS[way])
                )
            )
            for n in (1, 2, 4)
        ]


@pytest.mark.sample(2)
def test_neither_threads_nor_cuts_nor_neighbours_change_a_bit(engines: list[Engine]) -> None:
    """Of prompts, which move nothing; then of the tokens that come first after them."""
    n_vocab = engines[0].n_vocab
    tokens, other = tokens_of(n_vocab, N_TOKENS), tokens_of(n_vocab, N_TOKENS)[::-1]
    wanted = prompt(engines[0], tokens, [1, 16, 15, 1, 37])
    ends = np.cumsum([1, 16, 15, 1, 37])
    of_prompt = prompt(engines[0], tokens, [9, 4], region=2)[1:]
    for engine in engines:
        for cuts in ([17, 16, 37], [64, 6]):
            found = prompt(engine, tokens, cuts, region=1)
            here = np.isin(np.cumsum(cuts), ends)
            assert here.any()
            assert_same_bits(found[here], wanted[np.isin(ends, np.cumsum(cuts))])
        prompt(engine, tokens, [9], region=0)
        prompt(engine, other, [5], region=1)
        engine.run(joined(batch(other, 5, 17, 1), batch(tokens, 9, 4, 0), batch(other, 0, 31, 2)))
        assert_same_bits(engine.full_logits(1)[None], of_prompt)
    alone = np.zeros((1, n_vocab), np.float32)
    for engine in engines:
        engine.run(batch(tokens, 13, 1, 0, "decode"))
        alone = engine.full_logits()[None] if engine is engines[0] else alone
        assert_same_bits(engine.full_logits()[None], alone)
    if engines[0].cache is None:  # else what has a slot is another expert by now
        rows_of = [batch(other, 22, 2, 1, "decode"), batch(tokens, 13, 1, 0, "decode"),
                   batch(other, 31, 1, 2, "decode")]  # fmt: skip
        for engine in engines:
            engine.run(joined(*rows_of))
            assert_same_bits(engine.full_logits(2)[None], alone)


def text_of(tokens: list[int], **asked: Any) -> tuple[NDArray[np.float32], int]:
    """The logits of each token, fresh from the start, and how many experts were moved for them."""
    config = EngineConfig(ctx_size=128, expert_mode="hybrid", expert_slots=12, **asked)
    with Engine(demo_model_path(), config, checks=True) as engine:
        assert engine.cache is not None and engine.profiler is not None
        n_filled = engine.cache.counters.n_uploads
        assert n_filled == 12 * engine.plan.cpu_layers, "all slots have an expert at the start"
        found = rows(engine, tokens)
        engine.settle()
        total = engine.profiler.served().total
        assert 0 < total.n_hits < total.n_uses
        return found, engine.cache.counters.n_uploads - n_filled


@pytest.mark.parametrize("copies", sampled(["wait", "overlap"], "overlap".__eq__))
def test_what_moves_when_follows_from_the_tokens_alone(
    copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of threads, and however slow copies are."""
    tokens = tokens_of(1000, 60)
    wanted, n_moved = text_of(tokens, threads=2, expert_copies=copies)
    assert n_moved > 10
    found, n = text_of(tokens, threads=1, expert_copies=copies)
    assert_same_bits(found, wanted)
    slow_reads(monkeypatch, 0.01)  # longer than most tokens take
    found, again = text_of(tokens, threads=2, expert_copies=copies)
    assert_same_bits(found, wanted)
    assert again == n == n_moved


def test_one_cut_of_prompts_whatever_time_they_take() -> None:
    """Where what has a slot depends on what was counted, and when."""
    with Engine(demo_model_path(), EngineConfig(**WAYS["misses"], ctx_size=64)) as engine:
        largest = engine.workspace.row_sizes["prompt"][-1]
        assert engine.prompt_rows == largest
        engine.run_prompt(tokens_of(1000, 40))
        assert engine.prompt_rows == largest


# ----- plans -----


@pytest.mark.parametrize("way", WAYS)
def test_the_line_at_the_start_tells_what_is_done(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the counters of what the CPU computed and of what was found on the device."""
    turns = listed_turns(monkeypatch)
    config = EngineConfig(ctx_size=64, **WAYS[way])
    with opened(None, config, verbose=False, quiet=False) as llm:
        llm.generate("def f(x):", max_tokens=6, temp=0, ignore_eos=True)
        engine = llm.engine
        assert engine.profiler is not None
        hits = [engine.profiler.served(i).total for i in range(len(llm.spec.moe_layers))]
        n_runs = turns.count(0)
    lines = capsys.readouterr().err.splitlines()
    line = next(line for line in lines if line.startswith("experts: "))
    assert line == f"experts: {mode_line(llm.plan)}"
    assert turns == list(range(llm.plan.cpu_layers)) * n_runs and n_runs >= 6
    on_device = [tally.n_hits == tally.n_uses for tally in hits]
    if way == "misses":
        assert "2 of 32 of each layer on the device, the CPU computes the others" in line
        n_uses, n_hits = (sum(column) for column in zip(*hits, strict=True))
        assert 0 < n_hits < n_uses
    else:
        n_layers = {"all": 6, "first layer": 1}[way]
        assert line.startswith(f"experts: cpu, the CPU computes those of {n_layers} layers")
        assert on_device == [i >= n_layers for i in range(6)]


def test_experts_of_the_other_layers_are_on_the_device() -> None:
    path = demo_model_path()
    with Engine(path, EngineConfig(ctx_size=64, n_cpu_moe=2)) as engine:
        assert engine.plan.cpu_layers == 2
        (rest,) = (line for line in engine.plan.lines if line.item == "experts of the other layers")
        n_layers = len(engine.spec.moe_layers)
    with Engine(path, EngineConfig(ctx_size=64)) as engine:
        (whole,) = (line for line in engine.plan.lines if line.item == "experts")
    assert abs(rest.n_bytes - whole.n_bytes * (n_layers - 2) / n_layers) < 1 << 17


def test_models_without_experts_have_nothing_for_the_cpu() -> None:
    with LLM(model_path("dense_tied"), ctx_size=32, cpu_moe=True) as llm:
        assert llm.plan.notes == ("--cpu-moe has no effect: the model has no experts",)
        assert llm.engine.cpu is None


@pytest.mark.parametrize("n", [0, 99])
def test_more_layers_than_there_are_count_as_all(n: int) -> None:
    with LLM(model_path("moe_plain"), ctx_size=32, n_cpu_moe=n) as llm:
        n_layers = len(llm.spec.moe_layers)
        assert llm.plan.cpu_layers == min(n, n_layers)
        assert llm.plan.mode.name == ("cpu" if n else "resident")
