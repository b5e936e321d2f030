"""Answers /completion: a text goes on, in llama-server's own form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.checks import MAX_LOGPROBS
from vkmoe.generate.loop import Piece
from vkmoe.llm import LLM
from vkmoe.server.api.figures import ReadingNews, ending, timings, token_figures
from vkmoe.server.api.shapes import NativeShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Many, ReplyFields, read_body
from vkmoe.server.forms import FormFields
from vkmoe.server.openapi import EVENTS, JSON, described
from vkmoe.server.replies import Reply, merged
from vkmoe.server.service import PATIENCE, Service
from vkmoe.server.transport.sse import COMMENT, answered, event

Object = dict[str, Any]
MOST_TOGETHER = 64  # prompts of a request


class TextBesideMedia(Body):
    """Describes a prompt beside which media may be."""

    prompt_string: str
    multimodal_data: list[str] | None = None


class NativeFields(FormFields, ReplyFields):
    """Describes the body of a request for a completion in llama-server's form."""

    api = "native"
    prompt: str | TextBesideMedia | Many[int | str | TextBesideMedia | list[int | str]]
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: Many[str] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    cache_prompt: bool | None = None  # what was read before is found again in any case
    id_slot: Annotated[int, Field(ge=-1)] | None = None  # any will do


class _Other(Body):
    """Describes a file beside the one with the gap."""

    text: str
    filename: str = "tmp"


class InfillFields(NativeFields):
    """Describes the body of a request to fill a gap; `prompt` is how the text in it begins."""

    prompt: str | TextBesideMedia | Many[int | str | TextBesideMedia | list[int | str]] = ""
    input_prefix: str
    input_suffix: str
    input_extra: Many[_Other] | None = None


Given = str | TextBesideMedia | Sequence[int | str]


def prompts_of(
    given: str | TextBesideMedia | Sequence[Any], most: int = MOST_TOGETHER, param: str = "prompt"
) -> list[Given]:
    """List the prompts of a request, in its field `param`: one, or several in a list."""
    if isinstance(given, str | TextBesideMedia) or any(isinstance(each, int) for each in given):
        return [given]
    if not given:
        raise ApiError(400, "the prompt is empty", param=param)
    if len(given) > most:
        raise ApiError(400, f"at most {most} prompts at once", param=param)
    return list(given)


async def encoded(service: Service, llm: LLM, given: Given) -> Sequence[int]:
    """Return the tokens of a prompt: a text, or texts among token ids. Raises ApiError."""
    if isinstance(given, TextBesideMedia):
        if given.multimodal_data:
            raise ApiError(400, "the model reads text alone", param="prompt.multimodal_data")
        given = given.prompt_string
    parts: Sequence[int | str] = [given] if isinstance(given, str) else given
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            tokens += await service.encode(llm, part, add_special=index == 0)
        else:
            tokens.append(part)
    return service.fitting(llm, tokens)


