"""Answers /api/embed and the older /api/embeddings, in Ollama's form."""

from __future__ import annotations

import time
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.server.api.embeddings import EmbeddingFields, embedded
from vkmoe.server.api.shapes import OllamaEmbeddingShape, OllamaEmbeddingsShape
from vkmoe.server.fields import Body, Many, Number, read_body
from vkmoe.server.openapi import described
from vkmoe.server.service import Service
from vkmoe.server.sse import json_answer


class _EmbedFields(Body):
    api = "ollama"
    model: str | None = None
    input: str | Many[str]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    keep_alive: Number | str | None = None
    options: dict[str, Any] | None = None


class _OldFields(Body):
    api = "ollama"
    model: str | None = None
    prompt: str
    keep_alive: Number | str | None = None
    options: dict[str, Any] | None = None


@described(OllamaEmbeddingsShape, body=_EmbedFields, statuses=(500, 503))
async def embed(service: Service, request: HttpRequest) -> Response:
    """Compute embeddings of length 1, in Ollama's form."""
    began, asked = time.perf_counter_ns(), await read_body(request, _EmbedFields)
    texts: Any = asked.input  # a text, or a list of them
    given = EmbeddingFields(input=texts, dimensions=asked.dimensions, embd_normalize=2)
    found = await embedded(service, request, given)
    return json_answer(
        {
            "model": asked.model or service.alias,
            "embeddings": [vector.tolist() for vector in found.vectors],
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": found.n_tokens,
        }
    )


@described(OllamaEmbeddingShape, body=_OldFields, statuses=(500, 503))
async def embed_one(service: Service, request: HttpRequest) -> Response:
    """Compute the embedding of one text, as it is, in the form of older clients."""
    asked = await read_body(request, _OldFields)
    found = await embedded(service, request, EmbeddingFields(input=asked.prompt, embd_normalize=-1))
    return json_answer({"embedding": found.vectors[0].tolist()})
