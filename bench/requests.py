"""What a request costs `vkmoe serve` besides its reply, and what clients can make others wait.

python -m bench.requests
python -m bench.requests --device cpu --repeats 20 --record

A reply of one token is asked for on a kept connection, on one whose small parts are held back
(Nagle's algorithm, which TCP_NODELAY ends), and of the model itself, in turns. Then the health of
the server is asked for alone and beside as many slow connections as are allowed; last, texts that
cannot fit are refused.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from typing import Any

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.serve import HOST, PROMPT, running
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row, summarise
from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError
from vkmoe.llm import LLM
from vkmoe.server.connections import Limits
from vkmoe.server.engine_thread import EngineThread
from vkmoe.server.serving import bind

KEPT, HELD_BACK, PLAIN = "kept connection", "held back (Nagle)", "engine alone"
ONE_TOKEN = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
CONTEXT = 512
HEALTHS = 50  # requests beside slow connections
REFUSED_MB = 30
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{}"


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection(HOST, port, timeout=600)

    def milliseconds(self, path: str, body: Any = None, status: int = 200) -> float:
        """Return how long an answer took. Raises VkmoeError for another status."""
        data = None if body is None else json.dumps(body)
        began = time.perf_counter()
        self._connection.request("GET" if data is None else "POST", path, data)
        answer = self._connection.getresponse()
        answer.read()
        took = 1e3 * (time.perf_counter() - began)
        if answer.status != status:
            raise VkmoeError(f"{path} answered {answer.status}", "this is a bug in vkmoe")
        return took


def main() -> None:
    """Serve the demo model, measure the three, report."""
    options = command_line(__doc__).parse_args()
    if options.repeats < MIN_REPEATS:
        raise SystemExit(f"--repeats: {MIN_REPEATS} or more")
    config = EngineConfig(options.device, CONTEXT, parallel=1)
    engine = EngineThread(lambda: LLM(None, config), max_queue=64)
    listening, held_back = bind(HOST, 0), _held_back()
    with running(engine, [listening, held_back]):
        card = describe(engine.llm.device_info)
        print_card(card)
        port = listening.getsockname()[1]
        kept = _kept(engine, port, held_back.getsockname()[1], options)
        rows = [
            *(
                Row(f"one token, {name}", kept.summary(name), "ms", "host_wall")
                for name in kept.names
            ),
            *_healths(port),
            *_refused(port, options.repeats),
        ]
    print(*rows, sep="\n")
    ratio = kept.ratio(HELD_BACK, KEPT, card)
    print(f"held back / kept = {ratio} (medians, 95 % interval, in turns)")
    finish("requests", card, {"rows": rows, "ratios": {"held back / kept": ratio}}, options.record)


def _held_back() -> socket.socket:
    """Listen where asyncio does not know that the protocol is TCP: it leaves Nagle's on."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((HOST, 0))
    listening.listen()
    return listening


def _kept(engine: EngineThread, port: int, held_back: int, options: argparse.Namespace) -> Arms:
    """Ask for one token in three ways."""

    def alone() -> float:
        def run(llm: LLM) -> float:
            began = time.perf_counter()
            list(llm.stream(PROMPT, max_tokens=1, temp=0))
            return 1e3 * (time.perf_counter() - began)

        return engine.between(run).result()

    clients = {KEPT: Client(port), HELD_BACK: Client(held_back)}
    arms: dict[str, Callable[[], float]] = {
        name: lambda client=client: client.milliseconds("/v1/completions", ONE_TOKEN)  # type: ignore[misc]
        for name, client in clients.items()
    }
    arms[PLAIN] = alone
    for each in arms.values():
        each()
    return take_turns(arms, options.repeats, "ms")


def _healths(port: int) -> Iterator[Row]:
    """Ask for the health alone, and beside slow connections: a new client each time."""
    limits = Limits.of_process()
    for n_slow in (0, limits.n_of_address):
        with _slow(port, n_slow):
            found = [Client(port).milliseconds("/health") for _ in range(HEALTHS)]
        what = f"/health beside {n_slow} slow connections"
        yield Row(what, summarise(found), "ms", "host_wall")
        yield Row(f"{what}, slowest", summarise([max(found)]), "ms", "host_wall")


@contextmanager
def _slow(port: int, n: int) -> Iterator[None]:
    """Hold connections whose requests never become whole."""
    with ExitStack() as held:
        for i in range(n):
            each = held.enter_context(socket.create_connection((HOST, port)))
            each.sendall(UNFINISHED[: 20 + i % (len(UNFINISHED) - 20)])
        yield


def _refused(port: int, repeats: int) -> Iterator[Row]:
    """Refuse texts that cannot fit."""
    client, text = Client(port), "words of a text. "
    refused = text * (REFUSED_MB * 1_000_000 // len(text))
    bodies = {
        "/v1/completions": {"prompt": refused},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": refused}]},
        "/tokenize": {"content": refused},
    }
    for path, body in bodies.items():
        found = [client.milliseconds(path, body, 400) for _ in range(repeats)]
        yield Row(f"{REFUSED_MB} MB refused by {path}", summarise(found), "ms", "host_wall")


if __name__ == "__main__":
    run_main(main)
