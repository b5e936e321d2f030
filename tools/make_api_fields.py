#!/usr/bin/env python3
"""Write down the fields of requests that the Python packages of OpenAI and Anthropic have.

A test holds vkmoe/server/known_fields.py against the file, so that it needs neither package. Run
this where new ones are installed, and see what the test misses:

    pip install -U openai anthropic && python tools/make_api_fields.py
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typing_extensions
from anthropic.types import message_count_tokens_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

FILE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "api_fields.json"
DEPTH = 3  # names of a path: what is deeper belongs to parts of a conversation
SOURCES: dict[str, tuple[Any, ...]] = {
    "chat": (chat_create_params.CompletionCreateParamsStreaming,),
    "completions": (completion_create_params.CompletionCreateParamsStreaming,),
    "responses": (response_create_params.ResponseCreateParamsStreaming,),
    "messages": (beta_message_create_params.MessageCreateParamsStreaming,),
    "count_tokens": (
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ),
    "embeddings": (embedding_create_params.EmbeddingCreateParams,),
}
# Of tools, those that a client runs: others are refused as a whole, or left out of the answer.
TOOLS = ("BetaToolParam", "ChatCompletionFunctionToolParam", "FunctionToolParam", "ToolParam")
UNIONS = (typing.Union, types.UnionType)
LISTS = (list, Iterable, typing.Iterable)


def objects_in(hint: Any) -> Iterator[Any]:
    """Yield the types of objects that a field may hold, alone or in a list."""
    if typing_extensions.is_typeddict(hint):
        yield hint
    origin = typing.get_origin(hint)
    is_sequence = "Sequence" in getattr(origin, "__name__", "")
    if origin in UNIONS or origin in LISTS or is_sequence or origin is typing.Annotated:
        for part in typing.get_args(hint):
            yield from objects_in(part)


def paths_of(kind: Any, before: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of all fields, those of objects inside behind a point."""
    for name, hint in typing_extensions.get_type_hints(kind).items():
        path = (*before, name)
        yield ".".join(path)
        if len(path) < DEPTH:
            for inner in objects_in(hint):
                if path != ("tools",) or inner.__name__ in TOOLS:
                    yield from paths_of(inner, path)


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {
        "made_from": {name: version(name) for name in ("openai", "anthropic")},
        "fields": {
            api: sorted({path for kind in kinds for path in paths_of(kind)})
            for api, kinds in SOURCES.items()
        },
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
