"""This module follows replies on an event loop, and ends those that nothing reads any more.

The engine's thread writes, the event loop reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from vkmoe.generate.loop import Generation, GenerationStatistics, Piece, Request
from vkmoe.llm.engine_thread import EngineThread

Result = TypeVar("Result")


class News(NamedTuple):
    """Holds what is new of a reply: pieces of its text, and tokens of its prompt that were read."""

    pieces: list[Piece]
    n_read: int
    is_silent: bool = False  # nothing is new for some time


class FollowedReply:
    """Follows one reply. Its work ends when `news` does, however that comes about."""

    def __init__(self, engine: EngineThread, request: Request) -> None:
        """Let it begin, on the event loop. Raises UnavailableError where it cannot."""
        self._engine, self._changed = engine, asyncio.Event()
        self._loop = loop = asyncio.get_running_loop()
        set_changed = partial(call_soon, loop, self._changed.set)
        self.generation: Generation = engine.submit(request, set_changed)

    async def news(self, patience: float | None = None) -> AsyncGenerator[News, None]:
        """Yield what is new until the reply has ended; after `patience` seconds without any, that.

        Raises the error that ended it.
        """
        generation = self.generation
        try:
            while True:
                is_new = await self._wait(patience)
                self._changed.clear()
                is_done = generation.is_done  # first: what is there then is all
                pieces = generation.take_pieces()
                if pieces or not is_done:
                    yield News(pieces, generation.n_read, not is_new)
                if is_done:
                    break
        finally:
            self.cancel()
        if generation.error is not None:
            raise generation.error

    async def _wait(self, patience: float | None) -> bool:
        """Wait for news; return whether there are any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):  # wait_for would make a task for each token
                await self._changed.wait()
            return True
        return False

    def cancel(self) -> None:
        """Let it end where it is, unless it has ended."""
        if not self.generation.is_done:
            self.generation.cancel()
            self._engine.wake()

    @property
    def statistics(self) -> GenerationStatistics:
        """Return what it took until now, or until it ended."""
        return self.generation.statistics(load_seconds=0.0)


def call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object
) -> None:
    """Call a function on an event loop, from any thread; not at all where that is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


async def together(work: Sequence[Awaitable[Result]]) -> list[Result]:
    """Wait for all of these; where one fails, or this is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
