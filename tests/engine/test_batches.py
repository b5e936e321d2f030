"""The law for batches: cuts, neighbours and placement never change a bit.

Rows of prompts and rows that are decoded are two classes, each with one order of sums. They differ
from each other by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.engine.tiny import NAMES, mixed_model, model_path
from tests.ops.tunings import chosen_device
from vkmoe.batch import Phase, TokenBatch
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.llm import demo_model_path
from vkmoe.ops.tuning import Tuning
from vkmoe.placement.pools import SlotLayout
from vkmoe.placement.sizes import weight_bytes

N_TOKENS = 35
# The largest difference of logits between the classes, of the largest logit. Both are compared with
# transformers and llama.cpp besides.
ROUNDING = 5e-4
HALF_ROUNDING = 2e-3  # the same of prompts in tiles of f16 and of f32


def tokens_of(n_vocab: int, n_tokens: int = N_TOKENS) -> list[int]:
    return [(7 * i * i + 3 * (i % 4)) % (n_vocab - 1) + 1 for i in range(n_tokens)]


def batch(
    tokens: Sequence[int], first: int, count: int, region: int = 0, phase: Phase = "prompt"
) -> TokenBatch:
    """Rows of one sequence, of which the last wants logits; if they are decoded, all do."""
    decoded = phase == "decode"
    return TokenBatch(
        tuple(tokens[first : first + count]),
        tuple(range(first, first + count)),
        (region,) * count,
        (*(decoded for _ in range(count - 1)), True),
        phase,
    )


def joined(*batches: TokenBatch) -> TokenBatch:
    """Rows of several sequences in one batch."""
    return TokenBatch(
        tokens=tuple(token for each in batches for token in each.tokens),
        positions=tuple(position for each in batches for position in each.positions),
        sequences=tuple(region for each in batches for region in each.sequences),
        wants_logits=tuple(wants for each in batches for wants in each.wants_logits),
        phase=batches[0].phase,
    )


def prompt(engine: Engine, tokens: Sequence[int], cuts: Sequence[int], region: int = 0) -> Rows:
    """The logits at the end of every chunk of a prompt, chunks as long as `cuts`."""
    found, first = [], 0
    for count in cuts:
        engine.run(batch(tokens, first, count, region))
        found.append(engine.full_logits())
        first += count
    return np.stack(found)


@pytest.fixture(scope="module", params=["demo", *NAMES])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    path = demo_model_path() if request.param == "demo" else model_path(request.param)
    config = EngineConfig(ctx_size=64, parallel=3, ubatch_size=40)
    with Engine(path, config) as opened:
        yield opened


def test_a_prompt_has_the_same_bits_however_it_is_cut(engine: Engine) -> None:
    """And those of its rows run one by one, as rows of prompts; near those that are decoded."""
    tokens = tokens_of(engine.n_vocab)
    alone = prompt(engine, tokens, [1] * N_TOKENS)
    for region, cuts in enumerate(([35], [2, 32, 1], [33, 2], [31, 3, 1])):
        ends = np.cumsum(cuts) - 1
        assert_same_bits(prompt(engine, tokens, cuts, region % 3), alone[ends])
    engine.rewind(0, 0)
    decoded = rows(engine, tokens)
    assert np.abs(alone - decoded).max() <= ROUNDING * np.abs(decoded).max()


def test_neighbours_change_no_bit_of_a_prompt(engine: Engine) -> None:
    """Three prompts in one chunk, at other positions, and one that all rows of a tile share."""
    tokens = tokens_of(engine.n_vocab)
    other = tokens[::-1]
    wanted = prompt(engine, tokens, [9, 4])
    engine.run(batch(other, 0, 5, region=1))
    engine.run(joined(batch(other, 5, 6, 1), batch(tokens, 0, 9, 0), batch(other, 0, 7, 2)))
    assert_same_bits(engine.full_logits(1)[None], wanted[:1])
    engine.run(joined(batch([1] * 20, 7, 13, 2), batch(tokens, 9, 4, 0)))
    assert_same_bits(engine.full_logits(1)[None], wanted[1:])


def test_neighbours_change_no_bit_of_what_is_decoded(engine: Engine) -> None:
    tokens = tokens_of(engine.n_vocab)
    wanted = rows(engine, tokens[:9])
    for region in range(3):
        engine.rewind(region, 0)
    engine.run(batch(tokens[::-1], 0, 3, 2))
    for i in range(9):
        one, two = (batch(tokens, i, 1, region, "decode") for region in (0, 1))
        other = batch(tokens[::-1], 3 + i, 1, 2, "decode")
        engine.run(joined(*([other, one, two] if i % 2 else [one, two, other])))
        at = 1 if i % 2 else 0
        for index in (at, at + 1):
            assert_same_bits(engine.full_logits(index)[None], wanted[i : i + 1])


def test_rows_of_one_sequence_see_each_other(engine: Engine) -> None:
    """As what was guessed ahead is verified: the bits of decoding one after the other."""
    tokens = tokens_of(engine.n_vocab)
    wanted = rows(engine, tokens[:11])
    engine.rewind(0, 0)
    for first, count in ((0, 4), (4, 1), (5, 6)):
        engine.run(batch(tokens, first, count, 0, "decode"))
        found = np.stack([engine.full_logits(i) for i in range(count)])
        assert_same_bits(found, wanted[first : first + count])


def test_a_copied_region_goes_on_as_the_one_it_is_of(engine: Engine) -> None:
    tokens = tokens_of(engine.n_vocab)
    wanted = prompt(engine, tokens, [11, 24])
    engine.run(batch(tokens[::-1], 0, 30, 2))
    engine.copy_region(0, 2, 11)
    engine.run(batch(tokens, 11, 24, 2))
    assert_same_bits(engine.full_logits()[None], wanted[1:])


def test_prompts_in_tiles_of_f16_keep_the_law() -> None:
    """In the mapping of GPUs: the same bits however a prompt is cut, near those of f32."""
    if "float16" not in chosen_device().features:
        pytest.skip("the device has no float16")
    lanes, config = Tuning("lanes", 64, 4, False), EngineConfig(ctx_size=64, ubatch_size=40)
    found = []
    for tuning in (replace(lanes, half_tiles=True), lanes):
        with Engine(demo_model_path(), config, tuning=tuning) as engine:
            tokens = tokens_of(engine.n_vocab)
            found.append(prompt(engine, tokens, [2, 32, 1]))
            assert_same_bits(prompt(engine, tokens, [33, 2])[1:], found[-1][2:])
    half, exact = found
    assert 0.0 < np.abs(half - exact).max() <= HALF_ROUNDING * np.abs(exact).max()


# ----- placement -----

PLACEMENTS: dict[str, dict[str, Any]] = {
    "one slot, read": {"expert_slots": 1, "miss": "read"},
    "one slot, gathered": {"expert_slots": 1, "miss": "gather"},
    "kept as they are read": {"expert_slots": 2, "promote_on_read": True},
    "stepped": {"executor": "stepped"},
    "stepped, one slot": {"executor": "stepped", "expert_slots": 1},
    "a pool smaller than a layer": {"expert_slots": 1, "host_pool": "least"},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts a layer, of which two are used, in mixed types."""
    return mixed_model(tmp_path_factory.mktemp("batches") / "mixed.gguf")


