"""Six clients at once ask in five ways, of a model that writes as four families do: no error, and
each reply is the one that it would be alone.

A plain completion is none of the five: no template takes part in it, and test_load.py has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.calls import WEATHER, is_asked
from tests.server.conftest import Served, serving
from vkmoe.config import EngineConfig
from vkmoe.llm import LLM

pytestmark = [pytest.mark.shared, pytest.mark.usefixtures("one_device")]

N_CLIENTS = 6
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
FUNCTION = {"name": "weather", "description": "Forecast.", "parameters": WEATHER}
TOOL = {"name": "weather", "description": "Forecast.", "input_schema": WEATHER}
USES = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
CALLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
LONG = {"max_tokens": 200}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}


class Family(NamedTuple):
    """How a family begins a call and an answer of a form, where it may think first."""

    template: str
    call: str
    answer: str


FAMILIES = {
    "JSON between tags": Family("Qwen-Qwen3-0.6B", "<tool_call>", "{"),
    "tags for each argument": Family("GLM-5.2", "<tool_call>", "{"),
    "channels": Family("openai-gpt-oss-120b", "commentary", "final"),
    "marks of its own": Family("mistralai-Mistral-Nemo-Instruct-2407", "[TOOL_CALLS]", "{"),
}


class Kind(NamedTuple):
    """A kind of request, and whether it is streamed; alone, none is."""

    path: str
    body: dict[str, Any]
    streams: bool
    begins: str = ""  # the field of a family that says how its reply has to begin


KINDS = {
    "chat": Kind(CHAT, {"max_tokens": 8}, False),
    "streamed chat": Kind(CHAT, {"max_tokens": 12}, True),
    "tools": Kind(CHAT, {**LONG, **CALLS, **SILENT}, True, "call"),
    "form": Kind(CHAT, {**LONG, "response_format": FORM, **SILENT}, False, "answer"),
    "message": Kind(MESSAGES, {**LONG, **USES, "thinking": {"type": "disabled"}}, True, "call"),
}


class Found(NamedTuple):
    """A reply, without the names that each has for itself."""

    text: str
    calls: list[tuple[str, str]]
    finish: str
    n_prompt: int
    n_reply: int


def body_of(name: str, family: Family, served: Served) -> dict[str, Any]:
    """What is asked. The demo model would think without end: what begins a call is made likely."""
    kind = KINDS[name]
    begin = getattr(family, kind.begins) if kind.begins else ""
    tokens = served.post("/tokenize", {"content": begin}).json()["tokens"]
    ask = {"role": "user", "content": f"How is the weather? ({name})"}
    bias = {str(token): 100 for token in tokens}
    return {"messages": [ask], "temperature": 0, "logit_bias": bias, **kind.body}


def ask(served: Served, name: str, body: dict[str, Any], streams: bool) -> Found:
    kind = KINDS[name]
    more: dict[str, Any] = {"stream": streams}
    if kind.path == CHAT and streams:
        more["stream_options"] = {"include_usage": True}
    answer = served.post(kind.path, body | more)
    assert answer.status_code == 200, answer.text
    if not streams:
        return (chat if kind.path == CHAT else message)(answer.json())
    lines = answer.text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return (joined_chat if kind.path == CHAT else joined_message)(events)


def chat(answer: dict[str, Any]) -> Found:
    ((choice,), usage) = answer["choices"], answer["usage"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return Found(
        message.get("reasoning_content", "") + (message["content"] or ""),
        [(each["name"], each["arguments"]) for each in calls],
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def joined_chat(events: list[str]) -> Found:
    assert events[-1] == "[DONE]"
    *chunks, last = map(json.loads, events[:-1])
    assert last["choices"] == [] and len({each["id"] for each in (*chunks, last)}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any(each["finish_reason"] for each in choices[:-1])
    deltas = [each["delta"] for each in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    names = [each["function"]["name"] for each in calls if "name" in each["function"]]
    parts = [each["function"]["arguments"] for each in calls]
    assert len(names) < 2 and all(each["index"] == 0 for each in calls)
    return Found(
        joined(deltas, "reasoning_content") + joined(deltas, "content"),
        [(name, "".join(parts)) for name in names],
        choices[-1]["finish_reason"],
        last["usage"]["prompt_tokens"],
        last["usage"]["completion_tokens"],
    )


def joined(parts: Iterable[dict[str, Any]], name: str) -> str:
    return "".join(part.get(name) or "" for part in parts)


def n_input(usage: dict[str, Any]) -> int:
    """The tokens of a prompt, those that were there before included."""
    return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def message(answer: dict[str, Any]) -> Found:
    blocks, usage = answer["content"], answer["usage"]
    return Found(
        joined(blocks, "thinking") + joined(blocks, "text"),
        [(x["name"], json.dumps(x["input"])) for x in blocks if x["type"] == "tool_use"],
        answer["stop_reason"],
        n_input(usage),
        usage["output_tokens"],
    )


def joined_message(events: list[str]) -> Found:
    found = [json.loads(each) for each in events]
    assert [found[0]["type"], found[-1]["type"]] == ["message_start", "message_stop"]
    opened = [each for each in found if each["type"] == "content_block_start"]
    deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    (end,) = [each for each in found if each["type"] == "message_delta"]
    assert [each["index"] for each in opened] == list(range(len(opened)))
    calls = [x["content_block"] for x in opened if x["content_block"]["type"] == "tool_use"]
    assert len(calls) < 2
    arguments = joined(deltas, "partial_json")
    return Found(
        joined(deltas, "thinking") + joined(deltas, "text"),
        [(call["name"], json.dumps(json.loads(arguments))) for call in calls],
        end["delta"]["stop_reason"],
        n_input(end["usage"]),
        end["usage"]["output_tokens"],
    )


def check_form(name: str, found: Found) -> None:
    """A reply is what its request asked for."""
    body = KINDS[name].body
    if "chat" in name:
        assert found.text and not found.calls
        assert (found.finish, found.n_reply) == ("length", body["max_tokens"])
    elif name == "form":
        assert is_asked(found.text) and found.finish == "stop"
    else:
        ((called, arguments),) = found.calls
        assert called == "weather" and is_asked(arguments) and not found.text
        assert found.finish == ("tool_use" if name == "message" else "tool_calls")
    assert found.n_prompt > 0 and 0 < found.n_reply <= body["max_tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_six_clients_at_once_have_the_replies_of_each_alone(family: str, shared: Path) -> None:
    chosen = FAMILIES[family]
    template = (shared / "templates" / f"{chosen.template}.jinja").read_text("utf-8")
    config = EngineConfig(ctx_size=1024, parallel=N_CLIENTS)
    with ExitStack() as stack:
        served = stack.enter_context(serving(lambda: LLM(None, config, chat_template=template)))
        threads = stack.enter_context(ThreadPoolExecutor(N_CLIENTS))
        served.wait()
        bodies = {name: body_of(name, chosen, served) for name in KINDS}
        alone = {name: ask(served, name, body, False) for name, body in bodies.items()}
        for name, found in alone.items():
            check_form(name, found)
        n_runs, n_turns = served.engine.n_runs
        for turn in range(len(KINDS)):
            names = list(islice(cycle(KINDS), turn, turn + N_CLIENTS))
            beside = threads.map(
                lambda name: ask(served, name, bodies[name], KINDS[name].streams), names
            )
            assert list(beside) == [alone[name] for name in names]
        n_more, n_rows = served.engine.n_runs
        assert n_rows - n_turns > n_more - n_runs, "no reply ever ran beside another"
        served.is_idle()
