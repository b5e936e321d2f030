"""Checks the package of Anthropic."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic

from tools.clients.asked import (
    FUNCTION,
    LONG,
    MESSAGES,
    MODEL,
    SCHEMA,
    SHORT,
    Weather,
    check_call,
    check_same,
)

COMMON: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": FUNCTION["description"], "input_schema": SCHEMA}


def _client(address: str) -> Anthropic:
    return Anthropic(base_url=address, api_key="none", max_retries=0)


def chat(address: str) -> None:
    with _client(address) as client:
        done = client.messages.create(**COMMON, max_tokens=SHORT)
        assert done.content[0].type == "text" and done.content[0].text
        counted = client.messages.count_tokens(model=MODEL, messages=COMMON["messages"])
        assert counted.input_tokens == done.usage.input_tokens + (
            done.usage.cache_read_input_tokens or 0
        )


def stream(address: str) -> None:
    with _client(address) as client:
        (block,) = client.messages.create(**COMMON, max_tokens=SHORT).content
        assert block.type == "text"
        with client.messages.stream(**COMMON, max_tokens=SHORT) as events:
            check_same(block.text, list(events.text_stream))
            assert events.get_final_message().stop_reason == "max_tokens"


def tools(address: str) -> None:
    with _client(address) as client:
        common: dict[str, Any] = {**COMMON, "max_tokens": LONG, "tools": [TOOL]}
        choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        done = client.messages.create(**common, tool_choice=choice)
        (block,) = done.content
        assert block.type == "tool_use" and done.stop_reason == "tool_use"
        wanted = check_call(block.name, block.input)
        with client.messages.stream(**common, tool_choice=choice) as events:
            (streamed,) = events.get_final_message().content
        assert streamed.type == "tool_use" and check_call(streamed.name, streamed.input) == wanted
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        assistant: Any = {"role": "assistant", "content": done.content}
        common["messages"] = [*MESSAGES, assistant, {"role": "user", "content": [result]}]
        common["max_tokens"] = SHORT
        (answer,) = client.messages.create(**common).content
        assert answer.type == "text" and answer.text


def structured(address: str) -> None:
    with _client(address) as client:
        done = client.messages.parse(**COMMON, max_tokens=LONG, output_format=Weather)
    assert isinstance(done.parsed_output, Weather)
