"""Replies over HTTP are the model's own, whatever runs beside them, in OpenAI's forms."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.server.conftest import Served, serving
from vkmoe.llm import LLM

PROMPTS = ["def main():", "import os\n", "class Queue:\n    ", "x = [", "# The first"]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What the model writes on its own, without randomness."""
    with LLM(None, ctx_size=256) as llm:
        return {each: llm.generate(each, max_tokens=20, temp=0).text for each in PROMPTS}


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 20, "temperature": 0, **more}


def events(served: Served, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """The data of a stream's events, which must end with [DONE]."""
    with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    yield from map(json.loads, found[:-1])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_are_what_the_model_writes(
    server: Served, texts: dict[str, str], prompt: str
) -> None:
    found = server.post("/v1/completions", asked(prompt)).json()
    (choice,) = found["choices"]
    assert choice["text"] == texts[prompt] and choice["finish_reason"] == "length"
    assert found["object"] == "text_completion" and found["model"] == "demo"
    usage = found["usage"]
    assert usage["completion_tokens"] == 20 == found["timings"]["predicted_n"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_same_text_under_one_id(
    server: Served, texts: dict[str, str], path: str
) -> None:
    """Roles come first and the reason to end last; usage, if it is asked for, behind."""
    body = asked(PROMPTS[0], stream_options={"include_usage": True})
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    whole = server.post(path, body).json()
    *chunks, usage = events(server, path, body)
    assert {chunk["id"] for chunk in chunks} == {usage["id"]} != {whole["id"]}
    choices = [chunk["choices"][0] for chunk in chunks]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"] and len(chunks) > 10
    if "chat" in path:
        assert choices[0]["delta"] == {"role": "assistant", "content": None}
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == texts[PROMPTS[0]]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "asked before"


def test_a_stream_has_the_likelihoods_of_text_that_is_held_back(
    server: Served, texts: dict[str, str]
) -> None:
    """What may become a stop text waits for the tokens behind it; its figures do not get lost."""
    body = asked(PROMPTS[0], logprobs=1, stop=[texts[PROMPTS[0]][:-1] + "\0"])
    whole = server.post("/v1/completions", body).json()["choices"][0]
    chunks = events(server, "/v1/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, figures in whole["logprobs"].items():
        assert [each for part in parts for each in part["logprobs"][name]] == figures


def test_a_stream_of_an_empty_reply_has_what_is_echoed(
    server: Served, texts: dict[str, str]
) -> None:
    body = asked(PROMPTS[0], echo=True, stop=[texts[PROMPTS[0]][0]])
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    chunks = events(server, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole != ""


def test_replies_beside_others_are_those_alone(server: Served, texts: dict[str, str]) -> None:
    """Eight clients, of which some leave in the middle; then the engine is idle."""
    order = [random.Random(i).choice(PROMPTS) for i in range(64)]

    def one(index: int) -> None:
        body = asked(order[index])
        if index % 3 == 0:
            with server.client.stream(
                "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 200}
            ) as answer:
                next(answer.iter_lines())
            return
        assert (
            server.post("/v1/completions", body).json()["choices"][0]["text"] == texts[order[index]]
        )

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(one, range(len(order))))
    server.is_idle()
    assert not server.engine._listeners


def test_several_replies_have_seeds_that_follow_from_one(server: Served) -> None:
    body = {"prompt": PROMPTS[:2], "n": 3, "seed": 5, "max_tokens": 8}
    first, again = (server.post("/v1/completions", body).json()["choices"] for _ in range(2))
    assert [choice["index"] for choice in first] == list(range(6))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert len({choice["text"] for choice in first}) > 4
    (alone,) = server.post("/v1/completions", {**body, "prompt": PROMPTS[0], "n": 1}).json()[
        "choices"
    ]
    assert alone["text"] == first[0]["text"]


def test_no_top_k_may_be_written_in_two_ways(server: Served) -> None:
    """llama-server takes both, and so do the clients that are made for it."""
    every, other = (
        server.post("/v1/completions", asked(PROMPTS[0], temperature=1, seed=4, top_k=top_k))
        for top_k in (0, -1)
    )
    assert every.json()["choices"] == other.json()["choices"]


def test_stop_texts_end_a_reply_and_are_not_in_it(server: Served, texts: dict[str, str]) -> None:
    text = texts[PROMPTS[0]]
    stop = text[10:13]
    for form in (stop, [stop, "never there"]):
        found = server.post("/v1/completions", asked(PROMPTS[0], stop=form)).json()["choices"][0]
        assert found["text"] == text[: text.index(stop)] and found["finish_reason"] == "stop"


def test_openai_own_client_is_served(client: OpenAI, texts: dict[str, str]) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    found = client.completions.create(model="demo", prompt=PROMPTS[1], max_tokens=20, temperature=0)
    assert found.choices[0].text == texts[PROMPTS[1]]
    streamed = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPTS[1]}]}],
        max_completion_tokens=9,
        temperature=0,
        stream=True,
    )
    chunks = list(streamed)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 3


