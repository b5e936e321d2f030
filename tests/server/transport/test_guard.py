"""What does not come from where it may, or makes no sense, is refused; nothing breaks."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.server.conftest import Served, run_async, serving
from vkmoe.server.transport.guard import Guard

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(api_keys=("secret", "other")) as served:
        served.wait()
        yield served


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer, which has the form of all errors."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    error = body["error"]
    if answer.url.path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"} and {"message", "type", "code", "param"} <= set(error)
    assert error["message"]
    assert "Traceback" not in answer.text
    return dict(error)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"X-Api-Key": "other"}, 200),
        ({"X-Api-Key": "secre"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer secretx"}, 401),
    ],
    ids=str,
)
def test_keys_are_asked_for_everywhere_but_for_health(
    locked: Served, headers: dict[str, str], status: int
) -> None:
    assert locked.client.get("/v1/models", headers=headers).status_code == status
    assert locked.client.get("/health", headers=headers).status_code == 200
    if status == 401:
        error = error_of(locked.client.get("/metrics", headers=headers), 401)
        assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("host", "works"),
    [
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("[::1]:80", True),
        ("192.168.1.9:8080", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("evil.example/127.0.0.1", False),
        ("127.0.0.1:port", False),
        ("", False),
    ],
)
def test_a_name_that_is_not_this_server_is_refused(server: Served, host: str, works: bool) -> None:
    """A site may let its name lead here, and its pages would be taken for ours."""
    answer = server.client.get("/v1/models", headers={"Host": host})
    assert answer.status_code == (200 if works else 403)


def test_any_name_will_do_with_a_key(locked: Served) -> None:
    """A client in a container knows this server by a name that it cannot listen at."""
    headers = {"Host": "host.docker.internal:8080"}
    assert locked.client.get("/v1/models", headers=headers).status_code == 403
    headers["Authorization"] = "Bearer secret"
    assert locked.client.get("/v1/models", headers=headers).status_code == 200


def test_pages_of_any_site_may_ask_with_the_key(locked: Served) -> None:
    """Without it they get no answer, and what a browser sends ahead tells them nothing."""
    page = {"Origin": "https://other.example"}
    asks = {**page, "Access-Control-Request-Method": "POST"}
    ahead = locked.client.options(TEXT, headers=asks)
    assert (ahead.status_code, ahead.text) == (200, "")
    assert ahead.headers["access-control-allow-origin"] == page["Origin"]
    assert locked.client.get("/v1/models", headers=page).status_code == 401
    with_key = {**page, "Authorization": "Bearer secret"}
    assert locked.client.get("/v1/models", headers=with_key).status_code == 200


def test_cors_origins_say_whose_pages_may_ask() -> None:
    with serving(settings={"cors_origins": "https://a.example,https://b.example"}) as served:
        served.wait()
        for origin, status in (
            ("https://b.example", 200),
            ("https://c.example", 403),
            ("http://localhost:3000", 403),
            (served.address, 200),
        ):
            answer = served.client.get("/v1/models", headers={"Origin": origin})
            assert answer.status_code == status, origin


@pytest.mark.parametrize(
    ("origin", "works"),
    [
        ("http://localhost:5173", True),
        ("http://127.0.0.1", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("null", False),
        ("http://[", False),
    ],
)
def test_pages_of_other_sites_are_refused(server: Served, origin: str, works: bool) -> None:
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    answer = server.client.post(TEXT, content=body, headers=headers)
    assert answer.status_code == (200 if works else 403)
    assert answer.headers.get("access-control-allow-origin") == (origin if works else None)
    wanted = "content-type,anthropic-version,x-stainless-os"  # as clients of these APIs add
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    ahead = server.client.options(TEXT, headers={**headers, **asks})
    assert ahead.status_code == 200
    assert ahead.headers.get("access-control-allow-origin") == (origin if works else None)
    assert ahead.headers.get("access-control-allow-headers") == wanted


def test_a_prompt_that_does_not_fit_is_refused_before_a_stream_begins(server: Served) -> None:
    for path, body in (
        (TEXT, {"prompt": [1] * 300}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 400}]}),
    ):
        for stream in (False, True):
            error = error_of(server.post(path, {**body, "stream": stream}), 400)
            assert error["type"] == "exceed_context_size_error"
            assert error["n_ctx"] == 256 < error["n_prompt_tokens"]


LONG = "word " * 100_000
SAID = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": LONG}),
        (TEXT, {"prompt": ["a", LONG]}),
        (CHAT, {"messages": SAID}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": SAID}),
        ("/tokenize", {"content": LONG}),
        ("/tokenize", {"prompt": LONG}),
    ],
    ids=map(str, range(8)),
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    server: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes say so: no token has more than the longest one."""
    tokenizer = server.engine.llm.tokenizer
    encoded: list[str] = []
    encode = tokenizer.encode

    def noting(text: str, *more: Any, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, *more, **options)

    monkeypatch.setattr(tokenizer, "encode", noting)
    error = error_of(server.post(path, body), 400)
    assert "at least" in error["message"] and not any(len(text) > 9 for text in encoded)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": "a", "n": 0}, "n"),
        (TEXT, {"prompt": ["a"] * 40, "n": 16}, "n"),
        (TEXT, {"prompt": [""] * 100_000}, "prompt"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        (TEXT, {"prompt": "a", "stream_options": []}, "stream_options"),
        (TEXT, {"prompt": "a", "stop": 5}, "stop"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 70_000}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "any"},
            "tool_choice",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
        *(
            (
                CHAT,
                {
                    "messages": [{"role": "user", "content": "x"}],
                    "chat_template_kwargs": {name: 1},
                },
                "chat_template_kwargs",
            )
            for name in ("messages", "self", "tools")
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_field_is_named(
    server: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    assert error_of(server.post(path, body), 400)["param"] == param


def test_a_wrong_field_is_named_in_anthropics_form(server: Served) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    error = error_of(server.post("/v1/messages", body | {"stop_sequences": ["x"] * 17}), 400)
    assert error["message"].startswith("stop_sequences: ")


def test_what_there_is_not_says_so(server: Served) -> None:
    assert error_of(server.client.get("/v1/nothing"), 404)["type"] == "not_found_error"
    assert error_of(server.client.get("/v1/models/other"), 404)["param"] == "model"
    assert error_of(server.post("/v1/moderations", {}), 501)["type"] == "not_supported_error"
    assert error_of(server.client.get(TEXT), 405)["type"] == "invalid_request_error"


HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "max_tokens": 1e999}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": {"a": "b"}}',
    b'{"prompt": [[]]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [99999999999999999999]}',
    b'{"prompt": [1.5]}',
    b'{"prompt": [true]}',
    b'{"messages": "hello"}',
    b'{"messages": [1, 2]}',
    b'{"messages": [{"role": "user"}], "modalities": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"messages": [{"role": "user", "content": {"type": "text"}}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": [1]}',
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1e999}}',
    b'{"content": 5}',
    b'{"tokens": [-1]}',
    b'{"tokens": [1e30]}',
    b'{"tokens": "ab"}',
]
HOSTILE_TO_REPLIES = [  # a text to be cut into tokens has none of these fields
    b'{"prompt": "a", "stop": [1]}',
    b'{"prompt": "a", "seed": "x"}',
    b'{"prompt": "a", "seed": 99999999999999999999999}',
    b'{"prompt": "a", "logit_bias": {"x": true}}',
    b'{"prompt": "a", "logit_bias": [["x", 1, 2]]}',
    b'{"prompt": "a", "logit_bias": {"4294967296": 1}}',
    b'{"prompt": "a", "logit_bias": {"1": 1000}}',
]


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize", "/apply-template"])
def test_hostile_bodies_are_one_clear_error_each(server: Served, path: str) -> None:
    for body in HOSTILE + (HOSTILE_TO_REPLIES if path != "/tokenize" else []):
        error_of(server.client.post(path, content=body), 400)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Host: localhost\r\nHost: evil.example", b"40"),
        ("Host: localhost\r\nContent-Length: 99999999999999", b"413"),
        ("Host: localhost\r\nContent-Length: -5", b"400"),
        ("Host: localhost\r\nContent-Length: 5\r\nContent-Length: 6", b"400"),
        ("Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz", b"400"),
        ("Host: localhost\r\nX: " + "y" * 200_000, b"4"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_tricks_with_headers_are_refused(server: Served, lines: str, status: bytes) -> None:
    answer = server.raw(f"POST {TEXT} HTTP/1.1\r\n{lines}\r\nConnection: close\r\n\r\n".encode())
    assert answer.split()[1].startswith(status), answer[:300]
    assert server.client.get("/health").status_code == 200


def test_a_body_without_its_length_may_not_be_endless(server: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(33):
            yield b" " * (1 << 20)

    answer = server.client.post(TEXT, content=endless())
    assert error_of(answer, 413)


MANY = 100_000


def test_reading_a_large_body_collects_no_garbage(server: Served) -> None:
    """Python would look through all that was read some hundred times, on the event loop."""

    def collections() -> int:
        return sum(each["collections"] for each in gc.get_stats())

    data = b'{"prompt": [' + b"[1]," * 1_000_000 + b"[1]]}"
    before = collections()
    error_of(server.client.post(TEXT, content=data), 400)
    assert collections() - before < 400


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (TEXT, "prompt", [None] * MANY),
        (TEXT, "prompt", [[None]] * MANY),
        (TEXT, "stop", [None] * MANY),
        (TEXT, "logit_bias", {str(-i): None for i in range(MANY)}),
        (CHAT, "messages", [{}] * MANY),
        (CHAT, "messages", [{"role": "user", "content": [1] * MANY}]),
        ("/v1/responses", "input", [None] * MANY),
        ("/v1/messages", "messages", [{}] * MANY),
        ("/detokenize", "tokens", [None] * MANY),
    ],
    ids=map(str, range(9)),
)
def test_many_wrong_items_cost_no_more_than_one(
    server: Served, path: str, name: str, value: Any
) -> None:
    """A description of each would take a thousand times what the item does in the body."""
    data = json.dumps({"prompt": "a", name: value}).encode()
    tracemalloc.start()
    error_of(server.client.post(path, content=data), 400)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 40 * len(data) + (8 << 20)


def test_bodies_that_are_not_answered_yet_have_a_limit_together() -> None:
    """A client could fill the memory with many requests, each within its own limit."""
    statuses: list[int] = []

    async def request(guard: Guard, n_bytes: int) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": bytes(n_bytes), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        head = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
        await guard(head, receive, send)

    async def together() -> None:
        is_answered = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await is_answered.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        guard = Guard(app, "localhost", (), (), most_body=100, most_bodies=150)
        first = asyncio.create_task(request(guard, 100))
        await asyncio.sleep(0)
        await request(guard, 100)
        is_answered.set()
        await first
        await request(guard, 100)
        await request(guard, 101)

    run_async(together())
    assert statuses == [503, 200, 200, 413]
