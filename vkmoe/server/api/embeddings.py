"""Answers /v1/embeddings and /embedding: vectors of texts, in OpenAI's and llama-server's forms."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.choices import Pooling
from vkmoe.generate.loop import Request
from vkmoe.generate.pooling import NO_NORM, normalized
from vkmoe.llm import LLM
from vkmoe.llm.embeddings import chosen_pooling, embedding_of, embedding_request, pooling_of
from vkmoe.llm.following import together
from vkmoe.server.api.native import TextBesideMedia, encoded, prompts_of
from vkmoe.server.api.shapes import EmbeddingsShape, NativeEmbeddingShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Many, read_body
from vkmoe.server.openapi import described
from vkmoe.server.replies import Reply, until_gone
from vkmoe.server.service import LONG_TEXT, Service
from vkmoe.server.transport.sse import json_answer

Floats = NDArray[np.float32]
MOST_TEXTS = 2048  # of a request
_MOST_ORDER = 64  # of a norm
_PAUSE_S = 0.05  # until another attempt where too many requests wait


class _TextPart(Body):
    type: Literal["text"]
    text: str


class _Content(Body):
    content: Many[_TextPart]


Input = (
    str
    | TextBesideMedia
    | _Content
    | Many[int | str | TextBesideMedia | _Content | list[int | str]]
)


class EmbeddingFields(Body):
    """Describes the body of a request for embeddings; `content` is llama-server's `input`."""

    api = "embeddings"
    model: str | None = None
    input: Input | None = None
    content: Input | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    embd_normalize: Annotated[int, Field(ge=NO_NORM, le=_MOST_ORDER)] | None = None


class Embedded(NamedTuple):
    """Holds the vectors of the texts of a request, and how many tokens these have in all."""

    vectors: list[Floats]  # each [width], or [n_tokens, width] where nothing is pooled
    n_tokens: int


@described(EmbeddingsShape, body=EmbeddingFields, statuses=(500, 503))
async def embed(service: Service, request: HttpRequest) -> Response:
    """Compute embeddings, in OpenAI's form."""
    asked, llm = await read_body(request, EmbeddingFields), service.engine.llm
    if asked.input is None:  # `content` asks for llama-server's form
        return await _answer_natively(service, request, llm, asked)
    found = await embedded(service, request, asked)
    is_packed = asked.encoding_format == "base64"

    def answer() -> Response:
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": _packed(x) if is_packed else x.tolist(),
            }
            for i, x in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
        return json_answer({"object": "list", "data": data, "model": service.alias, "usage": usage})

    return await service.off_loop(answer, is_long=True)


@described(list[NativeEmbeddingShape], body=EmbeddingFields, statuses=(500, 503))
async def embed_natively(service: Service, request: HttpRequest) -> Response:
    """Compute embeddings, in llama-server's own form."""
    asked = await read_body(request, EmbeddingFields)
    return await _answer_natively(service, request, service.engine.llm, asked)


async def _answer_natively(
    service: Service, request: HttpRequest, llm: LLM, asked: EmbeddingFields
) -> Response:
    file = llm.engine.model.file
    pooling = await service.off_loop(lambda: service.settings.pooling or pooling_of(file))
    texts = await _encoded(service, llm, asked)
    found = await _embedded(service, request, llm, asked, texts, pooling)
    rows = enumerate(map(np.atleast_2d, found.vectors))
    return await service.off_loop(
        lambda: json_answer([{"index": i, "embedding": each.tolist()} for i, each in rows]), True
    )


async def embedded(
    service: Service, request: HttpRequest, asked: EmbeddingFields, cuts: bool = False
) -> Embedded:
    """Compute one vector for each text of a request. Raises ApiError, and ClientGone.

    With `cuts`, of texts that do not fit only the beginning counts.
    """
    llm = service.engine.llm
    pooling = await service.off_loop(lambda: chosen_pooling(llm, service.settings.pooling))
    if pooling == "none":
        raise ApiError(400, "pooling 'none' has no vector for a text: use /embeddings")
    texts = await _encoded(service, llm, asked, cuts)
    return await _embedded(service, request, llm, asked, texts, pooling)


