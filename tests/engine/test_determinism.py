"""The law of the project: placement, uploads, reuse and free order never change a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.engine.tiny import Tensor, expected, model_path, retyped, rewrite
from vkmoe.batch import BatchKind
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import Command, Program
from vkmoe.kernels.tuning import Tuning
from vkmoe.llm import LLM

pytestmark = pytest.mark.usefixtures("one_device")

MODEL = "moe_plain"
TOKENS = expected(MODEL)["tokens"].tolist()
CONFIG = EngineConfig(ctx_size=64)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose V, up and down have types of their own."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            for name, kind in (("attn_v", "F16"), ("ffn_up_exps", "Q8_0"),
                               ("ffn_down_exps", "BF16")):  # fmt: skip
                key = f"blk.{layer}.{name}.weight"
                tensors[key] = retyped(tensors[key], kind)

    target = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return rewrite(model_path(MODEL), target, change)


def open_and_run(path: Path, tuning: Tuning | None = None) -> Rows:
    with Engine(path, CONFIG, tuning=tuning) as engine:
        return rows(engine, TOKENS)


@pytest.mark.sample(1)
def test_the_same_run_twice_gives_the_same_bits(mixed: Path, tuning: Tuning | None) -> None:
    with Engine(mixed, CONFIG, tuning=tuning) as engine:
        first = rows(engine, TOKENS)
        assert_same_bits(rows(engine, TOKENS), first)
    assert_same_bits(open_and_run(mixed, tuning), first)


def test_tokens_without_logits_do_the_same(mixed: Path) -> None:
    with Engine(mixed, CONFIG) as engine:
        wanted = rows(engine, TOKENS)[-1]
        engine.run_tokens(TOKENS, 0)
        assert_same_bits(engine.full_logits(), wanted)


def test_a_shorter_context_and_what_was_there_before_do_not_matter(mixed: Path) -> None:
    with Engine(mixed, CONFIG) as engine:
        wanted = rows(engine, TOKENS[:8])
        rows(engine, TOKENS[::-1])  # other keys and values at all positions
        assert_same_bits(rows(engine, TOKENS[:8]), wanted)


@pytest.mark.sample(1)
def test_the_size_of_the_context_does_not_matter(mixed: Path, tuning: Tuning | None) -> None:
    """At positions of several splits, in a context that they fill and in a larger one."""
    tokens = (TOKENS * 8)[:80]
    found = []
    for ctx_size in (80, 128):
        with Engine(mixed, replace(CONFIG, ctx_size=ctx_size), tuning=tuning) as engine:
            found.append(rows(engine, tokens))
    assert_same_bits(*found)


def test_experts_in_host_memory_give_the_same_bits(mixed: Path, tuning: Tuning | None) -> None:
    in_device = open_and_run(mixed, tuning)
    with Engine(mixed, replace(CONFIG, expert_cache="1KiB"), tuning=tuning) as engine:
        assert engine.plan.mode.experts_in == "host"
        assert_same_bits(rows(engine, TOKENS), in_device)


def test_staged_uploads_give_the_same_bits(mixed: Path, request: pytest.FixtureRequest) -> None:
    direct = open_and_run(mixed)
    sent = request.getfixturevalue("everything_staged")
    assert_same_bits(open_and_run(mixed), direct)
    assert sum(sent) > 0.5 * mixed.stat().st_size, "the weights went another way"
    assert max(sent) > 2 * 4096, "no tensor needed both halves of the staging"


def groups_of(commands: list[Command]) -> Iterator[list[Command]]:
    """The commands between one barrier and the next."""
    starts = [i for i, needed in enumerate(plan_barriers(commands)) if needed or i == 0]
    for start, end in pairwise([*starts, len(commands)]):
        yield commands[start:end]


KIND = BatchKind("decode", 1, 1)
Reorder = Callable[[list[Command]], list[Command]]


@pytest.mark.parametrize("order", [lambda group: group[::-1], lambda group: group[1:] + group[:1]])
def test_the_order_between_barriers_does_not_matter(mixed: Path, order: Reorder) -> None:
    with Engine(mixed, CONFIG) as engine:
        wanted = rows(engine, TOKENS)
        program = engine.program()
        groups = list(groups_of(program.commands))
        assert max(len(group) for group in groups) > 1, "nothing to reorder"
        shuffled = Program("shuffled", [item for group in groups for item in order(group)])
        assert shuffled.commands != program.commands
        recorded = engine._programs.recorded
        segment = engine._programs._recorder.segment(shuffled)
        recorded[KIND] = replace(recorded[KIND], segments=(segment,))
        assert_same_bits(rows(engine, TOKENS), wanted)


@pytest.mark.parametrize(("n_shared", "n_reused"), [(6, 6), (0, 0), (12, 11)])
@pytest.mark.sample(2)
def test_a_reused_prefix_changes_nothing(mixed: Path, n_shared: int, n_reused: int) -> None:
    """Twelve tokens, of which the first `n_shared` were processed before."""
    second = TOKENS[12:24]
    first = second[:n_shared] + [token + 1 for token in second[n_shared:]]
    with LLM(mixed, ctx_size=64) as llm:
        llm.generate(second, max_tokens=1, temp=0)
        scratch = llm.engine.full_logits()
        statistics = llm.generate(first, max_tokens=3, temp=0).statistics
        assert statistics.n_reused_tokens == min(n_shared, 11)
        reused = llm.generate(second, max_tokens=1, temp=0)
        assert reused.statistics.n_reused_tokens == n_reused
        assert_same_bits(llm.engine.full_logits(), scratch)


def test_a_reply_is_read_again_as_a_part_of_the_next_prompt(mixed: Path) -> None:
    """Its rows were decoded, and those of a prompt are summed in another order."""
    with LLM(mixed, ctx_size=64) as llm:
        reply = llm.generate(TOKENS[:5], max_tokens=6, temp=0, ignore_eos=True).token_ids
        longer = [*TOKENS[:5], *reply, 7, 9]
        again = llm.generate(longer, max_tokens=4, temp=0, ignore_eos=True)
        assert again.statistics.n_reused_tokens == 5
        assert again.token_ids == fresh_tokens(mixed, longer)


def fresh_tokens(path: Path, prompt: list[int]) -> list[int]:
    """Four greedy tokens of a fresh model."""
    with LLM(path, ctx_size=64) as llm:
        return llm.generate(prompt, max_tokens=4, temp=0, ignore_eos=True).token_ids


def test_rows_of_logits_are_those_of_generation(mixed: Path) -> None:
    with LLM(mixed, ctx_size=64) as llm:
        llm.generate([5, 6, 7], max_tokens=2, temp=0)  # leaves other tokens in the cache
        found = llm.logits(TOKENS)
        assert found.dtype == np.float32 and found.shape == (len(TOKENS), llm.spec.n_vocab)
        assert_same_bits(found, rows(llm.engine, TOKENS))
