"""`LLM.chat` gives what `vkmoe serve` gives for the same request, and names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.calls import TEMPLATE, TOOL, WEATHER
from tests.server.conftest import Served, serving
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.generate.tools import Content, Thought, ToolCallArguments, ToolCallBegin
from vkmoe.llm import LLM
from vkmoe.llm.options import SamplingOptions
from vkmoe.llm.results import ChatEnd, ChatEvent, ChatResult

ASK: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "def main():"}]},
]
CALLED: Any = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I ask.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
BEGUN: Any = {"role": "assistant", "content": "    x = "}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
TOOLS: Any = {"tools": [TOOL], "max_tokens": 300}
# What a chat is asked, in the words that the server and LLM have in common.
REQUESTS: dict[str, Any] = {
    "plain": {"max_tokens": 12},
    "most likely": {"max_tokens": 12, "temperature": 0, "seed": None},
    "stop": {"max_tokens": 60, "stop": ["\n", "("]},
    "biased": {"max_tokens": 6, "logit_bias": {17: 100}},
    "required": {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {**TOOLS, "tool_choice": NAMED},
    "forbidden": {**TOOLS, "tool_choice": "none", "max_tokens": 8},
    "earlier calls": {"messages": CALLED, **TOOLS, "max_tokens": 8},
    "cut call": {**TOOLS, "tool_choice": "required", "max_tokens": 28},
    "schema": {"response_format": FORMAT, "max_tokens": 100},
    "object": {"json_schema": {"enum": [[1, 2], "x"]}, "max_tokens": 30},
    "grammar": {"grammar": 'root ::= "a" | "b"'},
    "thoughts": {"chat_template_kwargs": {"thinks": True}, "max_tokens": 8},
    "effort": {"reasoning_effort": "high", "max_tokens": 8},
    "going on": {"messages": [*ASK, BEGUN], "max_tokens": 8},
    "not going on": {
        "messages": [*ASK, BEGUN],
        "continue_final_message": False,
        "max_tokens": 8,
    },
}
# The end of a prompt: what it says of the effort, and a thought that it opens.
THINKING = "{{ reasoning_effort }}{% if thinks %}<think>{% endif %}"
NOT_OURS = {"temperature": "temp", "top_logprobs": "n_logprobs"}


def with_template() -> LLM:
    template = f"{TEMPLATE}{THINKING}{{# </think> #}}"
    return LLM(None, EngineConfig(ctx_size=1024, parallel=2), chat_template=template)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(with_template) as served:
        served.wait()
        yield served


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with with_template() as llm:
        yield llm


def asked(name: str) -> dict[str, Any]:
    """A request in the words of the server."""
    return {"messages": ASK, "seed": 3, "logprobs": True, "top_logprobs": 2, **REQUESTS[name]}


def options_of(body: dict[str, Any]) -> dict[str, Any]:
    """The options of `LLM.chat` for a request."""
    given = {NOT_OURS.get(key, key): value for key, value in body.items() if key != "logprobs"}
    return {key: value for key, value in given.items() if key != "messages"}


def calls_of(result: ChatResult) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in result.tool_calls]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_chat_is_what_the_server_gives(served: Served, llm: LLM, name: str) -> None:
    body = asked(name)
    (choice,) = served.post("/v1/chat/completions", body).json()["choices"]
    message = choice["message"]
    found = llm.chat(body["messages"], **options_of(body))
    assert found.content == (message["content"] or "")
    assert found.thoughts == message.get("reasoning_content", "")
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert calls_of(found) == [(each["name"], each["arguments"]) for each in functions]
    assert found.finish_reason == choice["finish_reason"]
    likely = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert [each.chosen for each in found.logprobs] == likely and likely
    if name == "thoughts":
        assert found.thoughts and not found.content
    if name in ("required", "named"):
        assert found.finish_reason == "tool_calls"
        assert found.tool_calls[0].parsed == json.loads(functions[0]["arguments"])


@pytest.mark.parametrize("name", ["plain", "required", "cut call", "thoughts"])
def test_events_come_as_the_server_streams_them_and_end_with_the_reply(
    served: Served, llm: LLM, name: str
) -> None:
    body = asked(name) | {"logprobs": False, "top_logprobs": None}
    deltas = list(_deltas(served, body))
    *events, end = llm.chat_stream(body["messages"], **options_of(body))
    assert list(filter(None, map(_delta, events))) == deltas
    assert isinstance(end, ChatEnd)
    whole = llm.chat(body["messages"], **options_of(body))
    assert (end.result.content, end.result.thoughts) == (whole.content, whole.thoughts)
    assert calls_of(end.result) == calls_of(whole) and end.result.finish_reason != "interrupt"
    if name == "cut call":  # amid its arguments
        assert any(isinstance(each, ToolCallArguments) for each in events) and not whole.tool_calls


def _deltas(served: Served, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the server streams: the kind of each part, and its text."""
    url = "/v1/chat/completions"
    with served.client.stream("POST", url, json={**body, "stream": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        for name in ("content", "reasoning_content"):
            if text := choice["delta"].get(name):
                yield name, text
        for call in choice["delta"].get("tool_calls", ()):
            yield "call", call["function"].get("name") or call["function"]["arguments"]


def _delta(event: ChatEvent) -> tuple[str, str] | None:
    if isinstance(event, Content):
        return "content", event.text
    if isinstance(event, Thought):
        return "reasoning_content", event.text
    if isinstance(event, ToolCallBegin):
        return "call", event.name
    return ("call", event.text) if isinstance(event, ToolCallArguments) else None


def test_sampling_may_be_given_as_one_object(llm: LLM) -> None:
    """Options by name change it."""
    likeliest = llm.chat(ASK, temp=0, max_tokens=20).content
    assert llm.chat(ASK, SamplingConfig(temp=0), max_tokens=20).content == likeliest
    asked = SamplingConfig(temp=1.5, seed=4)
    by_names = llm.chat(ASK, temp=1.5, seed=4, max_tokens=20).content
    assert llm.chat(ASK, asked, max_tokens=20).content == by_names != likeliest
    assert llm.chat(ASK, asked, temp=0, max_tokens=20).content == likeliest


def test_a_template_is_applied_as_by_the_server(served: Served, llm: LLM) -> None:
    body = {"messages": CALLED, "tools": [TOOL]}
    prompt = served.post("/apply-template", body).json()["prompt"]
    assert llm.apply_template(CALLED, tools=[TOOL]) == prompt
    assert '{"name": "weather", "arguments": {"city": "Rome", "days": 1}}' in prompt


def test_a_chat_goes_on_with_the_message_of_a_result(llm: LLM) -> None:
    found = llm.chat(ASK, tools=[TOOL], tool_choice="required", seed=3, max_tokens=300)
    call = found.tool_calls[0]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    prompt = llm.apply_template([*ASK, found.message, result])
    assert json.dumps(call.parsed) in prompt and prompt.index("rain") > prompt.index(call.name)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "empty list"),
        ("Hello", {}, "no list of messages"),
        ([{"role": "user", "content": 5}], {}, "content of a message is 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        (ASK, {"constraint": None}, "unknown option constraint"),
        (ASK, {"tools": [{"type": "function"}]}, "tools.0: a tool is a function"),
        (ASK, {"tools": {"name": "f"}}, "tools is"),
        (ASK, {"tool_choice": "required"}, "no tools"),
        (ASK, {"tool_choice": "rain", "tools": [TOOL]}, "'rain', which is no tool"),
        (ASK, {"tool_choice": 5}, "tool_choice is 5"),
        (ASK, {"regex": "a", "choice": ["a"]}, "regex and choice are two forms"),
        (ASK, {"response_format": {"type": "xml"}}, "response_format is"),
        (ASK, {"json_schema": "{}"}, "json_schema is"),
        (ASK, {"choice": []}, "choice is"),
        (ASK, {"chat_template_kwargs": {"tools": []}}, "must not set 'tools'"),
        (ASK, {"chat_template_kwargs": {5: 1}}, "chat_template_kwargs is 5"),
        (ASK, {"reasoning_effort": 5}, "reasoning_effort is 5"),
        (ASK, {"continue_final_message": True}, "no text of the assistant"),
        ([*ASK, BEGUN, BEGUN], {}, "both the assistant's"),
        (ASK, {"max_tokens": -1}, "max_tokens is -1"),
        ([{"role": "user", "content": "a " * 3000}], {}, "the context holds 1024"),
    ],
)
def test_wrong_chats_are_named(llm: LLM, messages: Any, options: Any, words: str) -> None:
    """By both forms of the call, before anything runs."""
    for call in (llm.chat, llm.chat_stream):
        with pytest.raises((PromptError, UsageError), match=words) as caught:
            call(messages, **options)
        assert caught.value.hint
    assert not llm.scheduler.has_work


