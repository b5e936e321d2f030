"""Replies say which experts their tokens used, each its own, in vLLM's form."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.server.conftest import Served, serving
from vkmoe.batch import RunResult, TokenBatch
from vkmoe.config import EngineConfig
from vkmoe.llm import LLM

N_LAYERS, N_USED = 6, 4  # of the demo model
PROMPTS = ("def add(a, b):\n    return a + b\n\n\ndef", "import os\nimport")
ASKED = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_routed_experts": True}


@pytest.fixture(scope="module", params=["none", "lookup"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of two replies at once, without and with guesses, of which some are taken back."""
    with serving(device="cpu", draft=request.param) as served:
        served.wait()
        yield served


def decoded(choice: dict[str, Any]) -> NDArray[Any]:
    data = base64.b64decode(choice["routed_experts"], validate=True)
    routing: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    assert routing.dtype == np.uint8
    return routing


def alone(prompt: str) -> NDArray[Any]:
    """What the engine's own log says of the same text, the one that runs."""
    rows: dict[int, NDArray[Any]] = {}

    def note(batch: TokenBatch, result: RunResult) -> None:
        for position, routing in zip(batch.positions, result.routing, strict=True):
            rows[position] = routing

    with LLM(None, EngineConfig(ctx_size=256, device="cpu")) as llm:
        llm.scheduler.after_run = note
        llm.generate(prompt, max_tokens=24, temp=0, ignore_eos=True)
    return np.stack([rows[position] for position in range(len(rows))])


def test_replies_beside_each_other_have_their_own_rows(drafting: Served) -> None:
    """And all of them, also where the prompt was read before."""

    def ask(prompt: str) -> dict[str, Any]:
        return dict(drafting.post("/v1/completions", {**ASKED, "prompt": prompt}).json())

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(ask, PROMPTS))
    wanted = [alone(prompt) for prompt in PROMPTS]
    assert not np.array_equal(wanted[0][-20:], wanted[1][-20:])
    for found, rows, prompt in zip(both, wanted, PROMPTS, strict=True):
        n_tokens = found["usage"]["total_tokens"]
        assert rows.shape == (n_tokens - 1, N_LAYERS, N_USED)  # the last token never ran
        np.testing.assert_array_equal(decoded(found["choices"][0]), rows)
        again = ask(prompt)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        np.testing.assert_array_equal(decoded(again["choices"][0]), rows)


def test_several_replies_to_a_prompt_have_rows_each(drafting: Served) -> None:
    body = {**ASKED, "prompt": PROMPTS[0], "n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 8}
    first, second = drafting.post("/v1/completions", body).json()["choices"]
    assert first["text"] != second["text"]
    n_prompt = len(decoded(first)) - 7
    np.testing.assert_array_equal(decoded(first)[:n_prompt], decoded(second)[:n_prompt])
    assert not np.array_equal(decoded(first), decoded(second))


def test_the_last_chunk_of_a_stream_has_them(drafting: Served) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": PROMPTS[1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "write"}]}),
    ):
        whole = drafting.post(path, {**ASKED, **body}).json()["choices"][0]
        lines = drafting.post(path, {**ASKED, **body, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [choice["routed_experts"] for choice in choices if "routed_experts" in choice] == [
            whole["routed_experts"]
        ]
        assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"
        assert "routed_experts" in choices[-1]


def test_they_are_there_only_where_they_are_asked_for(drafting: Served) -> None:
    body = {"prompt": PROMPTS[1], "max_tokens": 4}
    plain = drafting.post("/v1/completions", body).json()
    assert "routed_experts" not in plain["choices"][0]
    none = drafting.post("/v1/completions", {**ASKED, **body, "max_tokens": 0}).json()
    assert len(decoded(none["choices"][0])) == none["usage"]["prompt_tokens"]
