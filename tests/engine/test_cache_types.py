"""KV caches in types with scales, alone and beside others: the law holds in them, and they change
little.

On the Vulkan device and on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from tests.engine.caches import Q8_ROUNDING, Rows, assert_same_bits, rounding, rows
from tests.engine.test_batches import batch, joined, prompt, tokens_of
from tests.engine.tiny import lengthened, model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.kv_types import KvTypes, both
from vkmoe.llm import LLM
from vkmoe.models import ModelFile

pytestmark = pytest.mark.usefixtures("one_device")

N_TOKENS = 100


class Case(NamedTuple):
    """A model, the types of its caches, and what they change, of the largest logit."""

    model: str
    types: KvTypes
    # Of what f32 leaves, at half of the positions: where a near tie of a router is decided
    # otherwise, random weights leave something else.
    of_f32: float
    of_decoding: float  # of rows of prompts and rows that are decoded


CASES = {
    "q8_0": Case("moe_odd", both("q8_0"), 3e-2, Q8_ROUNDING),
    "K q8_0, V f16, windows": Case("gptoss_odd", KvTypes("q8_0", "f16"), 3e-2, Q8_ROUNDING),
    # Rows of 80: the last block is a half.
    "latent q8_0": Case("deepseek2_v3", both("q8_0"), 3e-2, Q8_ROUNDING),
    "q4_0": Case("moe_odd", both("q4_0"), 2e-1, 3e-2),
    "K q5_1, V q4_0, windows": Case("gptoss_odd", KvTypes("q5_1", "q4_0"), 2e-1, 3e-2),
    "latent q5_1": Case("deepseek2_v3", both("q5_1"), 2e-1, 3e-2),
}


def config_of(types: KvTypes, **asked: object) -> EngineConfig:
    return EngineConfig(
        ctx_size=N_TOKENS + 4, cache_type_k=types.keys, cache_type_v=types.values, **asked  # type: ignore[arg-type]
    )  # fmt: skip


def longer(name: str) -> ModelFile:
    return lengthened(model_path(name), N_TOKENS + 4)


@pytest.fixture(scope="module", params=["vulkan", "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, device: str) -> Iterator[tuple[Case, Engine]]:
    case = CASES[request.param]
    config = config_of(case.types, parallel=3, ubatch_size=64, device=device)
    with Engine(longer(case.model), config) as engine:
        assert engine.plan.kv_types == case.types
        yield case, engine


def decoded(engine: Engine, tokens: list[int]) -> Rows:
    engine.rewind(0, 0)
    return rows(engine, tokens)


@pytest.mark.sample(2)
def test_rows_of_prompts_keep_their_bits(opened: tuple[Case, Engine]) -> None:
    """However a prompt is cut, in any region, and going on from a copied one."""
    case, engine = opened
    tokens = tokens_of(engine.n_vocab, N_TOKENS)
    wanted = prompt(engine, tokens, [33, 31, 36])
    for region, cuts in ((1, [1, 32, 60, 7]), (2, [64, 36])):
        assert_same_bits(prompt(engine, tokens, cuts, region)[-1:], wanted[-1:])
    engine.copy_region(0, 1, 64)
    engine.run(batch(tokens, 64, 36, 1))
    assert_same_bits(engine.full_logits()[None], wanted[-1:])
    difference = np.abs(wanted[-1] - decoded(engine, tokens)[-1]).max()
    assert difference <= rounding(engine, case.of_decoding) * np.abs(wanted).max()


@pytest.mark.sample(3)
def test_rows_that_are_decoded_keep_their_bits(opened: tuple[Case, Engine], device: str) -> None:
    """Beside rows of other sequences, and with experts that are not on the device; near f32."""
    case, engine = opened
    tokens = tokens_of(engine.n_vocab, 40)
    wanted = decoded(engine, tokens)
    engine.rewind(1, 0)
    prompt(engine, tokens_of(engine.n_vocab, 40), [40], 2)
    others = tokens_of(engine.n_vocab, 80)
    for position in range(len(tokens)):
        own = batch(tokens, position, 1, 1, "decode")
        engine.run(joined(own, batch(others, 40 + position, 1, 2, "decode")))
        assert_same_bits(engine.full_logits(0), wanted[position])
    if device != "cpu":  # which reads experts where they are
        config = config_of(case.types, device=device, expert_slots=2)
        with Engine(longer(case.model), config) as cached:
            assert cached.plan.mode.experts_in == "cache"
            assert_same_bits(rows(cached, tokens), wanted)
    with Engine(longer(case.model), config_of(both("f32"), device=device)) as exact:
        change = np.abs(rows(exact, tokens) - wanted).max(axis=1) / np.abs(wanted).max()
    assert 0 < np.median(change) <= case.of_f32


def test_a_model_tells_its_types() -> None:
    with LLM(model_path("moe_plain"), cache_type_k="q8_0") as llm:
        assert llm.plan.kv_types == ("q8_0", "f16")
        (line,) = (line for line in llm.plan.lines if line.item.startswith("KV cache"))
        assert line.item.endswith("K q8_0, V f16")
