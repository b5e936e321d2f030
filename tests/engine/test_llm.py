"""The class `LLM`: what ends a generation, options, prompts, statistics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkmoe
from tests.engine.caches import rounding
from tests.engine.tiny import model_path, rewrite, with_metadata
from tests.live import live_objects
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import (
    ModelFileError,
    PromptError,
    UnsupportedModelError,
    UsageError,
    VkmoeError,
)
from vkmoe.gpu import _native as native
from vkmoe.llm import LLM, GenerationResult, demo_model_path
from vkmoe.models import open_model

pytestmark = pytest.mark.usefixtures("one_device")

TINY = model_path("moe_plain")
CONTEXT = 32
PROMPT = [5, 6, 7, 8, 9]
GREEDY: dict[str, Any] = {"temp": 0, "ignore_eos": True}
CODE = "class Stack:\n    def push(self, item):\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, ctx_size=CONTEXT) as opened:
        yield opened


# ----- what ends it -----


def test_max_tokens_is_obeyed(llm: LLM) -> None:
    for max_tokens in (0, 1, 5):
        result = llm.generate(PROMPT, max_tokens=max_tokens, **GREEDY)
        assert len(result.token_ids) == max_tokens
        assert result.finish_reason == "length"
        assert result.statistics.n_generated_tokens == max_tokens
    assert llm.generate(PROMPT, max_tokens=0).text == ""


def test_a_full_context_ends_with_length(llm: LLM) -> None:
    """The last token is chosen from a full cache; its own state need not fit."""
    result = llm.generate(PROMPT, **GREEDY)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == CONTEXT - len(PROMPT) + 1
    full = [token % llm.spec.n_vocab for token in range(CONTEXT)]
    assert len(llm.generate(full, **GREEDY).token_ids) == 1
    assert llm.generate(PROMPT, **GREEDY).token_ids == result.token_ids


def test_an_end_token_stops_and_is_not_part_of_the_reply(tmp_path: Path) -> None:
    with LLM(TINY, ctx_size=CONTEXT) as llm:
        free = llm.generate(PROMPT, max_tokens=6, **GREEDY).token_ids
    end = next(token for token in free[1:] if token != free[0])
    n_before = free.index(end)
    change = with_metadata({"tokenizer.ggml.eos_token_id": end})
    with LLM(rewrite(TINY, tmp_path / "end.gguf", change), ctx_size=CONTEXT) as llm:
        result = llm.generate(PROMPT, max_tokens=6, temp=0)
        assert result.finish_reason == "stop"
        assert result.token_ids == free[:n_before]
        ignored = llm.generate(PROMPT, max_tokens=20, temp=0, ignore_eos=True)
        assert ignored.finish_reason == "length" and len(ignored.token_ids) == 20
        assert end not in ignored.token_ids, "it is banned, not only overlooked"


def test_a_stop_string_ends_the_text_before_it(demo: LLM) -> None:
    whole = demo.generate(CODE, max_tokens=12, temp=0)
    middle = len(whole.text) // 2
    for stop in (whole.text[middle : middle + 3], whole.text[0], whole.text[-2:]):
        result = demo.generate(CODE, max_tokens=12, temp=0, stop=["no such text", stop])
        assert demo.generate(CODE, max_tokens=12, temp=0, stop=stop).text == result.text
        assert result.finish_reason == "stop"
        assert result.text == whole.text[: whole.text.index(stop)]
        assert len(result.token_ids) <= len(whole.token_ids)
    for stops in (["no such text"], f"{whole.text[0]}#"):
        assert demo.generate(CODE, max_tokens=12, temp=0, stop=stops).text == whole.text


def test_text_held_back_for_a_stop_string_comes_at_the_end(demo: LLM) -> None:
    whole = demo.generate(CODE, max_tokens=6, temp=0).text
    pieces = list(demo.stream(CODE, max_tokens=6, temp=0, stop=[whole[-3:] + "never"]))
    assert "".join(piece.text for piece in pieces) == whole
    assert pieces[-1].token_id == -1 and whole.endswith(pieces[-1].text)


def test_a_closed_stream_is_an_interrupt(llm: LLM) -> None:
    pieces = llm.stream(PROMPT, **GREEDY)
    first = next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert llm.last_statistics is not None
    assert llm.last_statistics.finish_reason == "interrupt"
    assert llm.last_statistics.n_generated_tokens == 1
    assert llm.generate(PROMPT, max_tokens=1, **GREEDY).token_ids == [first.token_id]


# ----- options -----


def texts(llm: LLM, seeds: tuple[int, ...]) -> list[list[int]]:
    return [llm.generate(PROMPT, max_tokens=12, seed=seed, ignore_eos=True).token_ids
            for seed in seeds]  # fmt: skip


def test_a_seed_decides(llm: LLM) -> None:
    first, again, other = texts(llm, (4, 4, 5))
    assert first == again != other


def test_without_a_seed_one_is_drawn_and_told(llm: LLM) -> None:
    results = [llm.generate(PROMPT, max_tokens=8, ignore_eos=True) for _ in range(2)]
    seeds = [result.statistics.seed for result in results]
    assert seeds[0] != seeds[1]
    repeated = llm.generate(PROMPT, max_tokens=8, ignore_eos=True, seed=seeds[0])
    assert repeated.token_ids == results[0].token_ids


def test_options_by_config_and_by_keyword_agree(llm: LLM) -> None:
    config = SamplingConfig(temp=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    by_config = llm.generate(PROMPT, config, max_tokens=10, ignore_eos=True)
    by_keyword = llm.generate(
        PROMPT, temp=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=10, ignore_eos=True
    )
    assert by_config.token_ids == by_keyword.token_ids
    other = llm.generate(PROMPT, config, seed=4, max_tokens=10, ignore_eos=True)
    assert other.token_ids != by_config.token_ids, "a keyword wins"


def test_penalties_change_the_reply(llm: LLM) -> None:
    plain = llm.generate(PROMPT, max_tokens=16, **GREEDY).token_ids
    presence = llm.generate(PROMPT, max_tokens=16, presence_penalty=100, repeat_last_n=-1, **GREEDY)
    everything = PROMPT + presence.token_ids
    assert len(set(everything)) == len(everything) > len(set(PROMPT + plain)), "nothing twice"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tempo": 1}, "tempo"),
        ({"max_token": 4}, "max_token"),
        ({"temp": -1}, "temp"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -3}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop string"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": [b"a"]}, r"stop is \[b'a'\]"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'"),
        ({"with_routing": 1}, "with_routing is 1"),
        ({"temp": "hot"}, "temp is 'hot'"),
        ({"sampling": {"temp": 1}}, "{'temp': 1} is no SamplingConfig"),
        ({"constraint": "a*"}, "constraint is 'a\\*'"),
        ({"shown": [5]}, r"shown is \[5\]"),
        ({"max_tokens": np.zeros((2, 2))}, r"max_tokens is array\(\[\[0., 0.\],        \[0., 0.\]"),
    ],
)
def test_wrong_options_of_a_generation_are_named(
    llm: LLM, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        llm.generate(PROMPT, **options)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 64}, "context"),
        ({"ctx_size": 0}, "ctx_size"),
        ({"cache_type_k": "q8"}, "q8"),
        ({"ctx_size": 2.5}, "ctx_size is 2.5"),
        ({"config": {"ctx_size": 64}}, "no EngineConfig"),
        ({"model": 5}, "model is 5"),
        ({"progress": 5}, "progress is 5"),
    ],
)
def test_wrong_options_of_a_model_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        LLM(**{"model": TINY, **options})
    assert caught.value.hint
    model = open_model(TINY)
    with pytest.raises(UsageError):
        LLM(**{"model": model, **options})
    assert "model" in options or not model.file.metadata, "it is closed"


def test_a_config_and_keywords_combine() -> None:
    with LLM(TINY, EngineConfig(ctx_size=48), cache_type_v="f32") as llm:
        assert llm.plan.ctx_size == llm.engine.ctx_size == 48
        assert llm.plan.kv_types == ("f16", "f32")
        assert llm.spec.context_length == 128


# ----- prompts -----


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ("x " * 100, f"holds {CONTEXT}"),
        ([1] * (CONTEXT + 1), f"{CONTEXT + 1} tokens"),
        ([5, 300], "300"),
        ([-1], "-1"),
        ([1 << 40], str(1 << 40)),
        (5, "prompt is 5"),
        (b"abc", "prompt is b'abc'"),
        ([1.5], r"prompt is \[1.5\]"),
        ({1, 2}, r"prompt is \{1, 2\}"),
        (np.array(5), r"prompt is array\(5\)"),
    ],
)
def test_unusable_prompts_are_refused_before_anything_runs(
    llm: LLM, prompt: Any, words: str
) -> None:
    before = llm.scheduler.regions.tokens(0)
    for call in (llm.generate, llm.stream):
        with pytest.raises(PromptError, match=words) as caught:
            call(prompt, max_tokens=1)
        assert caught.value.hint
    assert llm.scheduler.regions.tokens(0) == before
    if not isinstance(prompt, str):
        with pytest.raises(PromptError, match=words):
            llm.logits(prompt)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate_many(5), "prompts is 5"),
        (lambda llm: llm.stream_many({"a": 1}), "prompts is {'a': 1}"),
        (lambda llm: llm.stream(PROMPT, progress=5), "progress is 5"),
        (lambda llm: llm.logits(PROMPT, phase="draft"), "phase is 'draft'"),
        (lambda llm: llm.perplexity("a text", 5), "windows is 5"),
    ],
)
def test_wrong_arguments_of_other_calls_are_named(
    llm: LLM, call: Callable[[LLM], object], words: str
) -> None:
    with pytest.raises(VkmoeError, match=words) as caught:
        call(llm)
    assert caught.value.hint


def test_text_and_its_tokens_are_the_same_prompt(llm: LLM) -> None:
    tokens: Any = np.array(llm.tokenizer.encode("the self"))
    text = llm.generate("the self", max_tokens=6, **GREEDY)
    assert text.token_ids == llm.generate(tokens, max_tokens=6, **GREEDY).token_ids


# ----- statistics, closing -----


def check_statistics(result: GenerationResult, n_prompt: int, n_tokens: int) -> None:
    s = result.statistics
    assert (s.n_prompt_tokens, s.n_generated_tokens) == (n_prompt, n_tokens)
    assert 0 < s.prompt_seconds <= s.ttft_seconds < s.ttft_seconds + s.decode_seconds < 60
    assert 0 < s.load_seconds < 120
    assert s.prompt_rate == pytest.approx((n_prompt - s.n_reused_tokens) / s.prompt_seconds)
    assert s.decode_rate == pytest.approx((n_tokens - 1) / s.decode_seconds)
    assert s.finish_reason == result.finish_reason


def test_statistics_add_up(llm: LLM) -> None:
    llm.forget()
    first = llm.generate(PROMPT, max_tokens=4, **GREEDY)
    check_statistics(first, len(PROMPT), 4)
    assert first.statistics.n_reused_tokens == 0
    second = llm.generate(PROMPT, max_tokens=4, **GREEDY)
    check_statistics(second, len(PROMPT), 4)
    assert second.statistics.n_reused_tokens == len(PROMPT) - 1
    assert llm.last_statistics == second.statistics
    assert llm.generate(PROMPT, max_tokens=0).statistics.decode_rate == 0


def test_facts_of_the_demo_model(demo: LLM) -> None:
    assert demo.spec.architecture == "qwen3moe"
    assert demo.spec.experts is not None and demo.spec.experts.n_used < demo.spec.experts.n_experts
    weights = demo_model_path().stat().st_size
    assert 0.9 * weights < sum(demo.memory.values()) < 3 * weights
    assert demo.device_info.name


def test_a_model_without_a_chat_template_says_so(llm: LLM) -> None:
    with pytest.raises(UnsupportedModelError, match="no chat template") as caught:
        _ = llm.chat_template
    assert caught.value.hint


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    with LLM(TINY, progress=lambda done, total: seen.append((done, total))):
        totals = {total for _, total in seen}
        done = [done for done, _ in seen]
        assert len(totals) == 1 and done == sorted(done)
        assert 0.9 * totals.pop() < done[-1]


def test_leaving_the_context_frees_everything(nothing_left: None) -> None:
    before = live_objects()
    with vkmoe.LLM(TINY, ctx_size=CONTEXT) as llm:
        llm.generate(PROMPT, max_tokens=2)
        assert native.live_objects() != before
    assert native.live_objects() == before, "without the help of the garbage collector"
    llm.close()
    with pytest.raises(ModelFileError), LLM(TINY.parent):
        pass
    assert native.live_objects() == before


# ----- forms, biases, log-probabilities -----


def test_a_reply_of_the_demo_model_is_kept_to_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}, "kind": {"enum": ["a", "b"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
    with LLM(draft="lookup") as drafting, LLM() as plain:
        texts = []
        for llm in (drafting, plain):
            constraint = llm.constraints.json_schema(schema)
            request = llm.request(CODE, temp=0, max_tokens=100, constraint=constraint)
            result = llm.generate(request)
            texts.append(result.text)
            assert result.finish_reason == "stop"
        with pytest.raises(UsageError, match="another model"):
            drafting.request(CODE, constraint=constraint)
    assert texts[0] == texts[1]
    value = json.loads(texts[0])
    assert set(value) == {"n", "kind"} and value["kind"] in ("a", "b")


def test_log_probabilities_are_those_of_the_models_logits(llm: LLM) -> None:
    request = llm.request(PROMPT, max_tokens=4, ignore_eos=True, seed=3, temp=2.0, n_logprobs=3)
    pieces = list(llm.stream(request))
    ids = [piece.token_id for piece in pieces if piece.token_id >= 0]
    assert len(ids) == 4
    logits = llm.logits([*PROMPT, *ids]).astype(np.float64)[len(PROMPT) - 1 :]
    right = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    most = max(2e-2, rounding(llm.engine, 1e-3) * np.abs(logits).max())
    for row, piece in zip(right[:4], pieces[:4], strict=True):
        assert piece.logprob == pytest.approx(row[piece.token_id], abs=most)
        assert [p for _, p in piece.top_logprobs] == pytest.approx(np.sort(row)[:-4:-1], abs=most)
    llm.forget()
    kept = llm.generate(request).logprobs
    assert [(each.chosen, each.likeliest) for each in kept] == [
        (piece.logprob, piece.top_logprobs) for piece in pieces[:4]
    ]
    assert llm.generate(PROMPT, max_tokens=1).logprobs == []


def test_a_bias_forces_a_token(llm: LLM) -> None:
    result = llm.generate(PROMPT, max_tokens=3, logit_bias={11: 100}, ignore_eos=True)
    assert result.token_ids == [11, 11, 11]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_logprobs": 21}, "n_logprobs is 21"),
        ({"n_logprobs": -1}, "n_logprobs is -1"),
        ({"logit_bias": {10**9: 1.0}}, "token 1000000000"),
        ({"n_logprobs": 1.5}, "n_logprobs is 1.5"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"logit_bias": {"5": 1.0}}, "token '5'"),
        ({"logit_bias": {5: "x"}}, "of token 5 is 'x'"),
        ({"logit_bias": [5]}, r"logit_bias is \[5\]"),
        ({"logit_bias": np.zeros(2)}, r"logit_bias is array\(\[0., 0.\]\)"),
        ({"logit_bias": {5: 100.5}}, "of token 5 is 100.5"),
        ({"logit_bias": {5: float("nan")}}, "of token 5 is nan"),
    ],
)
def test_wrong_biases_and_counts_are_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as found:
        llm.request(PROMPT, **options)
    assert found.value.hint
