"""One client that holds connections, or all handles, keeps no other from being answered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import HOST, Served, run_async, serving
from tests.server.test_ending import served, wait
from vkmoe.server.transport.connections import Limits
from vkmoe.server.transport.serving import bind

pytestmark = pytest.mark.usefixtures("one_device")

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
PARTS = {"nothing": b"", "half a head": HEAD[:20], "half a body": HEAD + b"{"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(server: Served, data: bytes) -> socket.socket:
    connection = socket.create_connection(server.place, 30)
    connection.sendall(data)
    return connection


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


def test_small_parts_are_sent_at_once() -> None:
    """Nagle's algorithm would hold the second part of an answer back for 40 ms."""

    async def option() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_side = writer.get_extra_info("socket")
            found.set_result(server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(speak, sock=bind(HOST, 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.close()
            return await found

    assert run_async(option()) == 1


@pytest.fixture(scope="module")
def hurried() -> Iterator[Served]:
    limits = Limits(head_s=0.3, body_s=0.3, answer_s=1, n_connections=20, n_of_address=20)
    with serving(limits=limits) as served:
        served.wait()
        yield served


@pytest.mark.parametrize("part", PARTS)
def test_a_request_that_never_arrives_ends_its_connection(hurried: Served, part: str) -> None:
    with connected(hurried, PARTS[part]) as connection:
        found = all_of(connection)
    assert found[:12] == (b"HTTP/1.1 408" if part == "half a body" else b"")
    assert part != "half a body" or b"the body of the request took over" in found


def test_a_kept_connection_has_its_time_for_each_request(hurried: Served) -> None:
    with connected(hurried, HEALTH + HEALTH + HEAD[:20]) as connection:
        assert all_of(connection).count(b"HTTP/1.1 200") == 2


def ask_for_much(server: Served, kept: str) -> tuple[socket.socket, int]:
    """Ask for more bytes than the system holds for a client; return their number too."""
    tokenizer = server.engine.llm.tokenizer
    lengths = [len(tokenizer.token_bytes(i, False)) for i in range(tokenizer.n_vocab)]
    body = json.dumps({"tokens": [lengths.index(max(lengths))] * 300_000}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.connect(server.place)
    connection.settimeout(60)
    head = f"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nConnection: {kept}\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1)
    return connection, int(answer.partition(b"Content-Length: ")[2].split()[0])


@pytest.mark.full
def test_an_answer_that_is_taken_slowly_is_whole(hurried: Served) -> None:
    """The time for the next request begins when the client has all of the answer."""
    connection, n_bytes = ask_for_much(hurried, "keep-alive")
    with connection:
        threading.Event().wait(0.1)
        for _ in range(100):
            n_bytes -= len(connection.recv(1 << 16, socket.MSG_WAITALL))
            threading.Event().wait(0.01)
        assert len(all_of(connection)) == n_bytes


def test_an_answer_that_is_not_taken_ends_its_connection(hurried: Served) -> None:
    connection, n_bytes = ask_for_much(hurried, "close")
    with connection:
        threading.Event().wait(3)
        assert len(all_of(connection)) < n_bytes


@contextmanager
def held(server: Served, n: int) -> Iterator[None]:
    """Connections whose requests never become whole."""
    with ExitStack() as all_held:
        for i in range(n):
            all_held.enter_context(connected(server, list(PARTS.values())[i % len(PARTS)]))
        yield


def test_slow_connections_make_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    """There are more of them than may be, and the log has one line."""
    limits = Limits(n_connections=30, n_of_address=12)
    with serving(limits=limits) as server:
        server.wait()
        with held(server, 40):
            for _ in range(3):
                with connected(
                    server, HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
                ) as one:
                    assert all_of(one).startswith(b"HTTP/1.1 200")
        warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == ["there are too many connections: 12"]


def test_those_that_are_answered_are_not_given_up_for_others() -> None:
    limits = Limits(n_connections=3, n_of_address=2)
    stream = b"GET /experts/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(limits=limits, device="vulkan", ctx_size=64, expert_slots=8) as server:
        server.wait()
        with connected(server, stream) as first, connected(server, stream) as second:
            assert first.recv(12) == second.recv(12) == b"HTTP/1.1 200"
            with connected(server, b"") as third:
                assert all_of(third).startswith(b"HTTP/1.1 503")
            assert first.recv(1)


@contextmanager
def no_handles_left() -> Iterator[None]:
    """No file can be opened in this process: all handles are in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_used, hard))
    try:
        with pytest.raises(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


def test_without_handles_it_waits_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        server.wait()
        server.client.close()
        clients = [socket.socket() for _ in range(8)]
        with no_handles_left():
            for each in clients:
                each.settimeout(30)
                each.connect(server.place)
                each.sendall(HEALTH)
            clients[-1].settimeout(1)
            with pytest.raises(TimeoutError):
                clients[-1].recv(1)
        clients[-1].settimeout(30)
        for each in clients:
            assert each.recv(12) == b"HTTP/1.1 200"
            each.close()
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == ["clients cannot connect: Too many open files"]


@contextmanager
def handles(n: int) -> Iterator[None]:
    """Let processes that start now open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_handles_leave_it_alive() -> None:
    """Two hundred clients send half a request to a process that may open 128 files."""
    with ExitStack() as stack:
        with handles(128):
            _, address, lines = stack.enter_context(served("--ctx-size", "256"))
        wait(address)
        place = urlsplit(address)
        for _ in range(200):
            half_open = stack.enter_context(
                socket.create_connection((place.hostname, place.port), 30)
            )
            half_open.sendall(PARTS["half a head"])
        for _ in range(3):
            assert httpx.get(f"{address}/health", timeout=30).status_code == 200
        warned = [line for line in lines if "warning" in line or "Traceback" in line]
    assert warned == ["warning: there are too many connections: 32\n"]
