"""A layer of the model, or a drafter, guesses tokens ahead: as transformers has it, and no text
shows it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import rounding, slow_reads
from tests.engine.test_context import grow_in_steps
from tests.engine.tiny import (
    DRAFTER_FOLDER,
    FOLDER,
    Change,
    Tensor,
    drafter_path,
    expected,
    lengthened,
    model_path,
    rewrite,
    with_metadata,
)
from tests.gpu.checker import unguarded
from vkmoe.batch import Phase, TokenBatch
from vkmoe.choices import DraftWay
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import ModelFileError, UnsupportedModelError, UsageError, VkmoeError
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.llm import LLM
from vkmoe.models import ModelFile, open_model
from vkmoe.models.ahead_file import with_ahead

pytestmark = pytest.mark.usefixtures("one_device")
GUESSING = (
    *("qwen35moe_odd", "qwen35_dense", "glm4moe_odd", "glm4moe_groups", "hyv3_odd"),
    *("deepseek2_all_experts", "glmdsa_odd", "qwen3next_odd"),
)
DRAFTERS = ("gemma4_wide_assistant", "gemma4_shared_assistant")
# Of the largest logit. Behind so many norms float32 of transformers itself errs by 1.1e-5.
TOLERANCE = 1e-5


def draft_model(name: str) -> str | None:
    """The file of what guesses, where it is not in the model's own."""
    return str(drafter_path(name)) if name in DRAFTERS else None


def target(name: str) -> str:
    """The model of a drafter, or the one that has the layer."""
    return name.removesuffix("_assistant")


def guessed_for(name: str) -> ModelFile:
    """The model that has a layer that guesses, or is a drafter's, with a context of 96 tokens."""
    return lengthened(model_path(target(name)), 96)


def engine_of(name: str, **options: Any) -> Engine:
    types: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}
    options |= {"draft_model": draft_model(name), "ctx_size": 96, "parallel": 2}
    config = EngineConfig(draft="mtp", **types, **options)
    return Engine(with_ahead(guessed_for(name), config), config, checks=True)


def guessed(engine: Engine, tokens: list[int], cuts: list[int], phase: Phase) -> NDArray[Any]:
    """The logits of guesses behind each token but the first, in batches that end at `cuts`.

    Of rows for which the head does not run in a batch they are zeros.
    """
    found, first = [], 0
    for end in cuts:
        n = end - first
        batch = TokenBatch(
            tuple(tokens[first:end]), tuple(range(first, end)), (1,) * n, (True,) * n, phase
        )
        engine.run(batch)
        n_wanted = min(n, engine.max_logit_rows, engine.max_decode_rows)
        wanted = [False] * (n - n_wanted) + [True] * n_wanted
        guesses = engine.guess(tokens[first + 1 : end + 1], wanted, 1)
        found += [np.zeros(engine.n_vocab, np.float32)] * (n - n_wanted)
        found += [engine.full_logits(row) for row in range(n_wanted)]
        assert [[row.argmax()] for row in found[end - n_wanted :]] == guesses
        first = end
    return np.stack(found)


