"""Cuts a reply into blocks that follow each other: a thought, a text, a call of a tool.

That is how Anthropic's messages and OpenAI's responses have it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vkmoe.generate.tools import (
    Content,
    ReplyEvent,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
)
from vkmoe.server.api.begun import Begun

Kind = Literal["thought", "text", "call"]
What = Literal["begin", "more", "end"]


@dataclass
class Block:
    """Holds a part of a reply; of a call, `text` are the arguments, and `id` and `name` its own.

    `is_whole`: it was not cut off.
    """

    index: int
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""
    is_whole: bool = True


class BlockEvent(NamedTuple):
    """Says what happens to a block: it begins, has more text, or ends."""

    what: What
    block: Block
    text: str = ""


class Blocks:
    """Collects the blocks of one reply."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def feed(self, events: Iterable[ReplyEvent]) -> Iterator[BlockEvent]:
        """Yield what follows from more of a reply. Mutates."""
        for each in events:
            if isinstance(each, Content | Thought):
                kind: Kind = "text" if isinstance(each, Content) else "thought"
                if not self._is_open or self.all[-1].kind != kind:
                    yield from self._begin(Block(len(self.all), kind))
                yield self._more(each.text)
            elif isinstance(each, ToolCallBegin):
                yield from self._begin(Block(len(self.all), "call", "", each.id, each.name))
            elif isinstance(each, ToolCallArguments):
                yield self._more(each.text)
            else:
                yield from self.finish(each.is_whole)

    def finish(self, is_whole: bool = True) -> Iterator[BlockEvent]:
        """Yield the end of the last block, if it has not ended. Mutates."""
        if self._is_open:
            self._is_open, self.all[-1].is_whole = False, is_whole
            yield BlockEvent("end", self.all[-1])

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self.finish()
        self.all.append(block)
        self._is_open = True
        yield BlockEvent("begin", block)

    def _more(self, text: str) -> BlockEvent:
        self.all[-1].text += text
        return BlockEvent("more", self.all[-1], text)


async def followed(
    begun: Begun, blocks: Blocks, patience: float | None = None
) -> AsyncIterator[BlockEvent | None]:
    """Yield what happens to the blocks of one reply until it is over.

    After `patience` seconds without any news, yields None. Mutates `blocks`.
    """
    (reply,), (text,) = begun.replies, begun.texts
    async for news in reply.news(patience):
        if news.is_silent:
            yield None
        for each in blocks.feed(text.feed(news.pieces)):
            yield each
    is_whole = reply.generation.finish_reason != "length"
    for each in (*blocks.feed(text.finish()), *blocks.finish(is_whole)):
        yield each
