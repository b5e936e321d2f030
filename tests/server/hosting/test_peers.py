"""Requests for models of other servers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.server.conftest import Served, listening, serving
from tests.server.hosting.test_models import ask, hosted
from vkmoe.server.hosting.models import Models
from vkmoe.server.hosting.peers import Peers
from vkmoe.server.hosting.roster import Peer


@pytest.fixture(scope="module")
def far() -> Iterator[Served]:
    with serving(api_keys=("key",), settings={"alias": "far"}) as served:
        served.client.headers["Authorization"] = "Bearer key"
        served.wait()
        yield served


@contextmanager
def near(*peers: Peer) -> Iterator[Served]:
    with listening(Models([hosted("near")]), Peers(peers, timeout=5.0)) as served:
        yield served


def test_a_peer_answers_for_what_it_has(far: Served) -> None:
    """Whole and as a stream, with its key; errors are its own."""
    with near(Peer(far.address, "key")) as served:
        names = [each["id"] for each in served.client.get("/v1/models").json()["data"]]
        assert names == ["near", "far"]
        there, here = (ask(server, "far", seed=1) for server in (far, served))
        assert here.json()["choices"] == there.json()["choices"]
        assert here.json()["model"] == "far"
        streams = [ask(server, "far", stream=True).text for server in (far, served)]
        texts = ["".join(_texts(stream)) for stream in streams]
        assert texts[0] == texts[1] and streams[1].rstrip().endswith("data: [DONE]")
        wrong = ask(served, "far", temperature=-1)
        assert wrong.status_code == 400 and "temperature" in wrong.text
        assert served.engine.state == "asleep"
        assert ask(served, "near").json()["model"] == "near"


def _texts(stream: str) -> Iterator[str]:
    for line in stream.splitlines():
        if line.startswith("data: {"):
            yield from (each["text"] for each in json.loads(line[6:])["choices"])


def test_servers_that_name_each_other_do_not_ask_for_ever() -> None:
    first, second = Models([hosted("first")]), Models([hosted("second")])
    peers = [Peers([Peer("http://127.0.0.1:1")], 5.0) for _ in range(2)]
    with listening(first, peers[0]) as one, listening(second, peers[1]) as two:
        peers[0]._peers, peers[1]._peers = [Peer(two.address)], [Peer(one.address)]
        for served in (one, two):
            found = served.client.get("/v1/models").json()["data"]
            assert {each["id"] for each in found} == {"first", "second"}
        assert ask(one, "second").json()["model"] == "second"
        assert ask(one, "third").json()["model"] == "first", "one model answers to any name"


def test_a_peer_that_is_not_there_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        silent = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with near(Peer(silent)) as served:
        assert len(served.client.get("/v1/models").json()["data"]) == 1
        assert ask(served, "far").json()["model"] == "near"


@contextmanager
def dying(kind: str, first: bytes) -> Iterator[str]:
    """A server that has a model, and breaks off in the middle of its answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = json.dumps({"data": [{"id": "far"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(first)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_peer_that_dies_ends_its_answer_with_an_error() -> None:
    """In the form of a stream; without one, the answer does not look whole."""
    said = b'data: {"n": 1}\n\n'
    with dying("text/event-stream", said) as address, near(Peer(address)) as served:
        lines = ask(served, "far", stream=True).text.split("\n\n")
        assert lines[0] == 'data: {"n": 1}'
        assert json.loads(lines[-2].removeprefix("data: ").strip())["error"]["code"] == "peer_gone"
    with dying("application/x-ndjson", b'{"n": 1}\n') as address, near(Peer(address)) as served:
        first, last = ask(served, "far", stream=True).text.split("\n\n")
        assert json.loads(first) == {"n": 1} and "broke off" in json.loads(last)["error"]
    with dying("application/json", b'{"n": 1') as address, near(Peer(address)) as served:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(served, "far")
        assert served.client.get("/health").status_code == 200


def test_a_peer_that_went_away_is_said_to_be_gone() -> None:
    """It had the model a moment ago, so that the request is not for another one."""
    with dying("application/json", b"") as address:
        peers = Peers([Peer(address)], timeout=5.0)
        with listening(Models([hosted("near")]), peers) as served:
            assert len(served.client.get("/v1/models").json()["data"]) == 2
            peers._known = {Peer("http://127.0.0.1:1"): peers._known[Peer(address)]}
            answer = ask(served, "far")
            assert answer.status_code == 503 and "does not answer" in answer.text
            assert "retry-after" in answer.headers