@described(NativeShape, body=NativeFields, media_types=(JSON, EVENTS), statuses=(500, 503))
async def go_on(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a completion in llama-server's form."""
    asked = await read_body(request, NativeFields)
    llm = service.engine.llm
    prompts = [await encoded(service, llm, each) for each in prompts_of(asked.prompt)]
    return await _replied(service, request, asked, llm, prompts)


@described(NativeShape, body=InfillFields, media_types=(JSON, EVENTS), statuses=(500, 501, 503))
async def fill_in(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a text that fills a gap in another one, such as code."""
    asked = await read_body(request, InfillFields)
    llm = service.engine.llm
    if missing := {"fim_pre", "fim_suf", "fim_mid"} - llm.tokenizer.gaps.keys():
        raise ApiError(501, f"the model fills no gaps: its vocabulary has no {min(missing)} token")
    texts = (
        asked.input_prefix,
        asked.input_suffix,
        *(each.text for each in asked.input_extra or ()),
    )
    for text in texts:
        service.check_length(llm, text)
    tokens = await service.off_loop(partial(_around_gap, llm, asked), is_long=True)
    return await _replied(service, request, asked, llm, [service.fitting(llm, tokens)])


def _around_gap(llm: LLM, asked: InfillFields) -> list[int]:
    """Return the tokens around a gap, with other files before them.

    Their order is that of Qwen2.5-Coder's technical report (2024), section 3.2.2, and of others.
    """
    tokenizer = llm.tokenizer
    gaps, encode = tokenizer.gaps, partial(tokenizer.encode, add_special=False, parse_special=False)
    tokens = list(tokenizer.added_first)
    others = asked.input_extra or []
    if others and "fim_rep" in gaps:
        tokens += [gaps["fim_rep"], *encode("project\n")]
    for each in others:
        begin = [gaps["fim_sep"], *encode(f"{each.filename}\n")] if "fim_sep" in gaps else []
        tokens += [*begin, *encode(each.text)]
    if others and "fim_sep" in gaps:
        tokens += [gaps["fim_sep"], *encode("file\n")]
    begun = asked.prompt if isinstance(asked.prompt, str) else ""
    tokens += [gaps["fim_pre"], *encode(asked.input_prefix)]
    return [*tokens, gaps["fim_suf"], *encode(asked.input_suffix), gaps["fim_mid"], *encode(begun)]


async def _replied(
    service: Service,
    request: HttpRequest,
    asked: NativeFields,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
) -> Response:
    """Let replies to prompts begin, and send their answer. Raises ApiError."""
    more: Object = {
        "n_logprobs": asked.n_probs or None,
        "logprobs_as_drawn": bool(asked.post_sampling_probs),
    }
    if (form := asked.form()) is not None:
        constrain = partial(form.constraint, llm.constraints)
        more["constraint"] = await service.off_loop(constrain, is_long=True)
    replies = service.begin(service.requests(llm, prompts, asked, **more))
    answer = _Answer(service, llm, asked, replies)
    return await answered(request, answer, replies, bool(asked.stream))


class _Answer:
    def __init__(
        self, service: Service, llm: LLM, asked: NativeFields, replies: list[Reply]
    ) -> None:
        self._service, self._llm, self._asked, self._replies = service, llm, asked, replies
        self._is_list = isinstance(asked.prompt, list) and len(prompts_of(asked.prompt)) > 1
        self._reading = [ReadingNews(reply) for reply in replies]

    async def whole(self) -> Any:
        """Wait for all replies, and return the answer: a list where there were several prompts."""
        pieces: list[list[Piece]] = [[] for _ in self._replies]
        async for index, news in merged(self._replies, None):
            pieces[index] += news.pieces
        found = [self._final(index, each) for index, each in enumerate(pieces)]
        return found if self._is_list else found[0]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream: one for each token, and one at the end of each reply."""
        texts = [""] * len(self._replies)
        async for index, news in merged(self._replies, PATIENCE):
            if news.is_silent:
                yield COMMENT
            if self._asked.return_progress:
                for progress in self._reading[index].more(news):
                    yield event({**self._part(index, []), **progress})
            for piece in news.pieces:
                texts[index] += piece.text
                yield event(self._part(index, [piece]))
        for index in range(len(self._replies)):
            yield event(self._final(index, [], texts[index]))

    def _part(self, index: int, pieces: Sequence[Piece]) -> Object:
        """Say what is new of a reply."""
        reply = self._replies[index]
        more = {"timings": timings(reply.statistics)} if self._asked.timings_per_token else {}
        return {
            "index": index,
            "content": "".join(piece.text for piece in pieces),
            "tokens": [piece.token_id for piece in pieces if piece.token_id >= 0],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": reply.generation.n_generated,
            "tokens_evaluated": reply.generation.n_prompt,
            **self._figures(pieces),
            **more,
        }

    def _figures(self, pieces: Sequence[Piece]) -> Object:
        if not (self._asked.n_probs and pieces):
            return {}
        as_drawn = bool(self._asked.post_sampling_probs)
        return {"completion_probabilities": token_figures(self._llm.tokenizer, pieces, as_drawn)}

    def _final(self, index: int, pieces: Sequence[Piece], sent: str = "") -> Object:
        """Say all of a reply that has ended; of a stream, which `sent` its text, without that."""
        reply = self._replies[index]
        whole = self._part(index, pieces)
        whole |= {
            "tokens": whole["tokens"] if self._asked.return_tokens else [],
            "model": self._service.alias,
            "has_new_line": "\n" in sent + whole["content"],
            **ending(self._llm.tokenizer, reply),
        }
        wanted = self._asked.response_fields or ()
        return dict(_nested(whole, wanted)) if wanted else whole


def _nested(value: Object, paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield what an answer has at paths such as timings/prompt_n; nothing for those it has not."""
    for path in paths:
        found: Any = value
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            yield path, found
