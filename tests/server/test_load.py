"""Many clients at once, some of which leave or read slowly: each that stays has the reply that
it would have alone, to the last bit.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import Served, serving

pytestmark = pytest.mark.usefixtures("one_device")

TEXT = "/v1/completions"
N_CLIENTS = 8
N_KINDS = 6  # different requests, each asked often
WAYS = ("whole", "stream", "slow", "leaves")


def asked(kind: int) -> dict[str, Any]:
    """A request that is answered in the same way always: half of them draw, by a seed."""
    temperature = 0.9 if kind % 2 else 0
    body = {"prompt": f"def f{kind}(x):", "max_tokens": 6 + kind, "seed": kind, "logprobs": 2}
    return {**body, "temperature": temperature, "ignore_eos": True}


def found_in(answers: list[dict[str, Any]]) -> tuple[str, list[float]]:
    """The text of a reply, and how likely its tokens were."""
    choices = [choice for answer in answers for choice in answer["choices"]]
    logprobs = [p for each in choices for p in each["logprobs"]["token_logprobs"]]
    return "".join(each["text"] for each in choices), logprobs


def alone(server: Served, kind: int) -> tuple[str, list[float]]:
    return found_in([server.post(TEXT, asked(kind)).json()])


def read_slowly(server: Served, body: dict[str, Any], leaves: bool) -> bytes:
    """Read some bytes of a stream at a time; a client that leaves does after the first."""
    place, data = urlsplit(server.address), json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(60)
        connection.connect((place.hostname, place.port))
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        found = b""
        while part := connection.recv(200):
            found += part
            if leaves:
                break
            time.sleep(0.005)
        return found


def events_of(lines: list[str]) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [json.loads(each) for each in data]


@pytest.mark.parametrize(
    ("max_queue", "n_requests", "device"),
    [(64, 20, None), (1, 4, "vulkan")],
    ids=["all", "some refused"],
)
@pytest.mark.sample(1)
def test_replies_under_load_are_those_alone(
    max_queue: int, n_requests: int, device: str | None
) -> None:
    with serving(ctx_size=128, parallel=4, max_queue=max_queue, device=device) as server:
        server.wait()
        wanted = [alone(server, kind) for kind in range(N_KINDS)]

        def client(index: int) -> list[str]:
            draw, outcomes = random.Random(index), []
            with httpx.Client(base_url=server.address, timeout=120) as http:
                for _ in range(n_requests):
                    kind, way = draw.randrange(N_KINDS), draw.choice(WAYS)
                    outcomes.append(ask(http, kind, way))
            return outcomes

        def ask(http: httpx.Client, kind: int, way: str) -> str:
            body = {**asked(kind), "stream": way != "whole"}
            if way in ("whole", "stream"):
                answer = http.post(TEXT, json=body)
                status, text, waits = (
                    answer.status_code,
                    answer.text,
                    "retry-after" in answer.headers,
                )
            else:
                found = read_slowly(server, body, way == "leaves").decode()
                status, text = int(found.split()[1]), found.partition("\r\n\r\n")[2]
                waits = "Retry-After:" in found
            if status == 503:
                assert waits and max_queue == 1
                return "refused"
            assert status == 200, text
            if way != "leaves":
                got = [json.loads(text)] if way == "whole" else events_of(text.splitlines())
                assert found_in(got) == wanted[kind]
            return way

        with ThreadPoolExecutor(N_CLIENTS) as threads:
            outcomes = Counter(chain.from_iterable(threads.map(client, range(N_CLIENTS))))
        assert outcomes.total() == N_CLIENTS * n_requests
        assert all(outcomes[way] for way in WAYS) and bool(outcomes["refused"]) == (max_queue == 1)
        for _ in range(250):
            if not (server.engine.n_running or server.engine.n_waiting):
                break
            time.sleep(0.02)
        slots = server.client.get("/slots").json()
        assert len(slots) == 4 and not any(slot["is_processing"] for slot in slots)
        assert not server.engine._listeners
        assert [alone(server, kind) for kind in range(N_KINDS)] == wanted
