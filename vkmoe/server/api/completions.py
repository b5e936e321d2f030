"""Answers /v1/completions: a text goes on."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.logprobs import LogProbs
from vkmoe.generate.loop import Generation, Piece
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.llm import LLM
from vkmoe.server.api.shapes import CompletionShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import ChoiceFields, Many, Tokens, read_body
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
    for prompt in given:
        if isinstance(prompt, str):
            service.check_length(llm, prompt)
    prompts = [service.fitting(llm, await _encoded(service, llm, prompt)) for prompt in given]
    more: dict[str, Any] = {
        "n_logprobs": asked.logprobs,
        "with_routing": bool(asked.return_routed_experts),
        "scores_prompt": bool(asked.echo) and asked.logprobs is not None,
    }
    if (form := asked.form()) is not None:
        constrain = partial(form.constraint, llm.constraints)
        more["constraint"] = await service.off_loop(constrain, is_long=True)
    requests = service.requests(llm, prompts, asked, **more)
    shown = zip(given, prompts, strict=True)
    echoed = [_echo(llm, *each) if asked.echo else "" for each in shown]
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


async def _encoded(service: Service, llm: LLM, prompt: str | Tokens) -> Sequence[int]:
    return await service.encode(llm, prompt) if isinstance(prompt, str) else prompt


def _echo(llm: LLM, given: str | Tokens, tokens: Sequence[int]) -> str:
    """Return the text of a prompt, without the token that begins every text."""
    if isinstance(given, str):
        return given
    begin = llm.tokenizer.added_first
    is_begun = list(tokens[: len(begin)]) == begin
    return llm.tokenizer.decode(tokens[len(begin) :] if is_begun else tokens)


class _Figures:
    """Says how likely the tokens of one choice were, the prompt's first where that is echoed.

    The form is that of OpenAI's completions. What has half a character is written as its bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._n_chars, self._after_special = tokenizer, 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of_prompt(self, generation: Generation) -> dict[str, Any]:
        """Return the figures of a prompt, of which nothing says how likely its first token is."""
        prompt, begin = generation.tokens[: generation.n_prompt], self._tokenizer.added_first
        self._after_special = True  # the text begins
        hidden = len(begin) if prompt[: len(begin)] == begin else 0
        rows = zip(prompt, (None, *generation.prompt_logprobs), range(len(prompt)), strict=True)
        found = []
        for token, row, place in rows:
            found.append(self._figure(token, row, place < hidden))
            self._after_special = token in self._tokenizer.special_ids
        self._after_special = False  # a reply keeps its first blank
        return _columns(found)

    def of_reply(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the figures of more tokens. Mutates."""
        rows = ((each.token_id, each.logprob or 0.0, each.top_logprobs) for each in pieces)
        return _columns([self._figure(i, LogProbs(p, top)) for i, p, top in rows if i >= 0])

    def _figure(self, token: int, row: LogProbs | None, is_hidden: bool = False) -> _Figure:
        """Return those of the next token. Mutates."""
        place, text = self._n_chars, "" if is_hidden else self._spelled(token)
        top = None if row is None else {self._spelled(i): p for i, p in row.likeliest}
        if not is_hidden:
            self._n_chars += len(self._decoder.decode(self._bytes(token)))
        return _Figure(text, None if row is None else row.chosen, top, place)

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token, self._after_special)

    def _spelled(self, token: int) -> str:
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Figure(NamedTuple):
    token: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int  # characters before it


def _columns(found: Sequence[_Figure]) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [each[i] for each in found] for i, name in enumerate(names)}


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
        self._figures = [_Figures(llm.tokenizer) for _ in replies]
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
            "logprobs": self._logprobs(index, pieces, is_first),
            "finish_reason": finish_reason(reply) if reply.generation.is_done else None,
        }

    def _logprobs(
        self, index: int, pieces: Sequence[Piece], is_first: bool
    ) -> dict[str, Any] | None:
        """Return how likely these tokens were; None where that was not asked for."""
        if self._asked.logprobs is None:
            return None
        figures = self._figures[index]
        if not (is_first and self._asked.echo):
            return figures.of_reply(pieces)
        prompt = figures.of_prompt(self._replies[index].generation)
        reply = figures.of_reply(pieces)
        return {name: [*before, *reply[name]] for name, before in prompt.items()}

    def _usage(self) -> dict[str, Any]:
        return usage(self._replies, len(self._echoed))

    def _end(self) -> dict[str, Any]:
        return {"usage": self._usage(), **self._timings(-1)}

    def _timings(self, index: int) -> dict[str, Any]:
        return {"timings": timings(self._replies[index].statistics)}
