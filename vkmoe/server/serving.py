"""Runs an application until a signal ends it: what is under way may finish within a limit."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from vkmoe.errors import UsageError
from vkmoe.server.engine_thread import EngineThread

__all__ = ["bind", "serve"]

DRAIN_S, REST_S = 10.0, 3  # seconds for replies to finish, and then for their last events
_BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """Listen at an address. Raises UsageError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
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


class _Server(uvicorn.Server):
    """Ends at the first signal, with replies under way drained; at the second, without."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread, drain_s: float) -> None:
        super().__init__(config)
        self._engine, self._drain_s = engine, drain_s

    async def on_tick(self, counter: int) -> bool:
        """Say whether to end, ten times a second: also where there will be no model."""
        return await super().on_tick(counter) or self._engine.has_failed

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._ended) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ended(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._engine.cancel_all()
            self.force_exit = number == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end()
        limit = asyncio.get_running_loop().call_later(self._drain_s, self._engine.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()


def serve(
    app: ASGIApp,
    engine: EngineThread,
    listening: socket.socket,
    on_start: Callable[[], None] = lambda: None,
    drain_s: float = DRAIN_S,
) -> None:
    """Serve until SIGINT or SIGTERM; then replies under way have `drain_s` seconds to finish."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(drain_s) + REST_S,
    )
    on_start()
    _Server(config, engine, drain_s).run(sockets=[listening])