def test_likelihoods_and_biases_are_those_of_the_model(server: Served, client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": PROMPTS[1]}]
    common: dict[str, Any] = {"model": "demo", "max_tokens": 6, "temperature": 0}
    found = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=4, **common
    ).choices[0]
    assert found.logprobs is not None and found.logprobs.content is not None
    assert "".join(token.token for token in found.logprobs.content) == found.message.content
    for token in found.logprobs.content:
        best = token.top_logprobs[0]
        assert len(token.top_logprobs) == 4 and token.logprob == best.logprob <= 0
        assert bytes(best.bytes or ()).decode() == best.token == token.token
        assert sum(math.exp(each.logprob) for each in token.top_logprobs) <= 1.000001
    (banned, *_) = server.post("/tokenize", {"content": found.message.content}).json()["tokens"]
    other = client.chat.completions.create(
        messages=messages, logit_bias={str(banned): -100}, logprobs=True, **common
    ).choices[0]
    assert other.logprobs is not None and other.logprobs.content is not None
    assert other.logprobs.content[0].token != found.logprobs.content[0].token
    legacy = client.completions.create(prompt=PROMPTS[1], logprobs=2, **common).choices[0]
    assert legacy.logprobs is not None and legacy.logprobs.top_logprobs is not None
    assert [len(each) for each in legacy.logprobs.top_logprobs] == [2] * 6


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 2, 3]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_may_be_demanded_of_a_model_whose_template_has_none(
    client: OpenAI, choice: Any
) -> None:
    common: Any = {"model": "demo", "messages": [{"role": "user", "content": "x ="}], "seed": 1}
    common |= {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
    common |= {"tool_choice": choice, "max_tokens": 120}
    done = client.chat.completions.create(**common).choices[0]
    assert done.finish_reason == "tool_calls" and not done.message.content
    assert done.message.tool_calls
    (call,) = done.message.tool_calls
    assert call.type == "function" and call.function.name == "f"
    assert set(json.loads(call.function.arguments)) == {"name", "n"}
    chunks = [each.choices[0] for each in client.chat.completions.create(**common, stream=True)]
    deltas = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    streamed = "".join(part.function.arguments or "" for part in deltas if part.function)
    assert streamed == call.function.arguments and chunks[-1].finish_reason == "tool_calls"
    free = client.chat.completions.create(**{**common, "tool_choice": "auto", "max_tokens": 5})
    assert free.choices[0].message.content and not free.choices[0].message.tool_calls


def test_a_reply_has_the_form_that_was_asked_for(server: Served, client: OpenAI) -> None:
    for temperature in (0.0, 0.3):
        done = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "x ="}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": SCHEMA, "strict": True},
            },
            seed=1,
            temperature=temperature,
            max_tokens=240,
        ).choices[0]
        assert done.finish_reason == "stop"
        value = json.loads(done.message.content or "")
        assert set(value) == {"name", "n"} and value["n"] in (1, 2, 3) and len(value["name"]) <= 8
    for wrong in ({"type": "nonsense"}, {"$ref": "http://example.com/x.json"}):
        form = {"type": "json_schema", "json_schema": {"schema": wrong}}
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 400 and "schema" in answer.json()["error"]["message"]


def test_tokens_and_templates_are_the_models(server: Served) -> None:
    text = "def f(x):\n    return 'é'"
    ids = server.post("/tokenize", {"content": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json() == {
        "content": text,
        "prompt": text,
    }
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    prompt = server.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt.endswith("a\nb\n")
    props = server.client.get("/props").json()
    meta = server.client.get("/v1/models").json()["data"][0]["meta"]
    assert meta["n_embd"] == 256 and meta["n_params"] > meta["size"] > 20 << 20
    assert props["bos_token"] == props["eos_token"] == "<|endoftext|>"
    assert props["model_path"] == "demo.gguf" and not props["modalities"]["vision"]
    assert props["total_slots"] == 2 and "message.content" in props["chat_template"]


def test_a_client_needs_no_tokenizer_of_its_own(server: Served) -> None:
    """The server's answers in vLLM's form, for which lm-eval asks."""
    found = server.client.get("/tokenizer_info").json()
    template = server.client.get("/props").json()["chat_template"]
    assert found["eos_token"] == found["bos_token"] == "<|endoftext|>"
    assert found["chat_template"] == template and found["model_max_length"] == 256
    assert found["tokenizer_class"] == "gpt2"
    own = server.post("/tokenize", {"content": "def f(x):"}).json()["tokens"]
    answer = {"tokens": [0, *own], "count": len(own) + 1, "max_model_len": 256}
    assert server.post("/tokenize", {"prompt": "def f(x):"}).json() == answer
    bare = {"prompt": "def f(x):", "add_special_tokens": False}
    assert server.post("/tokenize", bare).json()["tokens"] == own
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == [0]
    for wrong in ({}, {"prompt": "a", "content": "a"}, {"prompt": 3}):
        assert server.post("/tokenize", wrong).status_code == 400


def test_counts_are_written_for_prometheus(server: Served) -> None:
    def count(name: str) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))

    before = [count("vkmoe_reply_tokens_total"), count("vkmoe_requests_total")]
    server.post("/v1/completions", asked("x ="))
    after = [count("vkmoe_reply_tokens_total"), count("vkmoe_requests_total")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [20, 1]
    assert count("vkmoe_time_to_first_token_seconds_count") == after[1]
    assert count("vkmoe_requests_running") == count("vkmoe_requests_waiting") == 0


def test_prompts_that_left_their_slot_are_listed_and_counted(server: Served) -> None:
    def count(name: str) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))

    texts = [f"# {word}\n" + "x = [1, 2, 3]\n" * 12 for word in ("a", "bb", "cc d", "a")]
    before = count("vkmoe_restored_tokens_total")
    for text in texts:
        usage = server.post("/v1/completions", asked(text)).json()["usage"]
    n_prompt = usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == n_prompt - 1
    assert count("vkmoe_restored_tokens_total") - before > n_prompt / 2
    slots = server.client.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    kept = slots[0]["kept_prompts"]
    assert kept == slots[1]["kept_prompts"] and all(each["n_tokens"] > 32 for each in kept)
    assert count("vkmoe_kept_prompt_bytes") >= sum(each["n_bytes"] for each in kept) > 0


