"""Runs an application until a signal ends it: what is under way may finish within a limit."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from vkmoe.errors import UsageError
from vkmoe.server.errors import unavailable
from vkmoe.server.hosting.models import Models
from vkmoe.server.transport.connections import (
    TOO_MANY,
    Connection,
    Limits,
    crowd,
    make_room,
    raw_answer,
)

_DRAIN_S, _REST_S = 10, 3  # seconds for replies to finish, and then for their last events
_BACKLOG = 512
_BACK_OFF_S = 0.2  # until another attempt to accept where there are no handles
_WARNING_S = 60.0  # between two lines with the same warning

log = logging.getLogger("vkmoe")


def bind(host: str, port: int) -> socket.socket:
    """Listen at an address. Raises UsageError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small parts at once (TCP_NODELAY) only where a socket names its protocol.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"cannot listen at {host}:{port}: {reason or error}", "give another --host or --port"
        ) from error
    return listening


def bind_all(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen at the same port of several addresses. Raises UsageError where that cannot be."""
    found: list[socket.socket] = []
    try:
        for host in hosts:
            found.append(bind(host, found[0].getsockname()[1] if found else port))
    except UsageError:
        for listening in found:
            listening.close()
        raise
    return found


class Server(uvicorn.Server):
    """Serves an application within limits of connections.

    The first signal ends it with replies under way drained, the second without.
    """

    def __init__(self, app: ASGIApp, models: Models, limits: Limits | None = None) -> None:
        """Begin with nothing; without `limits` there are those of the process."""
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="on",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_DRAIN_S + _REST_S,
            )
        )
        self._models = models
        self._limits = limits or Limits.of_process()
        self._accepting: list[asyncio.Task[None]] = []
        self._warned = dict[str, float]()  # when a text was logged last

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Load the application, and let clients connect to `sockets`."""
        await super().startup(sockets=[])
        for listening in sockets or ():
            listening.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listening)))

    async def _accept(self, listening: socket.socket) -> None:
        """Let clients connect for ever.

        Where handles run out, the accepting of asyncio fails and logs thousands of times a second.
        """
        while True:
            await asyncio.sleep(0)  # also where clients come faster than they are refused
            try:
                connected, address = await asyncio.get_running_loop().sock_accept(listening)
                await self._let_in(connected, address[0])
            except ConnectionError:  # the client has left
                continue
            except OSError as error:
                self._warn(f"clients cannot connect: {error.strerror}")
                await asyncio.sleep(_BACK_OFF_S)

    async def _let_in(self, connected: socket.socket, host: str) -> None:
        """Speak with a client, unless there are too many that are being answered."""
        others = crowd(self._connections, host, self._limits)
        if others:
            self._warn(f"{TOO_MANY}: {len(others)}")
        if others and not make_room(others):
            with connected, suppress(OSError):
                connected.send(raw_answer(unavailable(TOO_MANY), "/"))
            return

        def speak() -> Connection:
            return Connection(
                self._limits, host, self.config, self.server_state, self.lifespan.state
            )

        await asyncio.get_running_loop().connect_accepted_socket(speak, connected)

    @property
    def _connections(self) -> Collection[Connection]:
        return cast(Collection[Connection], self.server_state.connections)

    def _warn(self, text: str) -> None:
        """Log a text, unless it was logged within the last minute."""
        now = time.monotonic()
        if now - self._warned.get(text, -_WARNING_S) >= _WARNING_S:
            self._warned[text] = now
            log.warning("%s", text)

    async def on_tick(self, counter: int) -> bool:
        """Say whether to end, ten times a second: also where there will be no model."""
        return await super().on_tick(counter) or self._models.has_failed

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at SIGINT and SIGTERM; these reach the main thread alone."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        before = {number: signal.signal(number, self._ended) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ended(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._models.cancel_all()
            self.force_exit = number == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more clients, and let replies end."""
        self._models.end()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        limit = asyncio.get_running_loop().call_later(_DRAIN_S, self._models.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()
