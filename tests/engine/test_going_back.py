"""Texts go back, are copied and go on where a layer keeps a state, or rows of a window, which hold
for the last positions alone.

To the bit they are texts that were never anything else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.test_context import grow_in_steps
from tests.engine.tiny import RECURRENT, WINDOWED, Tensor, lengthened, model_path, rewrite
from tests.samples import sampled
from vkmoe.batch import Phase, TokenBatch
from vkmoe.choices import DraftWay
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.facts import AttentionSpec
from vkmoe.generate.drafts import LookUp
from vkmoe.llm import LLM, GenerationResult
from vkmoe.models.kept import ring_of

pytestmark = pytest.mark.usefixtures("one_device")
CTX_SIZE, N_REGIONS = 160, 3
NAMES = (*RECURRENT, *WINDOWED)
CHUNK = 16  # rows of a batch, and so the margin of rings


class Row(NamedTuple):
    token: int
    phase: Phase


def run(engine: Engine, region: int, first: int, rows: list[Row]) -> bytes:
    """Run rows, which all are of one phase, and return the logits behind the last.

    Rows of a prompt come in two chunks, of which the first wants no logits.
    """
    decodes, end = rows[0].phase == "decode", first + len(rows)
    middle = first if decodes else (first + end) // 2
    for start, behind in ((first, middle), (middle, end)):
        tokens = tuple(row.token for row in rows[start - first : behind - first])
        wants = (decodes,) * (len(tokens) - 1) + (behind == end,)
        regions, positions = (region,) * len(tokens), tuple(range(start, behind))
        if tokens:
            engine.run(TokenBatch(tokens, positions, regions, wants, rows[0].phase))
    return engine.full_logits((len(rows) - 1) * decodes).tobytes()


def alone(engine: Engine, rows: list[Row]) -> bytes:
    """The logits behind a text that begins anew, in batches as small and as large as can be."""
    assert engine.rewind(0, 0) == 0
    first, found = 0, b""
    for phase, group in groupby(rows, lambda row: row.phase):
        of_phase, n_most = list(group), 1 if phase == "decode" else 80
        for start in range(0, len(of_phase), n_most):
            part = of_phase[start : start + n_most]
            found = run(engine, 0, first, part)
            first += len(part)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "few slots": {"expert_slots": 3, "promote_on_read": True},
    "stepped": {"expert_slots": 3, "executor": "stepped"},
    "f32": {"cache_type_k": "f32", "cache_type_v": "f32"},
    "cpu": {"device": "cpu"},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(2)
def test_going_back_and_copying_change_no_bit(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the caches of the other layers grow; texts alone have caches without rings."""
    monkeypatch.setattr("vkmoe.execute.region_rows.COPIED_EVERY", 8)
    grow_in_steps(monkeypatch)
    options = WAYS[way]
    if "dense" in name and "expert_slots" in options:
        options = {}
    config = EngineConfig(ctx_size=CTX_SIZE, parallel=N_REGIONS, ubatch_size=CHUNK, **options)
    whole = replace(config, ubatch_size=CTX_SIZE)
    rng, n_back = random.Random(len(name + way)), 0
    with (
        Engine(lengthened(model_path(name), CTX_SIZE), config, checks=True) as engine,
        Engine(lengthened(model_path(name), CTX_SIZE), whole) as other,
    ):
        texts: list[list[Row]] = [[] for _ in range(N_REGIONS)]
        for _ in range(50):
            region, way_on = rng.randrange(N_REGIONS), rng.random()
            text = texts[region]
            if way_on < 0.35 and text:
                wanted = rng.randrange(len(text))
                found = engine.rewind(region, wanted)
                assert found <= wanted
                n_back += found > 0
                del text[found:]
            elif way_on < 0.5 and len(text) > 1:
                target, n = (region + 1) % N_REGIONS, rng.randrange(1, len(text))
                n = engine.copy_region(region, target, n)
                texts[target] = text[:n]
                text = texts[target]
                region = target
            phase: Phase = rng.choice(["decode", "prompt"])
            n_rows = rng.randrange(1, 30) if phase == "prompt" else rng.randrange(1, 4)
            rows = [Row(rng.randrange(engine.n_vocab), phase) for _ in range(n_rows)]
            if len(text) + n_rows > CTX_SIZE:
                engine.rewind(region, 0)
                text.clear()
            logits = run(engine, region, len(text), rows)
            text += rows
            assert logits == alone(other, text), (region, len(text))
    assert n_back, "texts go back to where they were"


