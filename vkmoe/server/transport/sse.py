"""Sends answers: JSON at once, or a stream.

A stream has events (the WHATWG's server-sent events), or lines of JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vkmoe.server.errors import ApiError
from vkmoe.server.replies import ClientGone, Reply, until_gone

# json.dumps would make one for each event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
COMMENT = b": still at work\n\n"  # which clients ignore, and proxies take for a sign of life


def json_bytes(value: Any) -> bytes:
    """Write JSON as UTF-8; half of a surrogate pair becomes a replacement character."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def event(data: Any, name: str | None = None) -> bytes:
    """Write one event, whose data is JSON or, if it is a text, that text."""
    body = data.encode() if isinstance(data, str) else json_bytes(data)
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + body + b"\n\n"


def line(value: Any) -> bytes:
    """Write one line of JSON."""
    return json_bytes(value) + b"\n"


def json_answer(value: Any) -> Response:
    """Make an answer that is JSON."""
    return Response(json_bytes(value), media_type="application/json")


class Answer(Protocol):
    """Describes what makes the answer of replies."""

    async def whole(self) -> dict[str, Any]:
        """Wait for the replies, and return the answer."""

    def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""


async def answered(
    request: Request,
    answer: Answer,
    replies: Sequence[Reply],
    streams: bool,
    named_errors: bool = False,
) -> Response:
    """Send the answer of replies, as a stream or when it is whole. Raises ApiError."""
    if streams:
        return EventStream(answer.events(), replies, named_errors)
    return json_answer(await until_gone(request, answer.whole(), replies))


class EventStream(Response):
    """Sends what `events` yields as it comes; an ApiError becomes the last event.

    Where the client leaves, `events` is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        replies: Sequence[Reply] = (),
        named_errors: bool = False,
    ) -> None:
        """Begin with nothing sent. `named_errors`: they have the event name "error".

        When the stream ends, however that comes about, `replies` are cancelled.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._replies = events, replies
        self._error_name = "error" if named_errors else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            sending = self._send_all(send, scope["path"])
            await until_gone(Request(scope, receive), sending, self._replies)
        except (ClientGone, OSError):
            return
        finally:  # also where nothing could be sent
            for reply in self._replies:
                reply.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error(self, body: dict[str, Any]) -> bytes:
        return event(body, self._error_name)

    async def _send_all(self, send: Send, path: str) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                data = self._error(error.body(path))
                await send({"type": "http.response.body", "body": data, "more_body": True})


class LineStream(EventStream):
    """Sends lines of JSON as they come."""

    media_type = "application/x-ndjson"

    def _error(self, body: dict[str, Any]) -> bytes:
        return line(body)
