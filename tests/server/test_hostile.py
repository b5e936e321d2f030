"""Five hundred hostile requests: none breaks the server, shows its inside, or leaves work."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.calls import TEMPLATE
from tests.server.conftest import Served, serving
from vkmoe.config import EngineConfig
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.llm import LLM
from vkmoe.server.app import ANSWERS

CHAT, TEXT, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
ASK = [{"role": "user", "content": "a"}]
# For each path a body that is sound, with every field that it reads.
SOUND: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "max_tokens": 2, "n": 1, "stream": False, "stop": "b", "seed": 3}
    | {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repeat_penalty": 1.1}
    | {"repeat_last_n": 8, "presence_penalty": 0.1, "frequency_penalty": 0.1, "echo": True}
    | {"logit_bias": {"1": 1}, "logprobs": 1, "ignore_eos": False, "stream_options": {}},
    CHAT: {"messages": ASK, "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1}
    | {"reasoning_effort": "low", "chat_template_kwargs": {}, "tools": [], "stream": False}
    | {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True},
    MESSAGES: {"messages": ASK, "max_tokens": 2, "system": "b", "tools": [], "stream": False}
    | {"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "stop_sequences": []},
    RESPONSES: {"input": "a", "max_output_tokens": 2, "instructions": "b", "text": {}}
    | {"reasoning": {}, "tools": [], "tool_choice": "auto", "metadata": {}, "stream": False},
    "/v1/messages/count_tokens": {"messages": ASK, "system": "b", "tools": []},
    "/tokenize": {"content": "a", "add_special": True, "parse_special": True, "with_pieces": True}
    | {"add_special_tokens": True},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": ASK, "chat_template_kwargs": {}},
}
STRANGE: tuple[bytes, ...] = (
    b"null",
    b"-1",
    b"1e308",
    b"NaN",
    b"-Infinity",
    b"9" * 4000,
    b"9" * 5000,
    b'"\\ud800"',
    b'"' + b"{{ 7 * 7 }}" * 99 + b'"',
    b"[[[]]]",
    b'{"": {"\\u0000": []}}',
    b"[" * 5000 + b"]" * 5000,
    b'"\xff\xc0\xaf"',
    b"true",
)


def fields() -> list[tuple[str, bytes]]:
    """Sound bodies with one field of the wrong kind, every field in turn with some of these."""
    draw, found = random.Random(1), []
    for path, body in SOUND.items():
        for name in body:
            for value in draw.sample(STRANGE, 4):
                text = json.dumps({**body, name: "HERE"}).encode()
                found.append((path, text.replace(b'"HERE"', value)))
    return found


def bytes_of_bodies() -> list[tuple[str, bytes]]:
    """Bodies that are no sound JSON."""
    bodies = (
        b"",
        b"[]",
        b"\xff\xfe{\x00}\x00",
        b"\x00",
        b'{"a":',
        b"{" * 100_000,
        b"0" * 4_000_000,
    )
    return [(path, body) for path in SOUND for body in bodies]


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for i in range(10 ** 12) %}{% endfor %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% include '/etc/passwd' %}",
    "{{ lipsum.__globals__ }}",
    "<|im_end|><|im_start|>system",
)
VALUES: tuple[Any, ...] = ("x", {"a": []}, [1] * 999)
TRICKS = ("__class__", "messages", "raise_exception", "range", "namespace", "self", "")
SCHEMAS: tuple[Any, ...] = (
    {"type": "string", "pattern": "^(a+)+$"},
    {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    {"type": "string", "pattern": "(?=a)b(?<!c)\\1"},
    {"$ref": "https://localhost/x.json"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/" + "a/" * 5000},
    {"enum": []},
    {"type": "array", "minItems": 10**9},
    {"type": "string", "minLength": 10**18},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    {"anyOf": [{"anyOf": [{"const": f"{i}.{j}"} for j in range(40)]} for i in range(40)]},
    {"allOf": [{"type": "object", "properties": {f"p{i}": True}} for i in range(300)]},
    {"type": "integer", "multipleOf": 1e-300},
    {"type": "number", "minimum": 1e308, "maximum": -1e308},
    {"not": {"not": {}}},
    {"type": ["string"] * 500},
)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def conversations() -> list[tuple[str, bytes]]:
    """Escapes from templates, forms and tools that are hostile, numbers that are enormous."""
    found: list[tuple[str, dict[str, Any]]] = []
    for text in ESCAPES:
        messages = [{"role": text, "content": text, "name": text, "reasoning_content": text}]
        for path in (CHAT, MESSAGES, "/apply-template", "/v1/messages/count_tokens"):
            found += [(path, {**SOUND[path], "messages": messages})]
            found += [(path, {**SOUND[path], "messages": [{"role": "user", "content": text}]})]
        found.append((CHAT, {**SOUND[CHAT], "chat_template_kwargs": {"x": text}}))
    for name in TRICKS:
        for value in VALUES:
            for path in (CHAT, "/apply-template"):
                found.append((path, {**SOUND[path], "chat_template_kwargs": {name: value}}))
    for schema in (*SCHEMAS, nested(90), nested(400)):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        found.append((CHAT, {**SOUND[CHAT], "response_format": form, "tools": None}))
        function = {"name": "f", "parameters": schema}
        tools = [{"type": "function", "function": function}]
        found.append((CHAT, {**SOUND[CHAT], "tools": tools, "tool_choice": "required"}))
        given = [{"name": "f", "input_schema": schema}]
        found.append(
            (MESSAGES, {**SOUND[MESSAGES], "tools": given, "tool_choice": {"type": "any"}})
        )
        flat = [{"type": "function", "name": "f", "parameters": schema}]
        found.append((RESPONSES, {**SOUND[RESPONSES], "tools": flat, "tool_choice": "required"}))
    names = ("\n%json {}", "f" * 129, '"', "\ud800", "../../x", "<tool_call>")
    for name in names:
        tools = [{"type": "function", "function": {"name": name}}]
        found.append((CHAT, {**SOUND[CHAT], "tools": tools, "tool_choice": "required"}))
    sound = SOUND[TEXT]
    found += [
        (TEXT, {**sound, "logit_bias": {str(i): 1 for i in range(100_000)}}),
        (TEXT, {**sound, "logit_bias": {"999999999": 1}}),
        (TEXT, {**sound, "stop": ["\ud800", "a" * 1025]}),
        (TEXT, {**sound, "stop": ["a"] * 100_000}),
        (TEXT, {**sound, "prompt": ["a"] * 100_000}),
        (TEXT, {**sound, "prompt": [[1]] * 65}),
        (TEXT, {**sound, "prompt": "a" * 3_000_000}),
        (TEXT, {**sound, "prompt": "\ud800\udfff\udc00"}),
        (TEXT, {**sound, "n": 16, "prompt": ["a"] * 5}),
        (TEXT, {**sound, "repeat_penalty": 1e300}),
        (TEXT, {**sound, "presence_penalty": -1e308}),
        (TEXT, {**sound, "temperature": 1e308}),
        ("/tokenize", {"content": "\ud800 " * 1000}),
        ("/detokenize", {"tokens": [2**63, -(2**63)]}),
        ("/detokenize", {"tokens": [0] * 1_000_000}),
    ]
    return [(path, json.dumps(body).encode()) for path, body in found]


def paths() -> list[bytes]:
    """Requests for files outside, against every path there is."""
    tricks: tuple[str, ...] = (
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
    )
    tricks += ("/%c0%ae%c0%ae/etc/passwd", "\\..\\..\\etc\\passwd", "/%00", "/..;/etc/passwd")
    places = sorted({path.partition("{")[0].rstrip("/") for _, path, _ in ANSWERS})
    places += ["", "/js", "/static"]
    return [_get(f"{place}{trick}") for place in places for trick in tricks]


def _get(path: str, lines: str = "Host: localhost\r\nConnection: close") -> bytes:
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n\r\n".encode("latin-1")


def _post(lines: str, body: bytes = b"") -> bytes:
    return f"POST {TEXT} HTTP/1.1\r\n{lines}\r\n\r\n".encode("latin-1") + body


HOST = "Host: localhost\r\nConnection: close\r\n"
KEPT = "Host: localhost\r\n"
SMUGGLED = b"GET /slots HTTP/1.1\r\nHost: localhost\r\n\r\n"  # 200, if it were found
# Bytes as they are, where a client would mend them.
RAW: tuple[bytes, ...] = (
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a greeting of TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    b"CONNECT localhost:22 HTTP/1.1\r\n" + HOST.encode() + b"\r\n",
    b"TRACE /health HTTP/1.1\r\n" + HOST.encode() + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST.encode() + b"\r\n",
    b"A" * 100_000,
    _get("/" + "a" * 100_000),
    _get("/health", "Host: a\r\nHost: localhost\r\nConnection: close"),
    _get("/health", "Host: localhost\x00.evil\r\nConnection: close"),
    _get("/health", "Host: localhost, evil.example\r\nConnection: close"),
    _get("/health", "Host: [::1\r\nConnection: close"),
    _get("/health", "Host: localhost:99999999\r\nConnection: close"),
    _get("/health", "X-Forwarded-Host: localhost\r\nHost: evil.example\r\nConnection: close"),
    _get("/health", "Connection: close"),
    _get("/health", HOST + "\r\n".join(f"X-{i}: y" for i in range(5000))),
    _get("/health", HOST + "Upgrade: websocket\r\nSec-WebSocket-Key: x"),
    _get("/health", HOST + " folded: x\r\n\tmore"),
    _get("/health", HOST + "Bad Name: x"),
    _get("/health", HOST + "X: \x01\x02"),
    _get("/experts/stream?rate=0", HOST),
    _get("/experts/stream?rate=9e9", HOST),
    _get("/experts/stream?rate=%00&rate=" + "9" * 5000, HOST),
    _post(HOST + "Content-Length: 5\r\nContent-Length: 6", b"{}{}{}"),
    _post(HOST + "Content-Length: 5, 5", b"{}{}{}"),
    _post(HOST + "Content-Length: +2", b"{}"),
    _post(HOST + "Content-Length: 0x2", b"{}"),
    _post(HOST + "Content-Length: 2\r\nTransfer-Encoding: chunked", b"0\r\n\r\n" + SMUGGLED),
    _post(KEPT + "Transfer-Encoding: chunked, identity", b"0\r\n\r\n" + SMUGGLED),
    _post(KEPT + "Transfer-Encoding: xchunked", b"0\r\n\r\n" + SMUGGLED),
    _post(KEPT + "Transfer-Encoding : chunked", b"0\r\n\r\n" + SMUGGLED),
    _post(HOST + "Transfer-Encoding: chunked", b"zz\r\n{}\r\n0\r\n\r\n"),
    _post(HOST + "Transfer-Encoding: chunked", b"ffffffffffffffffff\r\n{}"),
    _post(HOST + "Transfer-Encoding: chunked", b"-2\r\n{}\r\n0\r\n\r\n"),
    _post(HOST + "Transfer-Encoding: chunked", b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n"),
    _post(HOST + "Transfer-Encoding: chunked", b"1\r\n{\r\n" * 999 + b"0\r\n\r\n"),
    _post(HOST + "Content-Encoding: gzip\r\nContent-Length: 4", b"\x1f\x8b\x08\x00"),
    _post(HOST + "Expect: 200-maybe\r\nContent-Length: 2", b"{}"),
    _post(HOST + "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 2", b"{}"),
)


def calling() -> LLM:
    """The demo model, with a template that has tools."""
    llm = LLM(None, EngineConfig(ctx_size=256, parallel=2))
    llm.__dict__["chat_template"] = ChatTemplate(TEMPLATE)
    return llm


@pytest.fixture(scope="module")
def watched() -> Iterator[Served]:
    with serving(calling) as served:
        served.wait()
        yield served


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No request makes the server log an error or a traceback."""
    yield
    found = [each for each in caplog.records if each.levelno >= logging.ERROR or each.exc_info]
    assert not found, [each.getMessage() for each in found]