@pytest.mark.parametrize("name", sampled(["gptoss_odd", "gemma4_odd"], "gptoss_odd".__eq__))
def test_a_ring_reaches_as_far_back_as_it_says(name: str) -> None:
    """A text goes back by each number of rows, from places all around the ring: without a copy up
    to the margin, and by more to where its prompt ended."""
    config = EngineConfig(ctx_size=CTX_SIZE, ubatch_size=CHUNK)
    whole = replace(config, ubatch_size=CTX_SIZE)
    path = lengthened(model_path(name), CTX_SIZE)
    with Engine(path, config) as engine, Engine(path, whole) as other:

        def step(position: int) -> None:
            rows = [Row(7 * position % engine.n_vocab, "decode")]
            assert run(engine, 0, position, rows) == run(other, 0, position, rows)

        reach = min(
            ring_of(mixer, CHUNK) - mixer.window
            for mixer in engine.spec.mixers
            if isinstance(mixer, AttentionSpec) and mixer.window
        )
        for n_back in range(1, reach + 4):
            n_prompt = CHUNK + n_back
            prompt = [Row(5 * i % engine.n_vocab, "prompt") for i in range(n_prompt)]
            engine.rewind(0, 0)
            for first in range(0, n_prompt, CHUNK):
                run(engine, 0, first, prompt[first : first + CHUNK])
            alone(other, prompt)
            end = n_prompt + reach + 2
            for position in range(n_prompt, end):
                step(position)
            found = engine.rewind(0, end - n_back)
            assert found == (end - n_back if n_back <= reach + 1 else n_prompt - 1)
            step(other.rewind(0, found))
            assert engine.rewind(0, n_prompt - 1) == n_prompt - 1
            step(other.rewind(0, n_prompt - 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_two_endings_of_one_prefix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of the prefix is computed once, and both replies are their own."""
    monkeypatch.setattr("vkmoe.execute.region_rows.COPIED_EVERY", 8)
    prefix, endings = [(7 * i + 3) % 200 for i in range(90)], ([5, 6, 7], [8, 9])
    options: dict[str, Any] = {"temp": 0.0, "max_tokens": 6, "ignore_eos": True}
    path = model_path(name)
    with LLM(lengthened(path, CTX_SIZE), ctx_size=CTX_SIZE, ubatch_size=CHUNK) as llm:
        found = []
        for ending in (*endings, *endings):
            result = llm.generate([*prefix, *ending], **options)
            found.append(result.token_ids)
            n_reused = result.statistics.n_reused_tokens
        assert n_reused >= len(prefix) - CHUNK - 8
    for ending, tokens in zip(endings, found, strict=False):
        with LLM(lengthened(path, CTX_SIZE), ctx_size=CTX_SIZE) as llm:
            result = llm.generate([*prefix, *ending], **options)
            assert result.token_ids == tokens
    assert found[:2] == found[2:]


@pytest.mark.parametrize("device", ["vulkan", "cpu"])
def test_a_model_without_attention(device: str, tmp_path: Path) -> None:
    """As the first layers of a model are, by which modes are compared."""

    def first_three(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["qwen35.block_count"] = 3
        del metadata["qwen35.nextn_predict_layers"]
        for tensor in [tensor for tensor in tensors if tensor.startswith(("blk.3.", "blk.4."))]:
            del tensors[tensor]

    path = rewrite(model_path("qwen35_dense"), tmp_path / "recurrent.gguf", first_three)
    rows = [Row(7 * i % 200, "prompt" if i < 60 else "decode") for i in range(90)]
    with Engine(path, EngineConfig(device, 100, ubatch_size=40)) as engine:
        found = run(engine, 0, 0, rows[:60])
        for position in range(60, 90):
            found = run(engine, 0, position, rows[position : position + 1])
        assert found == alone(engine, rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_guesses_that_were_wrong_are_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three of them, of which some are right."""
    prompt, rng = [5, 6, 7] * 8, random.Random(1)

    def reply(draft: DraftWay) -> GenerationResult:
        path = lengthened(model_path(name), CTX_SIZE)
        with LLM(path, ctx_size=CTX_SIZE, ubatch_size=CHUNK, draft=draft) as llm:
            return llm.generate(prompt, max_tokens=60, temp=0.0, ignore_eos=True)

    wanted = reply("none").token_ids

    def guess(_: LookUp, tokens: Sequence[int], n_most: int) -> list[int]:
        right = wanted[len(tokens) - len(prompt) :][:n_most]
        return [token if rng.random() < 0.7 else 9 for token in right]

    monkeypatch.setattr(LookUp, "draft", guess)
    found = reply("lookup")
    assert found.token_ids == wanted
    statistics = found.statistics
    assert 20 < statistics.n_accepted_tokens < statistics.n_drafted_tokens < 60 * 3


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen35_dense", "gptoss_odd"])
def test_a_long_session_is_not_read_again_and_again(name: str) -> None:
    """As an agent's goes: results of tools are appended, at times old thoughts are left out. Nearly
    all that a KV cache alone would use again is used, though states are there for few positions."""
    rng, n_turns, ctx_size = random.Random(3), 200, 6144
    n_common = n_reused = 0
    model = lengthened(model_path(name), ctx_size)
    with LLM(model, ctx_size=ctx_size, ubatch_size=CHUNK) as llm:

        def some(n: int) -> list[int]:
            return [rng.randrange(llm.spec.n_vocab) for _ in range(n)]

        history, last, thoughts = some(200), list[int](), dict[int, list[int]]()
        for turn in range(n_turns):
            if turn % 10 == 9:  # the last two thoughts are taken out
                for begin in sorted(thoughts, reverse=True)[:2]:
                    del history[begin : begin + len(thoughts.pop(begin))]
            same = next((i for i, (a, b) in enumerate(zip(history, last, strict=False)) if a != b),
                        min(len(history), len(last)))  # fmt: skip
            result = llm.generate(history, max_tokens=3, temp=0.0, ignore_eos=True)
            n_common, n_reused = n_common + same, n_reused + result.statistics.n_reused_tokens
            last = list(history)
            thoughts[len(history)] = some(8)
            history += [*thoughts[len(history)], *result.token_ids, *some(12)]
    assert n_reused > 0.95 * n_common, (n_reused, n_common)
