"""Follows replies for clients: within a limit of time, counted, and ended when the client leaves.

Nothing here knows the form in which a reply is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from vkmoe.errors import VkmoeError
from vkmoe.generate.loop import Request
from vkmoe.llm.engine_thread import EngineThread
from vkmoe.llm.following import FollowedReply, News
from vkmoe.server.errors import ApiError, api_error, unavailable
from vkmoe.server.metrics import Metrics

Result = TypeVar("Result")


class ClientGone(Exception):
    """Says that the client closed its connection: nothing that is sent would arrive."""


class Reply(FollowedReply):
    """Follows one reply within a limit of time, and counts what it takes."""

    def __init__(
        self, engine: EngineThread, metrics: Metrics, request: Request, timeout: float | None
    ) -> None:
        """Let it begin, on the event loop. Raises UnavailableError where it cannot.

        It may take `timeout` seconds in all; None: as long as it likes.
        """
        self._metrics = metrics
        self.last_at = asyncio.get_running_loop().time()  # when it began, or its last token came
        self.first_at: float | None = None  # when its first token came
        self._deadline = None if timeout is None else self.last_at + timeout
        self._n_tokens = 0  # that were seen
        super().__init__(engine, request)

    async def news(self, patience: float | None = None) -> AsyncGenerator[News, None]:
        """Yield what is new until the reply has ended; after `patience` seconds without any, that.

        Raises ApiError for a reply that failed, or took too long.
        """
        generation = self.generation
        try:
            async with aclosing(super().news(patience)) as found:
                async for each in found:
                    self._count()
                    yield each
        except VkmoeError as error:
            raise api_error(error) from error
        finally:
            self._count()
            self._metrics.ended(self.statistics, generation.n_read)
        if generation.finish_reason == "interrupt":
            raise unavailable("the server ended this reply", 30, code="interrupted")

    async def _wait(self, patience: float | None) -> bool:
        """Wait for news; return whether there are any. Raises ApiError where time is up."""
        left = None if self._deadline is None else self._deadline - self._loop.time()
        if left is None or (patience is not None and patience < left):
            return await super()._wait(patience)
        if not await super()._wait(left):
            raise ApiError(503, "the reply took too long: see --timeout", code="timeout")
        return True

    def _count(self) -> None:
        """Note how long the tokens took that came since the last call."""
        now, n_new = self._loop.time(), self.generation.n_generated - self._n_tokens
        if n_new and not self._n_tokens:
            self.first_at = now
            self._metrics.first_token(now - self.last_at)
        elif n_new:
            self._metrics.next_tokens(n_new, now - self.last_at)
        if n_new:
            self._n_tokens, self.last_at = self._n_tokens + n_new, now


async def until_gone(
    request: HttpRequest, work: Coroutine[Any, Any, Result], replies: Sequence[Reply]
) -> Result:
    """Do some work while the client waits for it. Raises ClientGone, with the work cancelled.

    When it ends, however that comes about, `replies` are cancelled. The log of requests finds
    them in the request's state.
    """
    request.state.replies = replies
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone
    finally:
        for task in (doing, leaving):
            task.cancel()
        for reply in replies:  # work that was cancelled before it began has not done so
            reply.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(
    replies: Sequence[Reply], patience: float | None
) -> AsyncIterator[tuple[int, News]]:
    """Yield what is new of several replies, each with its index, until all have ended.

    Raises the first error of any; the others are cancelled then. What comes of one reply alone
    while a client reads slowly is joined; the news of several wait one by one.
    """
    if len(replies) == 1:
        async with aclosing(replies[0].news(patience)) as news:
            async for each in news:
                yield 0, each
        return
    queue: asyncio.Queue[tuple[int, News | None]] = asyncio.Queue()

    async def follow(index: int, reply: Reply) -> None:
        async for each in reply.news(patience):
            queue.put_nowait((index, each))

    tasks = [asyncio.ensure_future(follow(i, reply)) for i, reply in enumerate(replies)]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait((-1, None)))
    try:
        n_ended = 0
        while n_ended < len(tasks):
            index, found = await queue.get()
            if found is not None:
                yield index, found
                continue
            n_ended += 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