async def embeddings_of(
    service: Service, request: HttpRequest, requests: Sequence[Request]
) -> list[Floats]:
    """Compute embeddings as they are pooled, as many at once as the KV caches have regions.

    `requests` are those of `embedding_request`. Raises ApiError, and ClientGone.
    """
    replies: list[Reply] = []
    found: dict[int, Floats] = {}
    left = iter(enumerate(requests))

    async def take_turns() -> None:
        for index, each in left:
            reply = await _begun(service, each, is_first=not replies)
            replies.append(reply)
            async for _ in reply.news():
                pass
            found[index] = embedding_of(reply.generation, normalize=False)

    n_turns = min(len(requests), service.engine.llm.engine.n_regions)
    await until_gone(request, together([take_turns() for _ in range(n_turns)]), replies)
    return [found[index] for index in range(len(requests))]


async def _begun(service: Service, request: Request, is_first: bool) -> Reply:
    """Let an embedding begin; behind the first of a request they wait where the queue is full."""
    while True:
        try:
            (reply,) = service.begin([request])
            return reply
        except ApiError as error:
            if is_first or error.error["code"] != "queue_full":
                raise
            await asyncio.sleep(_PAUSE_S)


async def _embedded(
    service: Service,
    request: HttpRequest,
    llm: LLM,
    asked: EmbeddingFields,
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
) -> Embedded:
    """Compute what a request asks for of its texts. Raises ApiError, and ClientGone."""
    width, order = llm.spec.width, asked.embd_normalize
    if asked.dimensions is not None and asked.dimensions > width:
        raise ApiError(400, f"embeddings have {width} dimensions", param="dimensions")
    requests = await service.off_loop(
        lambda: [embedding_request(llm, list(text), pooling) for text in texts]
    )
    vectors = await embeddings_of(service, request, requests)
    if order is None:
        order = service.settings.embd_normalize
    cut = [each[..., : asked.dimensions] for each in vectors]
    # llama-server leaves the states of single tokens as they are.
    vectors = [normalized(each, NO_NORM if pooling == "none" else order) for each in cut]
    return Embedded(vectors, sum(map(len, texts)))


async def _encoded(
    service: Service, llm: LLM, asked: EmbeddingFields, cuts: bool = False
) -> list[Sequence[int]]:
    """Return the tokens of each text; with `cuts`, as many as fit. Raises ApiError."""
    param = "content" if asked.input is None else "input"
    given = getattr(asked, param)
    if given is None:
        raise ApiError(400, "input or content must be given", param="input")
    listed = [_joined(each) for each in given] if isinstance(given, list) else _joined(given)
    found: list[Sequence[int]] = []
    for each in prompts_of(listed, MOST_TEXTS, param):
        text = each.prompt_string if isinstance(each, TextBesideMedia) else each
        if not text:
            raise ApiError(400, "the input is empty", param=param)
        if cuts and isinstance(text, str):
            begin = partial(_beginning, llm, text)
            found.append(await service.off_loop(begin, is_long=len(text) > LONG_TEXT))
        else:
            found.append(await encoded(service, llm, each))
    return found


def _beginning(llm: LLM, text: str) -> list[int]:
    """Return the tokens of a text: of one that does not fit the first, and what ends every text.

    What can fit in no case is not encoded.
    """
    tokenizer, most = llm.tokenizer, llm.engine.ctx_size
    while tokenizer.least_tokens(half := text[: len(text) // 2]) > most:
        text = half
    tokens, last = tokenizer.encode(text), tokenizer.added_last
    return tokens if len(tokens) <= most else [*tokens[: most - len(last)], *last]


def _joined(given: Any) -> Any:
    """Return the text of a content that is in parts; anything else as it is."""
    if isinstance(given, _Content):
        return "".join(part.text for part in given.content)
    return given


def _packed(vector: Floats) -> str:
    """Write a vector as OpenAI does: float32, the lowest byte first, in base64."""
    return b64encode(vector.astype("<f4").tobytes()).decode()