@pytest.mark.parametrize("device", ["vulkan", "cpu"])
@pytest.mark.parametrize("name", (*GUESSING, *DRAFTERS))
@pytest.mark.sample(3)
def test_guesses_are_those_of_transformers(name: str, device: str) -> None:
    """In rows of prompts and in rows that are decoded, wherever these are cut."""
    stored = expected(name, DRAFTER_FOLDER if name in DRAFTERS else FOLDER)
    tokens, wanted = expected(target(name))["tokens"].tolist(), stored["guess_logits"]
    most, n_all = np.abs(wanted).max() * TOLERANCE, len(wanted)
    options = {"device": "cpu"} if device == "cpu" else {}
    with engine_of(name, **options, ubatch_size=16) as engine:
        for phase, steps in (("prompt", (1, 7, 16)), ("decode", (1, 2))):
            for step in steps:
                cuts = [*range(n_all % step, n_all + 1, step)]  # the last batch is a whole one
                found = guessed(engine, tokens, cuts[not cuts[0] :], phase)  # type: ignore[arg-type]
                ran = found.any(axis=1)
                assert ran.sum() >= min(step, engine.max_decode_rows)
                allowed = rounding(engine, TOLERANCE) if phase == "prompt" else TOLERANCE
                apart = np.abs(found[ran] - wanted[ran]).max()
                assert apart <= allowed * np.abs(wanted).max(), (phase, step)
        engine.run(TokenBatch((tokens[n_all - 1],), (n_all - 1,), (1,), (True,)))
        (both,) = engine.guess([tokens[n_all]], [True], 2)
        assert both == [wanted[-1].argmax(), stored["further_logits"].argmax()]
        logits = engine.full_logits(0)
        np.testing.assert_allclose(logits, stored["further_logits"], rtol=0, atol=most)


@pytest.mark.parametrize("name", (*GUESSING, *DRAFTERS))
@pytest.mark.sample(2)
def test_every_barrier_of_guesses_is_needed(name: str) -> None:
    """An independent judge finds nothing unguarded, and misses each barrier that is taken away."""
    with engine_of(name, ubatch_size=40) as engine:
        phases: tuple[tuple[Phase, int], ...] = (("prompt", 3), ("decode", 2))
        for phase, n in phases:
            tokens, sequence = (5,) * n, (0,) * n
            first = 0 if phase == "prompt" else 3
            wants, positions = (True,) * n, tuple(range(first, first + n))
            engine.run(TokenBatch(tokens, positions, sequence, wants, phase))
            engine.guess(tokens, wants, 2)
        ahead = engine._ahead
        assert ahead is not None and len(ahead._recorded) == 4
        for recorded in ahead._recorded.values():
            commands = recorded.program.commands
            barriers = plan_barriers(commands)
            assert unguarded(commands, barriers) == []
            for index in [i for i, barrier in enumerate(barriers) if barrier]:
                without = [*barriers]
                without[index] = False
                assert any(second == index for _, second in unguarded(commands, without))


WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "few slots": {"expert_slots": 3, "promote_on_read": True},
    "stepped": {"expert_slots": 3, "executor": "stepped"},
    # Slots that nothing leaves: else guesses move experts, and who computes one decides last bits.
    "hybrid": {"expert_mode": "hybrid", "expert_slots": 3, "expert_resident_ids": "0,1,2"},
    "f32": {"cache_type_k": "f32", "cache_type_v": "f32"},
    "cpu": {"device": "cpu"},
}


