"""Lets the replies to a conversation begin, in whichever API it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from vkmoe.generate.chat.conversation import Conversation, ReplyText, fault_of_tools
from vkmoe.generate.form import Form
from vkmoe.generate.tools import ReplyParser, ToolFamily
from vkmoe.llm import LLM
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import ReplyFields
from vkmoe.server.replies import Reply
from vkmoe.server.service import Service
from vkmoe.server.transport.sse import json_answer


@dataclass(frozen=True)
class Begun:
    """Holds the replies to a conversation, and what reads each."""

    llm: LLM
    replies: list[Reply]
    texts: list[ReplyText]


async def begin(
    service: Service,
    asked: ReplyFields,
    conversation: Conversation,
    streams: bool,
    before: Sequence[int] = (),
    **more: Any,
) -> Begun:
    """Let the replies to a conversation begin, behind the tokens `before` if there are any.

    `more` are options of LLM.request. Raises ApiError where they cannot.
    """
    llm = service.engine.llm
    check_length(service, llm, conversation)
    prompt = await service.off_loop(lambda: service.prompt(llm, conversation))
    encoded = await service.encode(llm, prompt.text, prompt.wants_special)
    tokens = service.fitting(llm, joined(llm, before, encoded))
    constraint = None
    if conversation.has_form:
        constrain = partial(prompt.constraint, llm.constraints)
        constraint = await service.off_loop(constrain, is_long=True)
    more |= {"constraint": constraint, "shown": prompt.format.family.shown}
    replies = service.begin(service.requests(llm, [tokens], asked, **more))
    texts = [
        ReplyText(prompt.parser(llm.tokenizer, constraint, streams), reply.generation)
        for reply in replies
    ]
    return Begun(llm, replies, texts)


async def begin_text(
    service: Service,
    llm: LLM,
    tokens: Sequence[int],
    asked: ReplyFields,
    form: Form | None,
    **more: Any,
) -> Begun:
    """Let the reply begin that goes on with a text, all of which is its answer.

    `more` are options of LLM.request. Raises ApiError where it cannot.
    """
    if form is not None:
        constrain = partial(form.constraint, llm.constraints)
        more["constraint"] = await service.off_loop(constrain, is_long=True)
    fitting = service.fitting(llm, tokens)
    replies = service.begin(service.requests(llm, [fitting], asked, **more))
    plain = ToolFamily()
    return Begun(llm, replies, [ReplyText(ReplyParser(plain), each.generation) for each in replies])


def joined(llm: LLM, before: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Put a text behind another one; the token that begins every text is at the start alone."""
    is_begun = before and list(tokens[:1]) == [llm.tokenizer.bos_id]
    return [*before, *tokens[1 if is_begun else 0 :]]


async def counted(service: Service, conversation: Conversation) -> Response:
    """Answer how many tokens a conversation has as a prompt. Raises ApiError."""
    llm = service.engine.llm
    check_length(service, llm, conversation)
    prompt = await service.off_loop(lambda: service.prompt(llm, conversation))
    ids = await service.encode(llm, prompt.text, prompt.wants_special)
    return json_answer({"object": "response.input_tokens", "input_tokens": len(ids)})


def check_length(service: Service, llm: LLM, conversation: Conversation) -> None:
    """Refuse what cannot fit before the template is rendered. Raises ApiError."""
    for text in conversation.certain_texts():
        service.check_length(llm, text.strip())


def checked_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Check tools in OpenAI's form. Raises ApiError."""
    if (fault := fault_of_tools(tools)) is not None:
        where, message = fault
        raise ApiError(400, message, param=where)
    return list(tools)
