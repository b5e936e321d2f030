"""Logs one line for each request: what was asked and what its answer took, but no text of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vkmoe.server.replies import Reply

__all__ = ["RequestLog"]

_GONE = 499  # what nginx calls a request whose client left before the answer
_MOST_METHOD, _MOST_PATH = 20, 200  # characters

log = logging.getLogger("vkmoe")


class RequestLog:
    """Logs the requests for `app` when they have been answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        began, status = loop.time(), _GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["raw_path"].decode("ascii")  # with control characters quoted
            asked = f"{scope['method'][:_MOST_METHOD]} {path[:_MOST_PATH]}"
            took = f"{status} in {loop.time() - began:.3f} s"
            replies = scope.get("state", {}).get("replies", ())
            log.info("%s %s%s", asked, took, _costs(replies, began))


def _costs(replies: Sequence[Reply], began: float) -> str:
    """Say how many tokens the prompts and replies of a request have, and how fast they came.

    `began` is when the request came, in seconds of the event loop's clock.
    """
    if not replies:
        return ""
    each = [reply.generation for reply in replies]
    n_prompt, n_reply = sum(g.n_prompt for g in each), sum(g.n_generated for g in each)
    costs = [f": {n_prompt} + {n_reply} tokens"]
    firsts = [reply.first_at for reply in replies if reply.first_at is not None]
    if firsts:
        costs.append(f"the first after {min(firsts) - began:.3f} s")
        seconds = max(reply.last_at for reply in replies) - min(firsts)
        if seconds > 0:
            costs.append(f"{(n_reply - len(firsts)) / seconds:.1f} tok/s")
    return ", ".join(costs)
