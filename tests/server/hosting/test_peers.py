"""Requests for models of other servers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event
from typing import Any

import httpx
import pytest

from tests.server.conftest import Served, listening, run_async, serving
from tests.server.hosting.test_models import TEXT, ask, hosted
from vkmoe.server.hosting import peers as peers_module
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
    with listening(Models([hosted("near")]), Peers(peers, timeout=60.0)) as served:
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
        described = served.client.get("/v1/models/far").json()
        assert described["id"] == "far" and described["meta"]


def test_a_name_of_none_is_refused_with_all_that_are_there(far: Served) -> None:
    models = Models([hosted("a"), hosted("b")])
    with listening(models, Peers([Peer(far.address, "key")], timeout=5.0)) as served:
        for answer in (ask(served, "c"), served.client.get("/v1/models/c")):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert "'c': there is a, b, far" in error["message"]


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


FAR = {"data": [{"id": "far"}]}


@contextmanager
def dying(kind: str, first: bytes, has: Any = FAR, until: Event | None = None) -> Iterator[str]:
    """A server that has a model, and breaks off in the middle of its answers.

    With `until` it first waits for its client to go, and says so.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = json.dumps(has).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if until and not first:
                self.wait_for_end()
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(first)
            if until:
                self.wait_for_end()
            self.close_connection = True

        def wait_for_end(self) -> None:
            assert until and self.rfile.read(1) == b""
            until.set()
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


@pytest.mark.parametrize("first", [b"", b'data: {"n": 1}\n\n'])
def test_a_peer_learns_that_the_client_left(first: bytes) -> None:
    """Before its answer began, and in the middle of it."""
    gone = Event()
    with dying("text/event-stream", first, until=gone) as address, near(Peer(address)) as served:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {served.place[0]}\r\nContent-Length: 17\r\n"
        with socket.create_connection(served.place, 30) as client:
            client.sendall(f'{head}\r\n{{"model": "far" }}'.encode())
            if first:
                assert client.recv(1)
            else:
                assert not gone.wait(0.3)
        assert gone.wait(10)


@pytest.mark.parametrize(
    "has",
    [
        *({}, [], 7, {"data": 7}, {"data": {"id": "far"}}, {"data": [7, None, {}, {"id": 7}]}),
        {"data": [{"id": "far", "aliases": 7}, {"id": "further", "aliases": [7, "far"]}]},
    ],
)
def test_odd_lists_of_models_harm_nothing(has: Any) -> None:
    with dying("text/event-stream", b"", has) as address:
        peers = Peers([Peer(address)], timeout=5.0)
        found = run_async(peers.models())
        assert {x["id"] for x in found} == ({"far", "further"} if "further" in str(has) else set())
        holder = run_async(peers.holder("far:latest"))
        assert (holder is not None) == bool(found)


def test_a_list_of_models_without_an_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "_MOST_BYTES", 1 << 10)
    with dying("text/event-stream", b"", FAR | {"more": "x" * 2000}) as address:
        assert run_async(Peers([Peer(address)], timeout=5.0).models()) == []
    monkeypatch.setattr(peers_module, "_ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run_async(Peers([Peer(address)], timeout=5.0).models()) == []


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
