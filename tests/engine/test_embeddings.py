"""`LLM.embed`: agreement with transformers, the law of bits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import rounding
from tests.engine.tiny import expected, lengthened, mixed_model, model_path, rewrite, with_metadata
from tests.samples import sampled
from tools.make_fixtures import WITH_STATES
from vkmoe.batch import TokenBatch
from vkmoe.choices import Pooling
from vkmoe.errors import PromptError, UnsupportedModelError, UsageError
from vkmoe.generate.loop import Generation
from vkmoe.llm import LLM
from vkmoe.llm.embeddings import embedding_of, embedding_request

pytestmark = pytest.mark.usefixtures("one_device")

Floats = NDArray[np.float32]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
TINY = model_path("moe_plain")
CONTEXT = 96
TOLERANCE = 1e-4  # of the largest state. Seen: 7e-6; drivers may sum in another order.


def tokens_of(llm: LLM, n_tokens: int = 70) -> list[int]:
    return [(7 * i * i + 3 * (i % 4)) % (llm.spec.n_vocab - 1) + 1 for i in range(n_tokens)]


@pytest.mark.parametrize("asked", [{}, {"cpu_moe": True}], ids=["device", "CPU experts"])
@pytest.mark.parametrize("name", WITH_STATES)
def test_states_agree_with_transformers(name: str, asked: dict[str, Any]) -> None:
    """All of them, and so does what is pooled of them."""
    wanted = expected(name)
    tokens, states = wanted["tokens"].tolist(), wanted["states"].astype(np.float64)
    with LLM(model_path(name), cache_type_k="f32", cache_type_v="f32", **asked) as llm:
        found = llm.embed(tokens, pooling="none", normalize=False)
        most = rounding(llm.engine, TOLERANCE)
        pooled = {way: llm.embed(tokens, pooling=way) for way in POOLINGS[1:]}
    assert found.dtype == np.float32 and found.shape == states.shape
    assert np.abs(found - states).max() <= most * np.abs(states).max()
    for way, plain in (("mean", states.mean(axis=0)), ("cls", states[0]), ("last", states[-1])):
        cosine = pooled[way] @ plain / np.linalg.norm(plain)  # type: ignore[index]
        assert cosine == pytest.approx(1, abs=most)


def embeddings(llm: LLM) -> list[Floats]:
    """The embeddings of a long text and a short one, in every way, several texts at a time."""
    long = tokens_of(llm)
    found: list[Floats] = []
    for pooling in POOLINGS:
        llm.forget()
        found += llm.embed([long, long[:5], long[40:]], pooling=pooling, normalize=False)
    return found


def assert_same(found: list[Floats], wanted: list[Floats]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
        assert np.isfinite(one).all() and np.ptp(one) > 0


SAMPLE = ("moe_odd", "gemma4_odd", "deepseek2_v3", "qwen35moe_odd")
NAMES = (*SAMPLE, "dense_tied", "gptoss_odd", "qwen2moe_top1", "hyv3_odd")


@pytest.mark.parametrize("name", sampled(NAMES, SAMPLE.__contains__))
def test_neither_chunks_nor_neighbours_change_a_bit(name: str) -> None:
    """Texts one by one in small chunks, or three at once in one."""
    with LLM(lengthened(model_path(name), CONTEXT), ctx_size=CONTEXT, ubatch_size=512) as llm:
        wanted = embeddings(llm)
        alone = llm.embed(tokens_of(llm)[:5], pooling="none", normalize=False)
        np.testing.assert_array_equal(alone, wanted[1])
    model = lengthened(model_path(name), CONTEXT)
    with LLM(model, ctx_size=CONTEXT, ubatch_size=16, parallel=3) as llm:
        assert_same(embeddings(llm), wanted)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "slots": {"expert_slots": 3},
    "stepped": {"expert_slots": 2, "executor": "stepped"},
    "gathered": {"expert_slots": 2, "miss": "gather"},
    "overlapped": {"expert_slots": 3, "expert_copies": "overlap", "promote_on_read": True},
    "host layers": {"gpu_layers": 1},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Floats]]:
    path = mixed_model(tmp_path_factory.mktemp("embeddings") / "mixed.gguf")
    with LLM(lengthened(path, CONTEXT), ctx_size=CONTEXT) as llm:
        return path, embeddings(llm)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_where_experts_are_changes_no_bit(where: str, mixed: tuple[Path, list[Floats]]) -> None:
    path, wanted = mixed
    with LLM(lengthened(path, CONTEXT), ctx_size=CONTEXT, **PLACEMENTS[where]) as llm:
        assert_same(embeddings(llm), wanted)


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_a_reply_goes_on_as_if_nothing_were_embedded_beside_it(draft: str) -> None:
    """And what is embedded amid it is what it is alone, also where a layer guesses tokens."""
    options: dict[str, Any] = {"max_tokens": 24, "temp": 0, "ignore_eos": True}
    model = lengthened(model_path("qwen35moe_odd"), CONTEXT)
    with LLM(model, ctx_size=CONTEXT, parallel=2, draft=draft) as llm:
        tokens = tokens_of(llm, 30)
        wanted = llm.generate(tokens, **options).token_ids
        alone = llm.embed(tokens[5:], pooling="mean")
        found = []
        for piece in llm.stream(tokens, **options):
            found.append(piece.token_id)
            if len(found) in (1, 7):
                np.testing.assert_array_equal(llm.embed(tokens[5:], pooling="mean"), alone)
        assert found == wanted


def test_an_interrupt_of_one_call_is_told_to_those_of_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(batch: TokenBatch) -> None:
        raise KeyboardInterrupt

    with LLM(TINY, ctx_size=32, parallel=2) as llm:
        other = Generation(embedding_request(llm, [5, 6], "mean"), llm.tokenizer, 32)
        llm.scheduler.submit(other)
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.embed([7, 8])
        assert other.is_done and other.error is None
        with pytest.raises(UsageError, match="interrupted"):
            embedding_of(other, normalize=True)
        assert llm.embed([7, 8]).shape == (llm.spec.width,)


def test_a_file_says_how_to_pool(tmp_path: Path) -> None:
    """By llama.cpp's numbers; without one the last token counts, as it alone saw the others."""
    tokens, found = [5, 6, 7], {}
    for number in (None, 0, 1, 2, 3):
        changes = {} if number is None else {"qwen3moe.pooling_type": number}
        with LLM(rewrite(TINY, tmp_path / f"{number}.gguf", with_metadata(changes))) as llm:
            found[number] = llm.embed(tokens)
            ways = {way: llm.embed(tokens, pooling=way) for way in POOLINGS}
    wanted = {None: "last", 0: "last", 1: "mean", 2: "cls", 3: "last"}
    for number, way in wanted.items():
        np.testing.assert_array_equal(found[number], ways[way])  # type: ignore[index]
    ranks = rewrite(TINY, tmp_path / "ranks.gguf", with_metadata({"qwen3moe.pooling_type": 4}))
    with LLM(ranks) as llm:
        with pytest.raises(UnsupportedModelError, match="pools embeddings in way 4"):
            llm.embed(tokens)
        assert llm.embed(tokens, pooling="mean").shape == (llm.spec.width,)


def test_what_cannot_be_embedded_is_refused() -> None:
    with LLM(TINY, ctx_size=32) as llm:
        anything: Any = llm.embed
        nothing: tuple[Any, ...] = ("", [], [""], [[]])
        for empty in nothing:
            with pytest.raises(PromptError, match="empty"):
                anything(empty)
        with pytest.raises(PromptError, match="33 tokens, the context holds 32"):
            anything([[1, 2], [1] * 33])
        with pytest.raises(PromptError, match="not one of the model's"):
            anything([1, llm.spec.n_vocab])
        with pytest.raises(UsageError, match="pooling is 'rank'"):
            anything([1], pooling="rank")
        with pytest.raises(UsageError, match="normalize"):
            anything([1], normalize=2)
        assert llm.embed([1] * 32, pooling="none").shape == (32, llm.spec.width)
        lengths = np.linalg.norm(llm.embed([1, 2, 3], pooling="none"), axis=1)
        np.testing.assert_allclose(lengths, 1, rtol=1e-6)