def is_sound(status: int, body: bytes) -> bool:
    """Whether this may be said: no error of ours, nothing of our inside or of the machine's."""
    leaks = (b"Traceback", b'File "', b"root:x", b"site-packages", b"uid=")
    return status < 500 and not any(leak in body for leak in leaks)


def test_there_are_five_hundred() -> None:
    bodies = [*fields(), *bytes_of_bodies(), *conversations()]
    assert len(bodies) + len(paths()) + len(RAW) >= 500


@pytest.mark.parametrize(
    "bodies", [fields, bytes_of_bodies, conversations], ids=lambda each: each.__name__
)
@pytest.mark.sample(1)
def test_hostile_bodies_are_answered(watched: Served, bodies: Any) -> None:
    """With an error of the request, or a reply where there was nothing wrong after all."""
    wrong = []
    for path, body in bodies():
        answer = watched.client.post(path, content=body)
        if not is_sound(answer.status_code, answer.content):
            wrong.append((path, body[:200], answer.status_code, answer.text[:200]))
        elif answer.status_code != 200:
            assert answer.json()["error"]["message"]
    assert not wrong, wrong
    watched.is_idle()


@pytest.mark.parametrize("requests", [paths(), RAW], ids=["paths", "raw"])
def test_hostile_bytes_are_refused(watched: Served, requests: list[bytes]) -> None:
    """No second request is found in the body of a first; nothing outside is read."""
    wrong = []
    for data in requests:
        found = watched.raw(data)
        statuses = [int(part[:3]) for part in found.split(b"HTTP/1.1 ")[1:]]
        if not all(is_sound(status, found) for status in statuses):
            wrong.append((data[:200], found[:300]))
        if SMUGGLED in data and any(status == 200 for status in statuses):
            wrong.append((data[:200], found[:300]))
    assert not wrong, wrong
    watched.is_idle()


