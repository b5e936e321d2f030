"""Bounds what connections cost: how long requests and answers take to arrive, how many there are.

It owns one connection and the choice of the one that makes room for another. It does not own the
listening socket (serving.py), nor how large a request may be (guard.py).
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_network
from typing import Any, Literal

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from vkmoe.server.errors import ApiError, unavailable
from vkmoe.server.transport.guard import error_response

TOO_MANY = "there are too many connections"
_MOST = 512  # connections


@dataclass(frozen=True)
class Limits:
    """Says how many connections there are at most, and how many seconds a request may take to come.

    `n_of_address` is for one IPv4 address, or one IPv6 network of 64 bits, which one host may own.
    A client may take nothing of an answer for `answer_s` seconds.
    """

    n_connections: int
    n_of_address: int
    head_s: float = 10.0
    body_s: float = 120.0
    answer_s: float = 120.0

    @classmethod
    def of_process(cls) -> Limits:
        """Leave half of the files that this process may open to the model."""
        n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        n = _MOST if n_files == resource.RLIM_INFINITY else min(_MOST, n_files // 2)
        return cls(n_connections=n, n_of_address=n // 2)


class Connection(H11Protocol):
    """Speaks HTTP with one client, which is given up when it is too slow.

    That is when its request takes too long to arrive, or when it takes nothing of an answer.
    """

    def __init__(
        self, limits: Limits, host: str, config: Config, state: ServerState, app_state: Any
    ) -> None:
        """Begin with nothing received. `host` is the client's address."""
        super().__init__(config, state, app_state)
        self.network = _network(host)
        self.since = self.loop.time()  # when it began to wait for what it waits for now
        self._limits = limits
        self._part: tuple[object, ...] = (None, None, None)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def awaits(self) -> Literal["head", "body"] | None:
        """Return the part of a request that has not arrived; None while one is being answered."""
        if self.transport.get_write_buffer_size():
            return None
        if self.cycle is None or self.cycle.response_complete:
            return "head"
        return "body" if self.cycle.more_body else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing pauses as soon as anything is left to send
        self._look()

    def data_received(self, data: bytes) -> None:
        """Read more of a request."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Begin to wait for the client to take more of an answer."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """Go on: the client has taken all that was written."""
        super().resume_writing()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def give_up(self, error: ApiError) -> None:
        """Close the connection, with a reason for a client that sends a body."""
        if self.awaits == "body" and not self.cycle.response_started:
            self.transport.write(raw_answer(error, self.scope["path"]))
        self.transport.abort()

    def _look(self) -> None:
        """Begin to count the time of a part if the client is waited for in another way."""
        part = (self.cycle, self.awaits, self.transport.get_write_buffer_size() > 0)
        if self._part == part:
            return
        self._part, self.since = part, self.loop.time()
        self._count_time()

    def _count_time(self) -> None:
        """Give the client some time for what is waited for now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        n_unsent = self.transport.get_write_buffer_size()
        if n_unsent:
            seconds, reason = self._limits.answer_s, "nothing was taken of the answer for"
        elif self.awaits is not None and not self.transport.is_closing():
            seconds = self._limits.head_s if self.awaits == "head" else self._limits.body_s
            reason = f"the {self.awaits} of the request took over"
        else:
            return
        error = ApiError(408, f"{reason} {seconds:g} seconds")
        self._timer = self.loop.call_later(seconds, self._time_is_up, error, n_unsent)

    def _time_is_up(self, error: ApiError, n_unsent: int) -> None:
        """Give the client up, unless it has taken more of what was `n_unsent` bytes."""
        if self.transport.get_write_buffer_size() < n_unsent:
            self._count_time()
        else:
            self.give_up(error)


def crowd(connections: Collection[Connection], host: str, limits: Limits) -> list[Connection]:
    """List the connections of which one must end before another client at `host` may connect."""
    network = _network(host)
    near = [each for each in connections if each.network == network]
    if len(near) >= limits.n_of_address:
        return near
    return list(connections) if len(connections) >= limits.n_connections else []


def make_room(connections: Collection[Connection]) -> bool:
    """Give up the connection that has waited longest for a request.

    Returns whether there is one: there is none where all of them are being answered.
    """
    waiting = [each for each in connections if each.awaits is not None]
    if waiting:
        oldest = min(waiting, key=lambda each: each.since)
        oldest.give_up(unavailable(TOO_MANY))
    return bool(waiting)


def raw_answer(error: ApiError, path: str) -> bytes:
    """Write a whole answer that ends its connection, for a request with this path."""
    answer = error_response(error, path)
    lines = [
        f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}".encode(),
        *(name + b": " + value for name, value in answer.raw_headers),
        b"connection: close",
        b"",
        bytes(answer.body),
    ]
    return b"\r\n".join(lines)


def _network(host: str) -> str:
    if ":" not in host or "." in host:  # of IPv4, also as part of IPv6
        return host
    return str(ip_network((host.partition("%")[0], 64), strict=False))
