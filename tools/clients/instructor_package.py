"""Checks Instructor, which makes objects of a type from replies, in the ways that it has."""

from __future__ import annotations

from typing import Any

import instructor
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI

from tools.clients.asked import LONG, MESSAGES, MODEL, SHORT, Weather, check_same

COMMON: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_retries": 1}
TEXT: dict[str, Any] = {"response_model": None, "temperature": 0, "max_tokens": SHORT}
OBJECT: dict[str, Any] = {"response_model": Weather, "temperature": 0, "max_tokens": LONG}


def _client(address: str, mode: Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{address}/v1", api_key="none"), mode=mode)


def chat(address: str) -> None:
    done = _client(address, Mode.TOOLS).create(**COMMON, **TEXT)
    assert done.choices[0].message.content


def stream(address: str) -> None:
    client = _client(address, Mode.TOOLS)
    whole = client.create(**COMMON, **TEXT).choices[0].message.content
    chunks = client.create(**COMMON, **TEXT, stream=True)
    check_same(whole, [chunk.choices[0].delta.content or "" for chunk in chunks])
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        *parts, last = _client(address, mode).create_partial(**COMMON, **OBJECT)
        assert parts, f"{mode}: the object came at once"
        Weather.model_validate(last.model_dump())


def tools(address: str) -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        assert isinstance(_client(address, mode).create(**COMMON, **OBJECT), Weather), mode
    claude = instructor.from_anthropic(Anthropic(base_url=address, api_key="none"))
    found = claude.create(**COMMON, response_model=Weather, max_tokens=LONG)
    assert isinstance(found, Weather)


def structured(address: str) -> None:
    found = _client(address, Mode.JSON_SCHEMA).create(**COMMON, **OBJECT)
    assert isinstance(found, Weather)
