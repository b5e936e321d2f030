"""`vkmoe chat --server`: with our own server, and with servers that do whatever they like."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.server.conftest import Served, on_the_cpu, serving
from vkmoe.cli.remote import RemoteModel, _checked

from .conftest import FakeLLM, Run

__all__ = ["on_the_cpu"]

Handle = Callable[[BaseHTTPRequestHandler, dict[str, Any] | None], None]
LISTED = {"data": [{"id": "first"}, {"id": "second"}]}


@contextmanager
def answering(handle: Handle) -> Iterator[str]:
    """A server that lists two models and leaves the rest to `handle`; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            handle(self, None)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            handle(self, json.loads(self.rfile.read(length)))

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def send(to: BaseHTTPRequestHandler, body: Any, status: int = 200, **headers: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    to.send_response(status)
    for name, value in headers.items():
        to.send_header(name.replace("_", "-"), value)
    to.end_headers()
    to.wfile.write(data)


def stream(*deltas: dict[str, Any], end: str = "data: [DONE]\n\n") -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    text = "".join(f": sign of life\n\ndata: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return (text + end).encode()


@contextmanager
def replying(*answers: bytes) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with one stream after the other; its address, and the requests it gets."""
    asked: list[dict[str, Any]] = []

    def handle(to: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        if body is not None:
            asked.append({**body, "key": to.headers.get("Authorization")})
        send(to, LISTED if body is None else answers[(len(asked) - 1) % len(answers)])

    with answering(handle) as address:
        yield address, asked


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(api_keys=("key",)) as served:
        served.wait()
        yield served


def test_the_reply_of_a_server_is_that_of_the_model_here(run: Run, server: Served) -> None:
    common = ("-n", "6", "--temp", "0", "-q")
    message = b"write a function\nand a class\n"
    here = run("chat", *common, stdin=message)
    there = run("chat", *common, "--server", server.address, "--api-key", "key", stdin=message)
    assert (there.code, there.err, there.out) == (0, "", here.out)
    assert here.out.strip()
    url = f"{server.address.removeprefix('http://')}/v1/"  # as clients are given it
    again = run("chat", *common, VKMOE_SERVER=url, VKMOE_API_KEY="key", stdin=message)
    assert again == there
    spoken = run("chat", "-v", "--server", server.address, "--api-key", "key", stdin=b"hi\n")
    assert "tok/s" in spoken.err


def test_a_key_is_asked_for(run: Run, server: Served) -> None:
    done = run("chat", "--server", server.address, "--api-key", "wrong", stdin=b"hi\n")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: the server refuses: Invalid API Key\nhint: give the server's key: --api-key KEY\n"
    )


def test_what_was_given_is_in_the_request_and_nothing_else(run: Run, fake: type[FakeLLM]) -> None:
    with replying(stream({"content": "yes"})) as (address, asked):
        assert run("chat", "--server", address, "--system", "S", stdin=b"hi\n").out == "yes\n"
        run(
            *("chat", "--server", address, "--temp", "0.5", "-n", "9", "--stop", "x"),
            *("--dry-sequence-breakers", '["\\n"]'),
            *("--chat-template-kwargs", '{"enable_thinking": false}', "--ignore-eos"),
            stdin=b"hi\n", VKMOE_TOP_K="7", VKMOE_SEED="", VKMOE_API_KEY="k", VKMOE_PARALLEL="3",
        )  # fmt: skip
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    assert asked[0] == {"messages": said, "stream": True, "model": "first", "key": None}
    assert asked[1] == {
        "messages": said[1:],
        "stream": True,
        "model": "first",
        "temperature": 0.5,
        "top_k": 7,
        "dry_sequence_breakers": ["\n"],
        "max_tokens": 9,
        "stop": ["x"],
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "key": "Bearer k",
    }
    assert not fake.calls  # no model is loaded


def test_thoughts_go_to_stderr_and_are_not_remembered(run: Run) -> None:
    thinking = stream({"role": "assistant", "content": None}, {"reasoning_content": "Hm"},
                      {"reasoning": "."}, {"content": "Hel"}, {"content": "lo"})  # fmt: skip
    with replying(thinking) as (address, asked):
        done = run("chat", "--server", address, stdin=b"hi\nyou\n")
        assert done.out == "Hello\nHello\n" and done.err.count("Hm.\n\n") == 2
        assert asked[1]["messages"][1] == {"role": "assistant", "content": "Hello"}
        quiet = run("chat", "-q", "--server", address, stdin=b"hi\n")
        assert (quiet.out, quiet.err) == ("Hello\n", "")


FAILED = 'data: {"error": {"message": "the device was lost"}}\n\n'
BROKEN = {
    "error": (stream({"content": "a"}, end=FAILED), "the server ended the reply: the device was"),
    "cut": (stream({"content": "a"}, end=""), "the connection was lost before the reply ended"),
    "order": (b'data: {"error": "\\u001b]52;c;x\\u0007"}\n\n', "the reply: ?]52;c;x?"),
    "no-json": (b"data: {\n\n", "the answer is none of"),
    "no-object": (b"data: [1]\n\n", "the answer is none of"),
    "deep": (b"data: " + b"[" * 100_000 + b"\n\n", "the answer is none of"),
    "endless": (b"data: " + b"x" * (5 << 20), "the answer is none of"),
    "another": (b"<html>", "the connection was lost before the reply ended"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_that_breaks_off_is_one_error_and_its_message_is_taken_back(
    run: Run, name: str
) -> None:
    data, message = BROKEN[name]
    with replying(data, stream({"content": "yes"})) as (address, asked):
        done = run("chat", "--server", address, stdin=b"hi\nyou\n")
    assert done.code == 0 and done.out.endswith("yes\n")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in done.err
    assert asked[1]["messages"] == [{"role": "user", "content": "you"}]


@pytest.mark.parametrize(
    "chunk",
    [{}, {"choices": []}, {"choices": {}}, {"choices": [1]}, {"choices": [{"delta": 1}]},
     {"choices": [{"delta": {"content": 1}}]}, {"usage": {}}],
    ids=str,
)  # fmt: skip
def test_chunks_without_text_are_nothing(run: Run, chunk: Any) -> None:
    data = f"data: {json.dumps(chunk)}\n\n".encode() + stream({"content": "yes"})
    with replying(data) as (address, _):
        done = run("chat", "-q", "--server", address, stdin=b"hi\n")
    assert (done.code, done.out, done.err) == (0, "yes\n", "")


def test_a_server_that_is_not_there_is_an_error(run: Run) -> None:
    with answering(lambda *_: None) as address:
        pass
    done = run("chat", "--server", address, stdin=b"hi\n")
    assert done.code == 1
    first, second = done.err.splitlines()
    assert first == f"error: {address} does not answer: Connection refused"
    assert second.startswith("hint: is `vkmoe serve` running there?")


@pytest.mark.parametrize(
    "address",
    ["", "ftp://x", "http://", "http://x:port", "http://x y", "x?y", "http://x/é", "http://a:b@x"],
)
def test_an_address_that_is_none_is_wrong_usage(run: Run, address: str) -> None:
    done = run("chat", "--server", address, stdin=b"hi\n")
    assert done.code == 2 and "--server (VKMOE_SERVER) is" in done.err.splitlines()[0]


def test_a_name_that_no_server_can_have_is_an_error(run: Run) -> None:
    done = run("chat", "--server", "http://a..b", stdin=b"hi\n")
    assert done.code == 1 and done.err.startswith("error: http://a..b does not answer: ")


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(run: Run) -> None:
    done = run("chat", "--server", "127.0.0.1:9", "--api-key", "secret\n", stdin=b"hi\n")
    assert done.code == 2 and "secret" not in done.err


def test_an_ipv6_address_needs_no_port() -> None:
    model = RemoteModel.__new__(RemoteModel)
    for address, wanted in (
        ("http://[::1]", ("::1", 80)),
        ("https://[::1]/v1", ("::1", 443)),
        ("[::1]:8080", ("::1", 8080)),
    ):
        model._split = _checked(address)
        connection = model._connect()
        assert (connection.host, connection.port) == wanted


def test_a_server_that_loads_is_waited_for(run: Run) -> None:
    n_asked = 0

    def handle(to: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        nonlocal n_asked
        n_asked += 1
        if n_asked in (1, 3):
            send(to, {"error": {"message": "Loading model"}}, 503)
        else:
            send(to, LISTED if body is None else stream({"content": "yes"}))

    with answering(handle) as address:
        done = run("chat", "--server", address, stdin=b"hi\n")
    assert (done.code, done.out, n_asked) == (0, "yes\n", 4)
    waiting = f"waiting for {address}: the server refuses: Loading model"
    assert done.err.count(waiting) == 2


def test_a_server_whose_model_is_gone_is_not_waited_for(run: Run) -> None:
    def handle(to: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        send(to, {"error": {"message": "out of memory"}}, 503, Retry_After="30")

    with answering(handle) as address:
        done = run("chat", "--server", address, stdin=b"hi\n")
    assert done.code == 1 and "error: the server refuses: out of memory" in done.err


@pytest.mark.parametrize(
    ("words", "variables", "named"),
    [
        (["--ctx-size", "99"], {}, "--ctx-size"),
        (["m.gguf"], {}, "MODEL"),
        (["-m", "m.gguf"], {}, "--model"),
        (["--no-promote-on-read"], {"VKMOE_PARALLEL": "2"}, "--promote-on-read"),
    ],
)
def test_options_of_a_model_here_are_refused(
    run: Run, fake: type[FakeLLM], words: list[str], variables: dict[str, str], named: str
) -> None:
    done = run("chat", "--server", "127.0.0.1:9", *words, **variables)
    assert done.code == 2 and not fake.calls
    assert done.err.startswith(f"error: --server and {named} contradict each other\n")


def test_what_is_typed_beats_the_variable_that_names_a_server(
    run: Run, fake: type[FakeLLM]
) -> None:
    done = run("chat", "m.gguf", stdin=b"hi\n", VKMOE_SERVER="127.0.0.1:9")
    assert done.code == 0 and fake.calls[0]["model"] == "m.gguf"
    alone = run("chat", "--api-key", "k", stdin=b"hi\n")
    assert alone.code == 2 and "--api-key is for --server" in alone.err


def test_ctrl_c_closes_the_connection_and_keeps_what_was_said() -> None:
    is_closed = threading.Event()
    asked: list[dict[str, Any]] = []

    def handle(to: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        if body is None or asked:
            asked.extend([body] if body else [])
            send(to, stream({"content": "yes"}) if body else LISTED)
            return
        asked.append(body)
        send(to, stream({"content": "on "}, end=""))
        with suppress(OSError):
            while not is_closed.wait(0.01):
                to.wfile.write(b": still at work\n\n")
        is_closed.set()

    with answering(handle) as address:
        process = subprocess.Popen(
            [sys.executable, "-m", "vkmoe", "chat", "--server", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"write\n")
            process.stdin.flush()
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            assert is_closed.wait(30)
            out, err = process.communicate(b"more\n", timeout=60)
    assert (process.returncode, out) == (0, b"n \nyes\n")
    assert err.count(b" [stopped]") == 1 and b"Traceback" not in err
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "on "}
