"""Checks the package of Ollama."""

from typing import Any

import httpx
from ollama import Client

from tools.clients.asked import (
    LONG,
    MESSAGES,
    MODEL,
    QUESTION,
    SCHEMA,
    SHORT,
    Weather,
    check_same,
)

COMMON: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}


def weather(is_tomorrow: bool) -> str:
    """Say what the weather is.

    Args:
        is_tomorrow: Whether the day is tomorrow.
    """
    return f"{'rainy' if is_tomorrow else 'sunny'}"


def _options(n_tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "num_predict": n_tokens, **more}


def chat(address: str) -> None:
    with Client(address) as client:
        done = client.chat(**COMMON, options=_options(SHORT))
        assert done.message.content and done.done_reason == "length" and done.eval_count == SHORT
        assert (
            client.generate(MODEL, QUESTION, options=_options(SHORT)).response
            == done.message.content
        )
        (listed,) = client.list().models
        assert [each.model for each in client.ps().models] == [listed.model]
        assert "tools" in (client.show(MODEL).capabilities or ())
        (vector,) = client.embed(MODEL, QUESTION).embeddings
        assert abs(sum(x * x for x in vector) - 1) < 1e-3


def stream(address: str) -> None:
    options = _options(SHORT)
    with Client(address) as client:
        whole = client.chat(**COMMON, options=options).message.content
        parts = client.chat(**COMMON, options=options, stream=True)
        check_same(whole, [part.message.content or "" for part in parts])


def tools(address: str) -> None:
    """Check a call, which this API cannot demand: the model is made to like its first token."""
    with Client(address) as client:
        mark = httpx.post(f"{address}/tokenize", json={"content": "<"}).json()["tokens"][0]
        options = _options(LONG, logit_bias={str(mark): 100})
        common: dict[str, Any] = {
            **COMMON,
            "tools": [weather],
            "format": SCHEMA,
            "options": options,
        }
        done = client.chat(**common)
        call, *_ = list(done.message.tool_calls or ())
        assert call.function.name == "weather"
        assert weather(**call.function.arguments)
        parts = client.chat(**common, stream=True)
        calls = [each for part in parts for each in part.message.tool_calls or ()]
        assert calls[0].function == call.function
        result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
        turns = {**COMMON, "messages": [*MESSAGES, done.message, result]}
        assert client.chat(**turns, options=_options(SHORT), tools=[weather]).message.content


def structured(address: str) -> None:
    with Client(address) as client:
        done = client.chat(**COMMON, format=SCHEMA, options=_options(LONG))
        found = Weather.model_validate_json(done.message.content or "")
        text = client.generate(MODEL, QUESTION, format=SCHEMA, options=_options(LONG)).response
        assert Weather.model_validate_json(text or "") == found