def test_a_stream_that_is_dropped_ends_its_reply(llm: LLM) -> None:
    events = llm.chat_stream(ASK, ignore_eos=True)
    next(events)
    assert llm.scheduler.has_work
    del events
    assert not llm.scheduler.has_work


def test_tokens_become_the_text_again(llm: LLM) -> None:
    ids = llm.tokenize("def f(x):\n    é", add_special=False)
    assert llm.detokenize(ids) == "def f(x):\n    é"
    with_begin = llm.tokenize("x")
    assert with_begin[1:] == llm.tokenize("x", add_special=False) and len(with_begin) > 1
    calls: list[Callable[[], object]] = [
        lambda: llm.tokenize(5),  # type: ignore[arg-type]
        lambda: llm.detokenize([0, llm.spec.n_vocab]),
        lambda: llm.detokenize("x"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(VkmoeError) as caught:
            call()
        assert caught.value.hint


def test_sampling_options_are_those_of_the_config() -> None:
    fields = SamplingConfig.__dataclass_fields__
    annotated = {name: field.type for name, field in fields.items()}
    given = SamplingOptions.__annotations__
    assert {name: each.__forward_arg__ for name, each in given.items()} == annotated


def test_a_closed_model_says_so() -> None:
    llm = with_template()
    llm.chat(ASK, max_tokens=1)
    llm.close()
    with pytest.raises(UsageError, match=r"^the model is closed$"):
        llm.chat(ASK)
