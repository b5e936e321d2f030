"""Answers /api/embed and the older /api/embeddings, in Ollama's form."""

from __future__ import annotations

import time
from typing import Annotated, Any, cast

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.pooling import NO_NORM
from vkmoe.server.api.embeddings import Embedded, EmbeddingFields, embedded
from vkmoe.server.api.ollama.fields import KeptBody
from vkmoe.server.api.shapes import OllamaEmbeddingShape, OllamaEmbeddingsShape
from vkmoe.server.fields import Many, read_body
from vkmoe.server.openapi import described
from vkmoe.server.service import Service
from vkmoe.server.transport.sse import json_answer

_LENGTH = 2  # the norm by which a vector has length 1


class _Fields(KeptBody):
    options: dict[str, Any] | None = None


class _EmbedFields(_Fields):
    input: str | Many[str] | None = None  # none: load the model
    truncate: bool | None = None  # texts that do not fit are cut, unless this is false
    dimensions: Annotated[int, Field(ge=1)] | None = None


class _OldFields(_Fields):
    prompt: str | None = None  # none: load the model


@described(OllamaEmbeddingsShape, body=_EmbedFields, statuses=(500, 503))
async def embed_texts(service: Service, request: HttpRequest) -> Response:
    """Compute embeddings of length 1, in Ollama's form."""
    asked = await read_body(request, _EmbedFields)
    asked.keep_model(request)
    began, loaded = request.state.began, time.perf_counter()
    found = Embedded([], 0)
    if texts := cast(Any, asked.input):
        given = EmbeddingFields(input=texts, dimensions=asked.dimensions, embd_normalize=_LENGTH)
        found = await embedded(service, request, given, cuts=asked.truncate is not False)
    answer = {
        "model": asked.model,
        "total_duration": round(1e9 * (time.perf_counter() - began)),
        "load_duration": round(1e9 * (loaded - began)),
        "prompt_eval_count": found.n_tokens,
    }

    def written() -> Response:
        return json_answer({"embeddings": [each.tolist() for each in found.vectors], **answer})

    return await service.off_loop(written, is_long=True)


@described(OllamaEmbeddingShape, body=_OldFields, statuses=(500, 503))
async def embed_text(service: Service, request: HttpRequest) -> Response:
    """Compute the embedding of one text, as it is, in the form of older clients."""
    asked = await read_body(request, _OldFields)
    asked.keep_model(request)
    if not asked.prompt:
        return json_answer({"embedding": []})
    given = EmbeddingFields(input=asked.prompt, embd_normalize=NO_NORM)
    found = await embedded(service, request, given)
    return json_answer({"embedding": found.vectors[0].tolist()})