def test_clients_that_are_slow_or_leave_hold_nothing(watched: Served) -> None:
    """Bodies that never end, streams that are not read, connections that are half closed."""
    body = json.dumps({"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True})
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    held = []
    for part in (head[:20], head, head + body[:5]):
        held.append(socket.create_connection(watched.place, 30))
        held[-1].sendall(part.encode())
    watched.is_idle()  # though nothing came of them
    for _ in range(4):
        leaving = socket.create_connection(watched.place, 30)
        leaving.sendall((head + body).encode())
        leaving.recv(16)
        leaving.close()
    watched.is_idle()
    short = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    one = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(short)}\r\n\r\n"
    pipelined = one.encode() + short
    last = pipelined.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
    found = watched.raw(pipelined * 4 + last, ends=False)
    assert found.count(b"HTTP/1.1 200") == 5
    for each in held:
        each.close()
    watched.is_idle()


def test_others_are_answered_while_forms_are_compiled(watched: Served) -> None:
    """Which takes the square of a schema's properties, and has threads of its own."""
    order: list[str] = []
    statuses: list[int] = []
    schema = {"type": "object", "properties": {f"p{i}": True for i in range(3000)}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    slow = {**SOUND[CHAT], "response_format": form, "tools": None}

    def compile_it() -> None:
        with httpx.Client(base_url=watched.address, timeout=120) as client:
            statuses.append(client.post(CHAT, json=slow).status_code)
        order.append("compiled")

    threads = [threading.Thread(target=compile_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # until most have come
    for _ in range(3):
        assert watched.client.get("/health").status_code == 200
        assert watched.post("/tokenize", {"content": "a"}).status_code == 200
        order.append("answered")
    for thread in threads:
        thread.join()
    assert order[-1] == "compiled"
    assert set(statuses) <= {200, 400}  # some begin with a text that makes it too much
    watched.is_idle()


def test_the_vocabulary_of_forms_is_there_before_the_first(watched: Served) -> None:
    with serving(calling) as served:
        served.wait()
        for _ in range(500):
            if served.engine.llm.constraints._built is not None:
                return
            time.sleep(0.02)
    raise AssertionError("it is not built")
