"""Completions that show their prompt: its text, and how likely each of its tokens was."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import Served
from vkmoe.llm import LLM

PROMPT = "def größe(x):\n    return '→' # a b  c\n" * 3
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "echo": True}


@pytest.fixture(scope="module")
def likely() -> tuple[list[int], np.ndarray[Any, np.dtype[np.float64]]]:
    """The tokens of the prompt, and the log-probabilities of all tokens behind each."""
    with LLM(None, ctx_size=256) as llm:
        ids = llm.tokenizer.encode(PROMPT)
        logits = llm.logits(ids, "prompt").astype(np.float64)
    best = logits.max(axis=1, keepdims=True)
    return ids, logits - best - np.log(np.exp(logits - best).sum(axis=1, keepdims=True))


def choice(served: Served, **more: Any) -> dict[str, Any]:
    answer = served.post("/v1/completions", {**BODY, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def test_the_token_that_begins_a_text_does_not_show(server: Served, likely: Any) -> None:
    tokenizer, (ids, _) = server.engine.llm.tokenizer, likely
    assert tokenizer.added_first == ids[:1] != []
    plain = choice(server, echo=False)["text"]
    for prompt in (PROMPT, ids, ids[1:]):
        assert choice(server, prompt=prompt)["text"].startswith(PROMPT)
    assert choice(server)["text"] == PROMPT + plain


def test_an_echo_has_the_likelihoods_of_the_prompt(server: Served, likely: Any) -> None:
    """All of them, also where the prompt was read before, as ids or as a text."""
    ids, right = likely
    figures = choice(server, logprobs=5, prompt=ids)["logprobs"]
    n = len(ids)
    assert len(figures["tokens"]) == n + 6
    assert figures["token_logprobs"][0] is None and figures["top_logprobs"][0] is None
    own = [right[i, token] for i, token in enumerate(ids[1:])]
    assert figures["token_logprobs"][1:n] == pytest.approx(own, abs=1e-4)
    for place, top in enumerate(figures["top_logprobs"][1:n]):
        best = {*np.argsort(right[place])[::-1][:5].tolist(), ids[place + 1]}
        shares = sorted(right[place][list(best)], reverse=True)
        assert sorted(top.values(), reverse=True) == pytest.approx(shares, abs=1e-4)
    assert figures["token_logprobs"][n:] == choice(server, echo=False, logprobs=5)["logprobs"][
        "token_logprobs"
    ], "the reply's are its own"  # fmt: skip


def test_figures_are_those_of_the_tokens_that_a_text_has(server: Served, likely: Any) -> None:
    """The token that the server puts before a text has none, unless the text spells it out."""
    ids, _ = likely
    given = choice(server, logprobs=5, prompt=ids)["logprobs"]
    figures = choice(server, logprobs=5)["logprobs"]
    assert figures == {name: each[1:] for name, each in given.items()}
    assert len(figures["tokens"]) == len(ids) - 1 + 6 and None not in figures["token_logprobs"]
    spelled = server.engine.llm.tokenizer.token_text(ids[0])
    shown = choice(server, logprobs=5, prompt=spelled + PROMPT)
    assert shown["logprobs"]["token_logprobs"] == given["token_logprobs"]
    assert shown["logprobs"]["tokens"] == [spelled, *given["tokens"][1:]]
    assert shown["logprobs"]["text_offset"][1] == len(spelled)


def test_tokens_are_spelled_as_they_stand_in_the_text(server: Served) -> None:
    found = choice(server, logprobs=1)
    figures, text = found["logprobs"], found["text"]
    assert not any(mark in token for token in figures["tokens"] for mark in "ĠĊ▁")
    raw = b"".join(map(as_bytes, figures["tokens"]))
    assert raw.decode("utf-8", "replace") == text
    assert any(token.startswith("bytes:") for token in figures["tokens"]), "the arrow's parts"
    whole = zip(pairwise(figures["text_offset"]), figures["tokens"], strict=False)
    for (start, end), token in whole:
        assert token.startswith("bytes:") or text[start:end] == token


def as_bytes(token: str) -> bytes:
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_a_stream_has_the_same_figures(server: Served, max_tokens: int) -> None:
    more = {"logprobs": 2, "max_tokens": max_tokens}
    whole = choice(server, **more)
    body = {**BODY, **more, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, figures in whole["logprobs"].items():
        assert [each for part in parts for each in part["logprobs"][name]] == figures
