"""Conversations leave the KV cache for host memory, or a file, and come back.

To the bit their replies are those of texts that were computed anew.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_context import grow_in_steps
from tests.engine.test_guesses import draft_model, target
from tests.engine.tiny import lengthened, model_path
from vkmoe.batch import TextForm
from vkmoe.errors import StateFileError, UsageError
from vkmoe.execute import region_rows
from vkmoe.execute.kept_texts import LEAST_BLOCK
from vkmoe.llm import LLM, GenerationResult

pytestmark = pytest.mark.usefixtures("one_device")
CTX_SIZE, CHUNK = 224, 16  # CHUNK: rows of a batch, and so the margin of rings
SAMPLED: dict[str, Any] = {
    "temp": 1.0,
    "seed": 7,
    "max_tokens": 3,
    "ignore_eos": True,
    "n_logprobs": 2,
}
BOTH_Q8: dict[str, Any] = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense_tied", {}),
    "dense in q8_0": ("dense_tied", BOTH_Q8),
    "few slots": ("moe_odd", {"expert_slots": 3, "promote_on_read": True}),
    "windows": ("gptoss_odd", {}),
    "windows in q8_0": ("gptoss_odd", BOTH_Q8),
    "windows in q4_0, q5_1": ("gptoss_odd", {"cache_type_k": "q4_0", "cache_type_v": "q5_1"}),
    "windows and shared rows": ("gemma4_odd", {}),
    "recurrent": ("qwen35_dense", {}),
    "recurrent in q8_0": ("qwen3next_odd", BOTH_Q8),
    "latent": ("deepseek2_v3", {}),
    "latent in q8_0": ("deepseek2_v3", {"cache_type_k": "q8_0"}),
    "indexed": ("glmdsa_odd", {}),
    "guessing layer": ("qwen35moe_odd", {"draft": "mtp", "draft_tokens": 2}),
    "drafter": ("gemma4_wide_assistant", {"draft": "mtp", "draft_tokens": 2}),
}
FEW = ("dense", "windows", "windows in q4_0, q5_1", "recurrent", "latent in q8_0")


def opened(kind: str, **more: Any) -> LLM:
    name, options = KINDS[kind]
    options = {"ctx_size": CTX_SIZE, "ubatch_size": CHUNK, **options, **more}
    if options.get("device") == "cpu":
        options.pop("expert_slots", None)
        options.pop("promote_on_read", None)
    if options.get("draft") == "mtp":
        options["draft_model"] = draft_model(name)
    return LLM(lengthened(model_path(target(name)), CTX_SIZE), **options)


def tokens_of(llm: LLM, rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(llm.spec.n_vocab) for _ in range(n)]


def bits(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("device", ["vulkan", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(6)
def test_replies_are_those_of_texts_that_never_left(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations go on, are answered again, edited and left, in less memory than they need."""
    monkeypatch.setattr(region_rows, "COPIED_EVERY", 24)
    grow_in_steps(monkeypatch)
    has_states = "recurrent" in kind or kind == "guessing layer"
    rng, n_most = random.Random(len(kind)), (20 if has_states else 4) * LEAST_BLOCK
    options = {"device": device}
    with (
        opened(kind, **options, parallel=2, cache_ram=f"{n_most}B") as llm,
        opened(kind, **options, cache_ram="0", ubatch_size=64) as fresh,
    ):
        texts = [tokens_of(llm, rng, rng.randrange(40, 90)) for _ in range(6)]
        for turn in range(24):
            index = turn % 6 if turn < 6 else rng.randrange(6)
            text, way = texts[index], rng.random()
            if way < 0.3:
                del text[rng.randrange(len(text) // 2, len(text)) :]
            if way < 0.7 or len(text) < 40:
                text += tokens_of(llm, rng, rng.randrange(1, 30))
            if len(text) > CTX_SIZE - 40:
                del text[60:]
            found = llm.generate(text, **SAMPLED)
            fresh.forget()
            wanted = fresh.generate(text, **SAMPLED)
            assert wanted.statistics.n_reused_tokens == 0
            assert bits(found) == bits(wanted), turn
            if way < 0.7:
                text += found.token_ids
            assert llm.engine.texts.n_bytes <= n_most
        kept = llm.scheduler.regions.kept
        assert kept.n_restored > 100 and not fresh.scheduler.regions.kept.n_restored
        llm.forget()
        assert not kept.prompts


@pytest.mark.parametrize("device", ["vulkan", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(4)
def test_two_conversations_in_turns_are_read_once(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one slot. A turn computes what is new, and at most what lies behind the last state."""
    monkeypatch.setattr(region_rows, "COPIED_EVERY", 24)
    rng = random.Random(5)
    with opened(kind, device=device) as llm:
        texts = [tokens_of(llm, rng, 70 + 9 * i) for i in range(2)]
        for turn in range(6):
            text = texts[turn % 2]
            statistics = llm.generate(text, **SAMPLED).statistics
            if turn > 1:
                assert statistics.n_reused_tokens >= len(text) - 12
            text += tokens_of(llm, rng, 10)


@pytest.mark.parametrize("device", ["vulkan", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(5)
def test_a_restored_state_goes_on_as_the_saved_one(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another process, as it were, and another region; its rows are saved again as they were."""
    monkeypatch.setattr(region_rows, "COPIED_EVERY", 24)
    monkeypatch.setattr(region_rows, "FILE_BLOCK", 1000)
    rng, path, again = random.Random(2), tmp_path / "a.state", tmp_path / "b.state"
    with opened(kind, device=device) as llm:
        prompt = tokens_of(llm, rng, 90)
        reply = llm.generate(prompt, **SAMPLED).token_ids
        text = [*prompt, *reply, *tokens_of(llm, rng, 20)]
        saved = llm.save_state(path)
        assert 90 <= saved.n_tokens < 90 + len(reply)
        assert saved.n_bytes == path.stat().st_size
        wanted = llm.generate(text, **SAMPLED)
    with opened(kind, device=device, parallel=2) as llm:
        llm.generate(tokens_of(llm, rng, 50), **SAMPLED)
        assert llm.restore_state(path, region=1) == saved
        assert llm.save_state(again, region=1) == saved
        assert path.read_bytes() == again.read_bytes()
        found = llm.generate(text, **SAMPLED)
        assert bits(found) == bits(wanted)
        assert found.statistics.n_reused_tokens >= 89
        assert llm.scheduler.erase(1) and not llm.scheduler.regions.n_rows(1)


def test_a_growing_context_takes_memory_back_that_kept_texts_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where both lie in the memory that nothing else uses."""
    grow_in_steps(monkeypatch)
    rng = random.Random(4)
    with opened("dense", parallel=2, cache_ram="1MiB") as llm:
        engine = llm.engine
        assert engine.device.info.is_uma
        for _ in range(5):
            llm.generate(tokens_of(llm, rng, 40), **SAMPLED)
        before = engine.texts.n_bytes
        grown = engine._caches.bytes_to_resize(engine._caches.n_positions + 64)
        engine._context._spare = grown + LEAST_BLOCK
        assert before > LEAST_BLOCK
        engine.make_room(engine._caches.n_positions + 64)
        assert 0 < engine.texts.n_bytes <= LEAST_BLOCK
        assert engine._context._spare >= engine.texts.n_bytes


def test_only_forms_that_a_model_has_are_taken_from_a_file() -> None:
    """A text without the state that it goes on from would not be that text."""
    with opened("recurrent") as llm:
        sound = [(9, (9,)), (9, (1, 5, 9))]
        for n_positions, stops in sound:
            assert llm.engine.text_bytes(TextForm(n_positions, stops))
        wrong = [(9, ()), (9, (8,)), (9, (9, 9)), (9, (5, 1, 9)), (9, (0, 9)), (9, (-1, 9))]
        for n_positions, stops in wrong:
            assert llm.engine.text_bytes(TextForm(n_positions, stops)) is None
    with opened("dense") as llm:
        assert (
            llm.engine.text_bytes(TextForm(9)) and llm.engine.text_bytes(TextForm(9, (9,))) is None
        )


@pytest.mark.parametrize("change", [BOTH_Q8, {"ctx_size": 30}, {"ubatch_size": 8}])
def test_a_state_of_another_kind_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Another model's, or one whose caches lie otherwise; what is in the region stays."""
    path = tmp_path / "a.state"
    with opened("windows", ctx_size=200) as llm:
        llm.generate([5, 6, 7], **SAMPLED)
        llm.save_state(path)
    name = "windows" if "ubatch_size" not in change else "dense"
    with opened(name, **{"ctx_size": 200, **change}) as llm:
        llm.generate([1, 2, 3], **SAMPLED)
        tokens = llm.scheduler.regions.tokens(0)
        with pytest.raises(StateFileError, match="another model") as caught:
            llm.restore_state(path)
        assert "--cache-type-k" in caught.value.hint
        assert llm.scheduler.regions.tokens(0) == tokens
        calls: list[Any] = [llm.save_state, llm.restore_state]
        for call in calls:
            for given in ((3,), (None,), (path, "0"), (path, 1), (path, -1)):
                with pytest.raises(UsageError):
                    call(*given)
