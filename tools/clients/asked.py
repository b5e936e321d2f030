"""Holds what all clients ask, and judges what they get.

The demo model cannot talk, so only the form of a reply is judged, and that two ways to ask for the
same reply give the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

MODEL = "demo"
QUESTION = "How is the weather?"
MESSAGES: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
SHORT = 16  # tokens of a reply whose text is compared
LONG = 300  # tokens, of which a call or an object needs fewer


class Weather(BaseModel):
    """Say what the weather of a city is."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


SCHEMA: dict[str, Any] = {**Weather.model_json_schema(), "additionalProperties": False}
FUNCTION: dict[str, Any] = {"name": "weather", "description": Weather.__doc__, "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}


def check_same(whole: str | None, parts: list[str]) -> None:
    """Check that a reply has a text, and that it came in several parts when it was streamed."""
    joined = "".join(parts)
    assert whole, "the reply is empty"
    assert joined == whole, f"the stream has {joined!r}, the reply {whole!r}"
    assert len([part for part in parts if part]) > 1, "the stream came at once"


def check_call(name: str | None, arguments: str | Mapping[str, Any]) -> Weather:
    """Check that the tool is called with arguments of its schema, and return them."""
    assert name == "weather", f"the tool {name!r} is called"
    if isinstance(arguments, str):
        return Weather.model_validate_json(arguments)
    return Weather.model_validate(arguments)
