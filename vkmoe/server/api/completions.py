"""Answers /v1/completions: a text goes on."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.logprobs import LogProbs
from vkmoe.generate.loop import Generation, Piece
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.llm import LLM
from vkmoe.llm.following import News
from vkmoe.server.api.choices import Choices
from vkmoe.server.api.shapes import CompletionShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import ChoiceFields, Many, Tokens, read_body
from vkmoe.server.forms import FormFields
from vkmoe.server.openapi import EVENTS, JSON, described
from vkmoe.server.replies import Reply
from vkmoe.server.service import Service
from vkmoe.server.transport.sse import answered

MOST_TOGETHER = 64  # of a request


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
    if len(given) * asked.n_replies > MOST_TOGETHER:
        param = "prompt" if len(given) > MOST_TOGETHER else "n"
        raise ApiError(400, f"at most {MOST_TOGETHER} replies at once", param=param)
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
    echoed = [_echo(llm, *each) if asked.echo else _Echo() for each in shown]
    replies = service.begin(requests)
    answer = _Answer(service, llm, asked, replies, echoed)
    return await answered(request, answer, replies, bool(asked.stream))


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


class _Echo(NamedTuple):
    """Says how an answer shows a prompt."""

    text: str = ""
    n_added: int = 0  # first tokens that the text did not have: they are no part of the answer
    n_silent: int = 0  # first tokens that were given as ids, but have no text


def _echo(llm: LLM, given: str | Tokens, tokens: Sequence[int]) -> _Echo:
    """Return how a prompt is shown: its text is without the token that begins every text."""
    begin = llm.tokenizer.added_first
    n_begin = len(begin) if list(tokens[: len(begin)]) == begin else 0
    if not isinstance(given, str):
        return _Echo(llm.tokenizer.decode(tokens[n_begin:]), n_silent=n_begin)
    spelled = "".join(map(llm.tokenizer.token_text, begin))
    is_spelled = bool(spelled) and given.startswith(spelled)
    return _Echo(given, n_added=0 if is_spelled else n_begin)


class _Figures:
    """Says how likely the tokens of one choice were, the prompt's first where that is echoed.

    The form is that of OpenAI's completions. What has half a character is written as its bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._n_chars, self._after_special = tokenizer, 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of_prompt(self, generation: Generation, echo: _Echo) -> dict[str, Any]:
        """Return the figures of a prompt, of which nothing says how likely its first token is.

        Tokens that the client did not send have none: one that counts the tokens of its text would
        take each figure for that of the token before.
        """
        prompt = generation.tokens[: generation.n_prompt]
        self._after_special = True  # the text begins
        rows = zip(prompt, (None, *generation.prompt_logprobs), range(len(prompt)), strict=True)
        found = []
        for token, row, place in rows:
            figure = self._figure(token, row, place < echo.n_added + echo.n_silent)
            found += [figure] if place >= echo.n_added else []
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
        top = None
        if row is not None:
            top = {self._spelled(i): p for i, p in row.likeliest}
            top.setdefault(self._spelled(token), row.chosen)  # OpenAI adds it to the likeliest
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


class _Answer(Choices):
    id_kind, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        service: Service,
        llm: LLM,
        asked: CompletionFields,
        replies: list[Reply],
        echoed: list[_Echo],
    ) -> None:
        super().__init__(service, llm, asked, replies, len(echoed))
        self._fields, self._echoed = asked, echoed
        self._figures = [_Figures(llm.tokenizer) for _ in replies]
        self._begun: set[int] = set()  # replies of which something was sent

    def _whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {**self._choice(index, pieces), "finish_reason": self._reason(index)}

    def _more(self, index: int, news: News) -> Iterator[bytes]:
        if self._says_more(news.pieces):
            more = self._timings(index) if self._asked.timings_per_token else {}
            yield self._chunk([self._choice(index, news.pieces)], **more)

    def _rest(self, index: int) -> Iterator[dict[str, Any]]:
        yield self._whole(index, [])  # with nothing to say, unless what is echoed was not sent

    def _says_more(self, pieces: Sequence[Piece]) -> bool:
        """Say whether an event has anything of these: a text, or how likely the tokens are."""
        return bool(pieces) and (
            self._fields.logprobs is not None or any(piece.text for piece in pieces)
        )

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return a choice with more pieces of a reply; its prompt, if echoed, is in the first."""
        is_first = index not in self._begun
        self._begun.add(index)
        echo = self._echo_of(index).text if is_first else ""
        return {
            "index": index,
            "text": echo + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(index, pieces, is_first),
            "finish_reason": None,
        }

    def _echo_of(self, index: int) -> _Echo:
        return self._echoed[index // self._asked.n_replies]

    def _logprobs(
        self, index: int, pieces: Sequence[Piece], is_first: bool
    ) -> dict[str, Any] | None:
        """Return how likely these tokens were; None where that was not asked for."""
        if self._fields.logprobs is None:
            return None
        figures = self._figures[index]
        if not (is_first and self._fields.echo):
            return figures.of_reply(pieces)
        prompt = figures.of_prompt(self._replies[index].generation, self._echo_of(index))
        reply = figures.of_reply(pieces)
        return {name: [*before, *reply[name]] for name, before in prompt.items()}
