"""Checks LiteLLM, which reaches the server by the APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

from typing import Any

import litellm

from tools.clients.asked import LONG, MESSAGES, MODEL, SHORT, TOOL, Weather, check_call, check_same


def _routes(address: str) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "api_key": "none"}
    bases = {"openai": f"{address}/v1", "anthropic": address, "ollama_chat": address}
    return [
        {**common, "model": f"{name}/{MODEL}", "api_base": base} for name, base in bases.items()
    ]


def chat(address: str) -> None:
    texts = set()
    for route in _routes(address):
        done = litellm.completion(**route, max_tokens=SHORT)
        assert done.choices[0].finish_reason == "length"
        texts.add(done.choices[0].message.content)
    assert len(texts) == 1 and all(texts), f"APIs give different replies: {texts}"


def stream(address: str) -> None:
    for route in _routes(address):
        whole = litellm.completion(**route, max_tokens=SHORT).choices[0].message.content
        chunks = litellm.completion(**route, max_tokens=SHORT, stream=True)
        check_same(whole, [chunk.choices[0].delta.content or "" for chunk in chunks])


def tools(address: str) -> None:
    for route in _routes(address)[:2]:  # Ollama's API cannot demand a call
        common = {**route, "tools": [TOOL], "tool_choice": "required", "max_tokens": LONG}
        call, *_ = litellm.completion(**common).choices[0].message.tool_calls
        wanted = check_call(call.function.name, call.function.arguments)
        chunks = list(litellm.completion(**common, stream=True))
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert built is not None
        call, *_ = built.choices[0].message.tool_calls
        assert check_call(call.function.name, call.function.arguments) == wanted


def structured(address: str) -> None:
    for route in _routes(address):
        done = litellm.completion(**route, max_tokens=LONG, response_format=Weather)
        Weather.model_validate_json(done.choices[0].message.content)