@pytest.mark.parametrize("name", (*GUESSING, *DRAFTERS))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(2)
def test_a_text_does_not_depend_on_guesses(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several replies at once, drawn and greedy, while the caches grow."""
    grow_in_steps(monkeypatch)
    options = dict(WAYS[way])
    if "dense" in name:
        options = {key: x for key, x in options.items() if key.startswith(("cache", "device"))}
    prompts = [[(7 * i + 3 * n) % 200 for i in range(20 + 9 * n)] for n in range(3)]
    found = {}
    drafts: tuple[tuple[DraftWay, int], ...] = (("none", 1), ("mtp", 1), ("mtp", 3))
    for draft, n_tokens in drafts:
        config = EngineConfig(
            ctx_size=96, parallel=3, ubatch_size=16, draft=draft, draft_tokens=n_tokens,
            draft_model=draft_model(name) if draft == "mtp" else None, **options,
        )  # fmt: skip
        with LLM(guessed_for(name), config) as llm:
            found[draft, n_tokens] = [
                llm.generate(
                    prompts, max_tokens=24, ignore_eos=True, n_logprobs=3, temp=temp, seed=5
                )
                for temp in (0.0, 0.7)
            ]
            guesses = sum(x.statistics.n_drafted_tokens for x in found[draft, n_tokens][0])
            assert (guesses > 0) == (draft == "mtp")
    wanted = found.pop(("none", 1))
    for replies in found.values():
        for ours, theirs in zip(replies, wanted, strict=True):
            assert [x.token_ids for x in ours] == [x.token_ids for x in theirs]
            assert [x.logprobs for x in ours] == [x.logprobs for x in theirs]


@pytest.mark.parametrize("name", sorted({*GUESSING} - {"qwen35_dense", "deepseek2_all_experts"}))
@pytest.mark.sample(2)
def test_what_guesses_move_follows_from_the_tokens_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In hybrid, where who computes an expert decides last bits: however slow copies are."""
    prompts = [[(7 * i + 3 * n) % 200 for i in range(20 + 9 * n)] for n in range(3)]
    found, n_moved = [], []
    for n_threads, delay in ((2, 0.0), (1, 0.03)):
        slow_reads(monkeypatch, delay)
        config = EngineConfig(
            ctx_size=96, draft="mtp", draft_tokens=3, expert_mode="hybrid", expert_slots=3,
            parallel=3, threads=n_threads, expert_policy="lru", expert_copies="overlap",
        )  # fmt: skip
        with LLM(lengthened(model_path(name), 96), config) as llm:
            replies = llm.generate(prompts, max_tokens=24, ignore_eos=True, n_logprobs=3, temp=0)
            assert llm.engine.cache is not None
            n_moved.append(llm.engine.cache.counters.n_evictions)
        found.append([(reply.token_ids, reply.logprobs) for reply in replies])
    assert found[0] == found[1]
    assert n_moved[0] == n_moved[1] > 0


def without(tensors: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


@pytest.mark.parametrize("name", GUESSING)
@pytest.mark.sample(1)
def test_the_layer_may_be_in_a_file_of_its_own(name: str, tmp_path: Path) -> None:
    """One beside the model is found by its name, if it was made with it."""
    with open_model(model_path(name)) as model:
        n_layers = model.spec.n_layers

    def model_alone(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        without(tensors, f"blk.{n_layers}.")

    def layer_alone(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer in range(n_layers):
            without(tensors, f"blk.{layer}.")

    def other_layer_alone(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            without(tensors, f"blk.{layer}.")

    path = rewrite(model_path(name), tmp_path / "model.gguf", model_alone)
    with LLM(path, ctx_size=64, draft="none") as llm:
        wanted = llm.generate([5, 6, 7], max_tokens=8, temp=0, ignore_eos=True).token_ids
    with pytest.raises(UsageError, match="no layer that guesses"):
        LLM(path, ctx_size=64, draft="mtp")
    another = "qwen35moe_odd" if name == "qwen35_dense" else "qwen35_dense"
    other = rewrite(model_path(another), tmp_path / "mtp-b.gguf", other_layer_alone)
    with pytest.raises(UnsupportedModelError, match="another model"):
        LLM(path, ctx_size=64, draft="mtp", draft_model=str(other))
    layer = rewrite(model_path(name), tmp_path / "mtp-c.gguf", layer_alone)
    with pytest.raises(ModelFileError, match="has no model"):
        open_model(layer)
    for draft_model in (None, str(layer)):
        with LLM(path, ctx_size=64, draft="mtp", draft_model=draft_model) as llm:
            result = llm.generate([5, 6, 7], max_tokens=8, temp=0, ignore_eos=True)
            assert result.token_ids == wanted and result.statistics.n_drafted_tokens > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_found_beside_its_model(name: str, tmp_path: Path) -> None:
    """By its file's name and its own, which others have not; it is no model itself."""
    path = shutil.copy(model_path(target(name)), tmp_path / "model.gguf")
    with LLM(path, ctx_size=64, draft="none") as llm:
        wanted = llm.generate([5, 6, 7], max_tokens=8, temp=0, ignore_eos=True).token_ids
    other, *_ = (shutil.copy(drafter_path(x), tmp_path) for x in DRAFTERS if x != name)
    with pytest.raises(UsageError, match="no layer that guesses"):
        LLM(path, ctx_size=64, draft="mtp")
    with pytest.raises(UnsupportedModelError, match="another model"):
        LLM(path, ctx_size=64, draft="mtp", draft_model=str(other))
    shutil.copy(drafter_path(name), tmp_path / "of-the-assistant-q8.gguf")
    for draft_model in (str(drafter_path(name)), None):
        with LLM(path, ctx_size=64, draft="mtp", draft_model=draft_model) as llm:
            result = llm.generate([5, 6, 7], max_tokens=8, temp=0, ignore_eos=True)
            assert result.token_ids == wanted and result.statistics.n_drafted_tokens > 0
    with pytest.raises(ModelFileError, match="small model that guesses"):
        open_model(drafter_path(name))


DAMAGED: dict[str, tuple[str, type[Exception], str]] = {
    "missing": ("blk.4.nextn.hnorm.weight", ModelFileError, "is missing"),
    "of experts": ("blk.4.ffn_down_exps.weight", ModelFileError, "is missing"),
}


def without_tensor(name: str) -> Change:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[f"{name}.weight"]

    return change


def of_drafter(key: str, value: Any) -> Change:
    return with_metadata({f"gemma4-assistant.{key}": value})


BAD_DRAFTERS: dict[str, tuple[Change, str]] = {
    "no embeddings": (without_tensor("token_embd"), "another model"),
    "no queries": (without_tensor("blk.1.attn_q"), "blk.1.attn_q.weight is missing"),
    "no input": (without_tensor("nextn.pre_projection"), "pre_projection.weight is missing"),
    "no next state": (without_tensor("nextn.post_projection"), "post_projection.weight is missing"),
    "own keys": (of_drafter("attention.shared_kv_layers", 1), "must be 2|is 1"),
    "few layers": (of_drafter("nextn_predict_layers", 1), "must be 2|is 1"),
    "other states": (of_drafter("embedding_length_out", 32), "another model"),
    "no states": (of_drafter("embedding_length_out", None), "embedding_length_out"),
    "other heads": (of_drafter("attention.head_count_kv", [2, 2]), "another model"),
    "other epsilon": (of_drafter("attention.layer_norm_rms_epsilon", 1e-5), "another model"),
    "other window": (of_drafter("attention.sliding_window", 7), "another model"),
    "no window": (of_drafter("attention.sliding_window", 0), "must be between 1 and"),
    "unknown": (of_drafter("attention.scale", 2.0), "unknown metadata"),
}


@pytest.mark.parametrize("how", BAD_DRAFTERS)
def test_a_bad_drafter_is_refused(how: str, tmp_path: Path) -> None:
    change, words = BAD_DRAFTERS[how]
    path = rewrite(drafter_path("gemma4_wide_assistant"), tmp_path / "drafter.gguf", change)
    with pytest.raises(VkmoeError, match=words) as caught:
        LLM(model_path("gemma4_wide"), ctx_size=64, draft="mtp", draft_model=str(path))
    assert str(path) in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_layer_is_refused_where_it_is_wanted(how: str, tmp_path: Path) -> None:
    gone, error, words = DAMAGED[how]

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[gone]

    path = rewrite(model_path("qwen35moe_odd"), tmp_path / "model.gguf", change)
    with LLM(path, ctx_size=64) as llm:
        assert llm.plan.n_guesses == 0
    with pytest.raises(error, match=words):
        LLM(path, ctx_size=64, draft="mtp")


def test_an_unknown_tensor_of_the_layer_is_refused(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["blk.4.nextn.other.weight"] = tensors["blk.4.nextn.hnorm.weight"]

    path = rewrite(model_path("qwen35moe_odd"), tmp_path / "model.gguf", change)
    with pytest.raises(UnsupportedModelError, match=r"nextn\.other"):
        LLM(path, ctx_size=64, draft="mtp")
