"""Answers /v1/completions: a text goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.loop import Piece
from vkmoe.llm import LLM
from vkmoe.server.api.shapes import CompletionShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import ChoiceFields, Many, read_body
from vkmoe.server.forms import FormFields
from vkmoe.server.openapi import EVENTS, JSON, described
from vkmoe.server.replies import Reply, merged, until_gone
from vkmoe.server.service import (
    PATIENCE,
    Service,
    finish_reason,
    new_id,
    routed_experts,
    timings,
    usage,
)
from vkmoe.server.sse import COMMENT, EventStream, event, json_bytes

__all__ = ["CompletionFields", "complete"]

Tokens = Many[int]


class CompletionFields(FormFields, ChoiceFields):
    """Describes the body of a request for a completion."""

    api = "completions"
    prompt: str | Tokens | Many[str] | Many[Tokens]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


@described(CompletionShape, body=CompletionFields, media_types=(JSON, EVENTS), statuses=(500, 503))
async def complete(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a completion."""
    asked = await read_body(request, CompletionFields)
    llm, given = service.engine.llm, _prompts(asked)
    service.check_number(len(given), asked)
    prompts = [await service.prompt(llm, partial(_encoded, llm, prompt)) for prompt in given]
    more: dict[str, Any] = {
        "n_logprobs": asked.logprobs,
        "with_routing": bool(asked.return_routed_experts),
    }
    if (form := asked.form()) is not None:
        constrain = partial(form.constraint, llm.constraints)
        more["constraint"] = await service.off_loop(constrain, is_form=True)
    requests = service.requests(llm, prompts, asked, **more)
    echoed = [llm.tokenizer.decode(prompt) if asked.echo else "" for prompt in prompts]
    replies = service.begin(requests)
    answer = _Answer(service, llm, asked, replies, echoed)
    if asked.stream:
        return EventStream(answer.events(), replies)
    body = await until_gone(request, answer.whole(), replies)
    return Response(json_bytes(body), media_type="application/json")


def _prompts(asked: CompletionFields) -> list[str | Tokens]:
    """List the prompts of a request, texts or token ids."""
    prompt = asked.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _encoded(llm: LLM, prompt: str | Tokens) -> Sequence[int]:
    return llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


class _Answer:
    """Makes the answer of replies to one or several prompts, at once or as a stream."""

    def __init__(
        self,
        service: Service,
        llm: LLM,
        asked: CompletionFields,
        replies: list[Reply],
        echoed: list[str],
    ) -> None:
        self._service, self._llm, self._asked = service, llm, asked
        self._replies, self._echoed = replies, echoed
        self._base = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.alias,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for all replies, and return the answer."""
        found: list[list[Piece]] = [[] for _ in self._replies]
        async for index, news in merged(self._replies, None):
            found[index] += news.pieces
        choices = [self._choice(index, pieces, True) for index, pieces in enumerate(found)]
        for choice, reply in zip(choices, self._replies, strict=True):
            choice |= routed_experts(self._llm, reply)
        return {**self._base, "choices": choices, **self._end()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        begun: set[int] = set()
        async for index, news in merged(self._replies, PATIENCE):
            if news.is_silent:
                yield COMMENT
            elif self._says_more(news.pieces):
                choice = self._choice(index, news.pieces, index not in begun)
                begun.add(index)
                head = {**self._base, "choices": [{**choice, "finish_reason": None}]}
                yield event(head | (self._timings(index) if self._asked.timings_per_token else {}))
        for index, reply in enumerate(self._replies):
            is_first = index not in begun  # with nothing to say, but what is echoed
            ended = {**self._choice(index, [], is_first), "finish_reason": finish_reason(reply)}
            ended |= routed_experts(self._llm, reply)
            is_last = index + 1 == len(self._replies) and not self._asked.with_usage
            more = self._timings(-1) if is_last else {}
            yield event({**self._base, "choices": [ended], **more})
        if self._asked.with_usage:
            yield event({**self._base, "choices": [], **self._end()})
        yield event("[DONE]")

    def _says_more(self, pieces: Sequence[Piece]) -> bool:
        """Say whether an event has anything of these: a text, or how likely the tokens are."""
        return bool(pieces) and (
            self._asked.logprobs is not None or any(piece.text for piece in pieces)
        )

    def _choice(self, index: int, pieces: Sequence[Piece], is_first: bool) -> dict[str, Any]:
        """Return a choice with these pieces of a reply, behind its prompt where that is echoed."""
        reply = self._replies[index]
        echo = self._echoed[index // self._asked.n_replies] if is_first else ""
        return {
            "index": index,
            "text": echo + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(pieces) if self._asked.logprobs is not None else None,
            "finish_reason": finish_reason(reply) if reply.generation.is_done else None,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        known = [piece for piece in pieces if piece.token_id >= 0]
        text = self._llm.tokenizer.token_text
        return {
            "tokens": [text(piece.token_id) for piece in known],
            "token_logprobs": [piece.logprob for piece in known],
            "top_logprobs": [
                {text(token): logprob for token, logprob in piece.top_logprobs} for piece in known
            ],
        }

    def _usage(self) -> dict[str, Any]:
        return usage(self._replies, len(self._echoed))

    def _end(self) -> dict[str, Any]:
        return {"usage": self._usage(), **self._timings(-1)}

    def _timings(self, index: int) -> dict[str, Any]:
        return {"timings": timings(self._replies[index].statistics)}