@pytest.fixture(scope="module")
def resident(mixed: Path) -> tuple[Rows, Rows, str]:
    """The logits of a prompt in two chunks, of what is then decoded, and the least host pool."""
    with Engine(mixed, EngineConfig(ctx_size=64, parallel=2, ubatch_size=40)) as engine:
        tokens, spec = tokens_of(engine.n_vocab), engine.spec.experts
        assert spec is not None and engine.cache is None
        spans = weight_bytes(engine.model.tensors).spans
        layout = SlotLayout(engine.device.info, spans, spec.n_experts, spec.n_used)
        return *both_classes(engine, tokens), str(layout.least_host_bytes)


def both_classes(engine: Engine, tokens: Sequence[int]) -> tuple[Rows, Rows]:
    """The logits of two chunks of a prompt; and of two sequences that are decoded from there on."""
    found = prompt(engine, tokens, [20, 3])
    engine.copy_region(0, 1, 23)
    decoded = []
    for i in range(6):
        one, two = (batch(tokens, 23 + i, 1, region, "decode") for region in (0, 1))
        engine.run(joined(one, two) if engine.max_decode_rows > 1 else one)
        decoded.append(engine.full_logits())
        if engine.max_decode_rows > 1:
            assert_same_bits(engine.full_logits(1)[None], decoded[-1][None])
    return found, np.stack(decoded)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placement_changes_no_bit_of_a_batch(
    name: str, mixed: Path, resident: tuple[Rows, Rows, str]
) -> None:
    asked = dict(PLACEMENTS[name])
    if "host_pool" in asked:
        asked["host_pool"] = resident[2]
    config = EngineConfig(ctx_size=64, parallel=2, ubatch_size=40, **asked)
    with Engine(mixed, config, checks=True) as engine:
        assert engine.plan.executor == ("stepped" if name[0] in "sa" else "fused")
        found = both_classes(engine, tokens_of(engine.n_vocab))
        for ours, wanted in zip(found, resident[:2], strict=True):
            assert_same_bits(ours, wanted)
