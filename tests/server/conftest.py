"""A server in this process, with the demo model, for all tests of a file.

It computes on the CPU, whose kernels need no compiling, unless a test names another device.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.calls import with_template
from vkmoe.config import EngineConfig
from vkmoe.cpu.variants import has_cpu
from vkmoe.llm import LLM
from vkmoe.llm.engine_thread import EngineThread
from vkmoe.server.app import make_app
from vkmoe.server.hosting.models import Hosted, Models
from vkmoe.server.hosting.peers import Peers
from vkmoe.server.service import Service
from vkmoe.server.settings import ServerSettings
from vkmoe.server.transport.connections import Limits
from vkmoe.server.transport.serving import Server, bind

HOST = "127.0.0.1"
Result = TypeVar("Result")


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a thread of its own: the browser of other tests leaves a loop running."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if has_cpu():
            patch.setenv("VKMOE_DEVICE", "cpu")
        yield


@dataclass
class Served:
    """A server that listens, and what is behind it."""

    address: str
    engine: EngineThread
    service: Service
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.address, timeout=120.0)

    def wait(self, path: str = "/health") -> None:
        """Wait until the model is there."""
        for _ in range(600):
            if self.client.get(path).status_code == 200:
                return
            threading.Event().wait(0.05)
        raise AssertionError("the model is never there")

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    @property
    def place(self) -> tuple[str, int]:
        """The host and the port."""
        parts = urlsplit(self.address)
        return parts.hostname or "", parts.port or 0

    def raw(self, data: bytes, ends: bool = True) -> bytes:
        """What comes back for these bytes, with nothing sent behind them."""
        with socket.create_connection(self.place, 30) as connection:
            with suppress(OSError):
                connection.sendall(data)
                if ends:
                    connection.shutdown(socket.SHUT_WR)
            found = b""
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    found += part
            return found

    def is_idle(self) -> None:
        """Nothing runs after a moment, and the server answers."""
        assert self.client.get("/health").status_code == 200
        for _ in range(200):
            busy = any(slot["is_processing"] for slot in self.client.get("/slots").json())
            if not busy and not self.engine.n_waiting:
                return
            threading.Event().wait(0.02)
        raise AssertionError("a reply goes on that has no client")


@contextmanager
def serving(
    load: Callable[[], LLM] | None = None,
    api_keys: tuple[str, ...] = (),
    max_queue: int = 64,
    limits: Limits | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve the demo model, or what `load` makes, with these options of the engine."""
    given: dict[str, Any] = {"api_key": ",".join(api_keys), "timeout": 0.0}
    stated = ServerSettings(**given | (settings or {}))
    config = EngineConfig(**{"ctx_size": 256, "parallel": 2, **options})
    engine = EngineThread(load or (lambda: LLM(None, config)), max_queue)
    models = Models([Hosted(Service(engine, "demo", stated), lambda others: True)])
    with listening(models, limits=limits) as served:
        yield served


@contextmanager
def listening(
    models: Models, peers: Peers | None = None, limits: Limits | None = None
) -> Iterator[Served]:
    """Serve these models; the first is the one that `Served` knows."""
    service = models.hosted[0].service
    socket_ = bind(HOST, 0)
    server = Server(make_app(models, peers), models, limits=limits)
    thread = threading.Thread(target=server.run, args=([socket_],))
    thread.start()
    address = service.settings.address(socket_.getsockname()[1])
    served = Served(address, service.engine, service)
    try:
        yield served
    finally:
        served.client.close()
        models.cancel_all()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        assert all(x.service.engine.state in ("ended", "failed") for x in models.hosted)


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    """A server whose model writes calls."""
    with serving(with_template) as served:
        served.wait()
        yield served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        served.wait()
        yield served
