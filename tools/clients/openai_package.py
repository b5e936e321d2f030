"""Checks the package of OpenAI: chats, and the same of its newer API of responses."""

from __future__ import annotations

from typing import Any

from openai import OpenAI, pydantic_function_tool

from tools.clients.asked import (
    LONG,
    MESSAGES,
    MODEL,
    QUESTION,
    SHORT,
    TOOL,
    Weather,
    check_call,
    check_same,
)

COMMON: dict[str, Any] = {"model": MODEL, "temperature": 0}
CHAT = {**COMMON, "messages": MESSAGES}
RESPONSE = {**COMMON, "input": QUESTION}


def _client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def chat(address: str) -> None:
    with _client(address) as client:
        done = client.chat.completions.create(**CHAT, max_tokens=SHORT)
        assert (
            done.choices[0].message.content and done.usage and done.usage.completion_tokens == SHORT
        )
        response = client.responses.create(**RESPONSE, max_output_tokens=SHORT)
        assert response.output_text == done.choices[0].message.content
        assert client.models.retrieve(MODEL).id == MODEL


def stream(address: str) -> None:
    with _client(address) as client:
        whole = client.chat.completions.create(**CHAT, max_tokens=SHORT).choices[0].message.content
        chunks = client.chat.completions.create(**CHAT, max_tokens=SHORT, stream=True)
        check_same(whole, [chunk.choices[0].delta.content or "" for chunk in chunks])
        with client.responses.stream(**RESPONSE, max_output_tokens=SHORT) as stream:
            events = list(stream)
        check_same(
            whole, [each.delta for each in events if each.type == "response.output_text.delta"]
        )
        last = events[-1]
        assert last.type == "response.incomplete" and last.response.output_text == whole


def tools(address: str) -> None:
    with _client(address) as client:
        common: dict[str, Any] = {**CHAT, "tools": [TOOL], "tool_choice": "required"}
        common |= {"max_tokens": LONG, "parallel_tool_calls": False}
        (call,) = list(client.chat.completions.create(**common).choices[0].message.tool_calls or ())
        assert call.type == "function"
        wanted = check_call(call.function.name, call.function.arguments)
        with client.chat.completions.stream(**common) as events:
            (streamed,) = list(events.get_final_completion().choices[0].message.tool_calls or ())
        assert check_call(streamed.function.name, streamed.function.arguments) == wanted
        assistant = {"role": "assistant", "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turns: dict[str, Any] = {
            **CHAT,
            "messages": [*MESSAGES, assistant, result],
            "tools": [TOOL],
        }
        answer = client.chat.completions.create(**turns, max_tokens=SHORT)
        assert answer.choices[0].message.content
        _call_of_a_response(client)


def _call_of_a_response(client: OpenAI) -> None:
    flat = {"type": "function", **TOOL["function"], "strict": True}
    common: dict[str, Any] = {**RESPONSE, "tools": [flat], "max_output_tokens": LONG}
    common |= {"tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False}
    (item,) = client.responses.create(**common).output
    assert item.type == "function_call"
    check_call(item.name, item.arguments)
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    turns: list[Any] = [{"role": "user", "content": QUESTION}, item, result]
    response = client.responses.create(**{**RESPONSE, "input": turns}, max_output_tokens=SHORT)
    assert response.output_text


def structured(address: str) -> None:
    with _client(address) as client:
        common: dict[str, Any] = {**CHAT, "max_tokens": LONG}
        choice = client.chat.completions.parse(**common, response_format=Weather).choices[0]
        assert isinstance(choice.message.parsed, Weather)
        response = client.responses.parse(**RESPONSE, text_format=Weather, max_output_tokens=LONG)
        assert response.output_parsed == choice.message.parsed
        tool: Any = pydantic_function_tool(Weather, name="weather")
        named: Any = {"type": "function", "function": {"name": "weather"}}
        called = client.chat.completions.parse(**common, tools=[tool], tool_choice=named).choices[0]
        assert called.message.tool_calls
        assert isinstance(called.message.tool_calls[0].function.parsed_arguments, Weather)
