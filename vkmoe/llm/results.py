"""This module holds what a call gives back when a reply is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from vkmoe.generate.chat.collected import ToolCall
from vkmoe.generate.logprobs import LogProbs
from vkmoe.generate.loop import FinishReason, Generation, GenerationStatistics, Piece
from vkmoe.generate.tools import ReplyEvent
from vkmoe.llm.messages import AssistantMessage, MadeCall


@dataclass(frozen=True)
class GenerationResult:
    """Holds a whole reply.

    `logprobs` has an entry for each of its tokens if `n_logprobs` asked for it, `prompt_logprobs`
    for each of the prompt's but the first if `scores_prompt` did, too.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    statistics: GenerationStatistics
    logprobs: list[LogProbs]
    prompt_logprobs: list[LogProbs] = field(default_factory=list)


@dataclass(frozen=True)
class ChatResult:
    """Holds a whole reply in a chat.

    `content` is the answer, `thoughts` what the model thought before it, `tool_calls` the calls
    that it asks for; `finish_reason` is "tool_calls" then. Calls that were cut off are left out.
    `logprobs` has an entry for each token of the reply, marks and thoughts included, if
    `n_logprobs` asked for it.
    """

    content: str
    thoughts: str
    tool_calls: list[ToolCall]
    finish_reason: FinishReason | Literal["tool_calls"]
    statistics: GenerationStatistics
    logprobs: list[LogProbs]

    @property
    def message(self) -> AssistantMessage:
        """Return the message that goes on with the chat when it is appended to the others."""
        found: AssistantMessage = {"role": "assistant", "content": self.content}
        if self.thoughts:
            found["reasoning_content"] = self.thoughts
        if self.tool_calls:
            found["tool_calls"] = [cast(MadeCall, call.given) for call in self.tool_calls]
        return found


@dataclass(frozen=True)
class ChatEnd:
    """Ends the events of a chat, with the reply as a whole."""

    result: ChatResult


ChatEvent = ReplyEvent | ChatEnd


def result_of(
    generation: Generation, pieces: Sequence[Piece], load_seconds: float
) -> GenerationResult:
    """Put the pieces of a reply that is over together."""
    statistics = generation.statistics(load_seconds)
    token_ids = [piece.token_id for piece in pieces if piece.token_id >= 0]
    text = "".join(piece.text for piece in pieces)
    return GenerationResult(
        text,
        token_ids,
        statistics.finish_reason,
        statistics,
        logprobs_of(pieces),
        list(generation.prompt_logprobs),
    )


def logprobs_of(pieces: Sequence[Piece]) -> list[LogProbs]:
    """List the log-probabilities of these pieces' tokens, if they were asked for."""
    return [LogProbs(p.logprob, p.top_logprobs) for p in pieces if p.logprob is not None]
