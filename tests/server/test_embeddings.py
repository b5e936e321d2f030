"""Embeddings over HTTP: OpenAI's form and client, llama-server's own, many texts, refusals."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.engine.tiny import model_path, rewrite, with_metadata
from tests.server.conftest import Served, serving
from vkmoe.config import EngineConfig
from vkmoe.llm import LLM
from vkmoe.server.transport.sse import json_bytes

TEXTS = ["def main():", "import os", "class Queue:\n    def push(self, item):\n"]


@pytest.fixture(scope="module")
def plain(on_the_cpu: None) -> Iterator[LLM]:
    with LLM(ctx_size=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


def numbers(answer: Any) -> list[np.ndarray[Any, Any]]:
    assert answer.status_code == 200, answer.text
    return [np.array(each["embedding"], np.float32) for each in answer.json()["data"]]


def test_openai_s_client_gets_the_bits_of_python(client: openai.OpenAI, plain: LLM) -> None:
    """In both encodings; in base64 unless it is asked for numbers."""
    wanted = plain.embed(TEXTS)
    ways: tuple[Any, ...] = ({}, {"encoding_format": "float"})
    for more in ways:
        found = client.embeddings.create(model="demo", input=TEXTS, **more)
        vectors = [each.embedding for each in found.data]
        np.testing.assert_array_equal(np.array(vectors, np.float32), wanted)
        assert [each.index for each in found.data] == [0, 1, 2] and found.model == "demo"
        n_tokens = sum(len(plain.tokenize(text)) for text in TEXTS)
        assert found.usage.prompt_tokens == found.usage.total_tokens == n_tokens
    raw = client.embeddings.with_raw_response.create(
        model="demo", input=TEXTS[0], encoding_format="base64"
    )
    packed = raw.http_response.json()["data"][0]["embedding"]
    data = np.frombuffer(b64decode(packed), "<f4")
    np.testing.assert_array_equal(data, wanted[0])


def test_all_forms_of_an_input_are_taken(server: Served, plain: LLM) -> None:
    ids = [plain.tokenize(text) for text in TEXTS]
    (first,) = numbers(server.post("/v1/embeddings", {"input": TEXTS[0]}))
    np.testing.assert_array_equal(first, plain.embed(TEXTS[0]))
    part = {"content": [{"type": "text", "text": "def "}, {"type": "text", "text": "main():"}]}
    one: tuple[Any, ...] = (ids[0], {"prompt_string": TEXTS[0]}, part, [ids[0]], [part])
    for given in one:
        (found,) = numbers(server.post("/v1/embeddings", {"input": given}))
        np.testing.assert_array_equal(found, first)
    both = numbers(server.post("/v1/embeddings", {"input": [TEXTS[0], ids[1], part]}))
    np.testing.assert_array_equal(both, [first, plain.embed(ids[1]), first])
    (cut,) = numbers(server.post("/v1/embeddings", {"input": TEXTS[0], "dimensions": 10}))
    np.testing.assert_allclose(cut, first[:10] / np.linalg.norm(first[:10]), rtol=1e-6)


def test_llama_server_s_form_has_every_token_unless_they_are_pooled(
    server: Served, plain: LLM
) -> None:
    """As they are: its vectors are normed only where they are pooled."""
    states = plain.embed(TEXTS[0], pooling="none", normalize=False)
    for path in ("/embedding", "/embeddings"):
        for name in ("content", "input"):
            (only,) = server.post(path, {name: TEXTS[0]}).json()
            assert only["index"] == 0
            np.testing.assert_array_equal(np.array(only["embedding"], np.float32), states)
    as_content = server.post("/v1/embeddings", {"content": TEXTS[:2]}).json()
    assert [each["index"] for each in as_content] == [0, 1]
    assert [len(each["embedding"]) for each in as_content] == [
        len(plain.tokenize(text)) for text in TEXTS[:2]
    ]


def test_a_server_pools_and_norms_as_its_options_say(plain: LLM) -> None:
    mean = plain.embed(TEXTS[0], pooling="mean", normalize=False)
    with serving(settings={"pooling": "mean", "embd_normalize": 1}) as served:
        served.wait()
        (found,) = numbers(served.post("/v1/embeddings", {"input": TEXTS[0]}))
        np.testing.assert_allclose(found, mean / np.abs(mean).sum(), rtol=1e-6)
        for order, wanted in ((-1, mean), (2, mean / np.linalg.norm(mean))):
            (only,) = served.post(
                "/embedding", {"content": TEXTS[0], "embd_normalize": order}
            ).json()
            np.testing.assert_allclose(only["embedding"], wanted[None], rtol=1e-6)
    with serving(settings={"pooling": "none"}) as served:
        served.wait()
        refused = served.post("/v1/embeddings", {"input": "a"})
        assert refused.status_code == 400 and "no vector for a text" in refused.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"content": {"content": []}}, "content"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 257}, "dimensions"),
        ({"input": "a", "embd_normalize": -2}, "embd_normalize"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1, 10**9]}, None),
        ({"input": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_embedded_is_refused(
    server: Served, body: dict[str, Any], param: str | None
) -> None:
    refused = server.post("/v1/embeddings", body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_a_text_that_does_not_fit_is_refused_with_the_usual_error(server: Served) -> None:
    for given in ([[1, 2], [1] * 257], "word " * 500):
        error = server.post("/v1/embeddings", {"input": given}).json()["error"]
        assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == 256
    server.is_idle()


def test_more_texts_than_may_wait_are_embedded_beside_replies(plain: LLM) -> None:
    """A reply under way is the one of a server that does nothing else; a full queue refuses all."""
    asked = {"prompt": TEXTS[0], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with serving(max_queue=0) as served:
        served.wait()
        alone = served.post("/v1/completions", asked).json()["choices"][0]["text"]
        held, refusals = hold_runs(served.engine.llm), list[Any]()

        def n_there() -> int:
            return served.engine.n_running + served.engine.n_waiting

        with ThreadPoolExecutor(3) as threads:
            replies = [threads.submit(served.post, "/v1/completions", asked) for _ in range(2)]
            wait_until(lambda: n_there() == 2)
            refusals.append(served.post("/v1/embeddings", {"input": "a"}))
            held.set()
            wait_until(lambda: n_there() == 0)
            held.clear()
            replies.append(threads.submit(served.post, "/v1/completions", asked))
            wait_until(lambda: n_there() == 1)
            texts = [f"x{index} = {index}" for index in range(20)]
            asking = threads.submit(served.post, "/v1/embeddings", {"input": texts})
            wait_until(lambda: n_there() == 2)
            held.set()
            found = numbers(asking.result(60))
            assert [each.result(60).json()["choices"][0]["text"] for each in replies] == 3 * [alone]
        np.testing.assert_array_equal(found, plain.embed(texts))
        assert refusals[0].status_code == 503
        assert refusals[0].json()["error"]["code"] == "queue_full"
        assert "vkmoe_requests_total 24.0" in served.client.get("/metrics").text
        served.is_idle()


def hold_runs(llm: LLM) -> threading.Event:
    """Keep each run of a model from ending until the event is set."""
    event = threading.Event()

    def hold(*_: object) -> None:
        assert event.wait(60)

    llm.scheduler.after_run = hold
    return event


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never is")


def test_a_client_that_leaves_ends_its_embeddings(server: Served) -> None:
    body = json_bytes({"input": ["def main():\n" * 40] * 2000})
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {server.place[0]}:{server.place[1]}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    before = server.engine.n_runs[0]
    assert server.raw(head.encode() + body) == b""
    server.is_idle()
    assert server.engine.n_runs[0] - before < 2000


def test_a_model_that_ranks_says_that_it_gives_no_embeddings(tmp_path: Path) -> None:
    change = with_metadata({"qwen3moe.pooling_type": 4})
    path = rewrite(model_path("moe_plain"), tmp_path / "ranks.gguf", change)
    with serving(lambda: LLM(path, EngineConfig(ctx_size=32))) as served:
        served.wait()
        for name in ("/v1/embeddings", "/embedding"):
            refused = served.post(name, {"input": [5, 6]})
            assert refused.status_code == 400 and "in way 4" in refused.text