def test_chunks_have_timings_where_that_is_asked_for(server: Served) -> None:
    """Of each token, and in any case in the last chunk, as llama-server has it."""
    for path, body in (
        ("/v1/completions", {"prompt": "x ="}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x ="}]}),
    ):
        for wanted in ({}, {"timings_per_token": True}):
            for counted in ({}, {"stream_options": {"include_usage": True}}):
                found = list(events(server, path, {**asked(""), **body, **wanted, **counted}))
                timed = [chunk["timings"] for chunk in found if "timings" in chunk]
                assert "timings" in found[-1] and ("usage" in found[-1]) == bool(counted)
                numbers = [each["predicted_n"] for each in timed]
                assert numbers[-1] == 20 and numbers == sorted(numbers) and numbers[0] > 0
                assert len(timed) > 5 if wanted else len(timed) == 1


def test_progress_goes_up_to_the_whole_prompt(server: Served) -> None:
    """Also of a prompt that is read at once, or that was read before."""
    messages = [{"role": "user", "content": "progress of this " * 5}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0, "return_progress": True}
    for was_read in (False, True):
        found = list(events(server, "/v1/chat/completions", body))
        shown = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
        done = [each["processed"] for each in shown]
        assert done == sorted(set(done)) and done[-1] == shown[-1]["total"] > 10
        assert (shown[-1]["cache"] > 10) == was_read
        assert all(not c["choices"][0]["delta"] for c in found if "prompt_progress" in c)


LONG = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True}


def test_a_full_queue_refuses_until_there_is_room() -> None:
    with serving(parallel=1, max_queue=1, ctx_size=1024) as served:
        served.wait()
        with ThreadPoolExecutor(8) as clients:
            asked_for = {**LONG, "max_tokens": 200}
            found = list(clients.map(lambda _: served.post("/v1/completions", asked_for), range(8)))
        refused = [answer for answer in found if answer.status_code != 200]
        assert len(refused) >= 5 and {answer.status_code for answer in refused} == {503}
        for answer in refused:
            assert answer.json()["error"]["code"] == "queue_full" and answer.headers["retry-after"]
        assert served.post("/v1/completions", asked_for).status_code == 200


def test_without_a_queue_as_many_begin_as_there_is_room_for() -> None:
    with serving(parallel=2, max_queue=0) as served:
        served.wait()
        assert served.post("/v1/completions", asked("x =", n=2)).status_code == 200
        answer = served.post("/v1/completions", asked("x =", n=3))
        assert answer.json()["error"]["code"] == "queue_full"


def test_tools_that_are_no_functions_are_left_alone(server: Served) -> None:
    """Clients offer those of OpenAI's own service unasked."""
    body = {"input": "x =", "max_output_tokens": 4, "tools": [{"type": "web_search"}]}
    assert server.post("/v1/responses", body).json()["usage"]["output_tokens"] == 4


def test_a_reply_that_takes_too_long_is_ended() -> None:
    """Before it began, that is its status; in a stream, the last event."""
    with serving(settings={"timeout": 3.0}, ctx_size=1024) as served:
        served.wait()
        served.engine.llm.scheduler.after_run = lambda *_: time.sleep(0.02)
        answer = served.post("/v1/completions", LONG)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
        with served.client.stream(
            "POST", "/v1/completions", json={**LONG, "stream": True}
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert len(lines) > 10
        for _ in range(100):
            if not served.engine._listeners:
                break
            time.sleep(0.05)
        assert not served.engine._listeners
