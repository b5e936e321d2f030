"""What `vkmoe serve` costs beside the model: per token, to the first one, and after many requests.

python -m bench.serve
python -m bench.serve --model MODEL --requests 1000 --record

Server and clients are threads of one process, so that what the clients do counts too. A reply is
streamed by HTTP and by LLM.stream in turns, on the same engine, and must be the same text. Then one
client and two take turns; last, many requests are answered, some of which the client leaves, and
memory, threads and open files are counted before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row, summarise
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.llm import LLM, demo_model_path
from vkmoe.server.app import make_app
from vkmoe.server.engine_thread import EngineThread
from vkmoe.server.service import Service
from vkmoe.server.serving import Server, bind

HOST, PROMPT = "127.0.0.1", "def fib(n):"
CONTEXT = 512
HTTP, PLAIN = "HTTP stream", "LLM.stream"
ONE, TWO = "one client", "two clients"
SHORT = 4  # tokens of the replies to many requests
WARM = 100  # requests before anything is counted
LEAVES = 10  # every so many-th client leaves


class Reply(NamedTuple):
    """Holds the text of a reply, and the seconds to its first token and between the others."""

    text: str
    first: float
    rest: float


class Served:
    """A server in threads of this process, and its clients."""

    def __init__(self, engine: EngineThread, port: int, n_tokens: int) -> None:
        self.engine, self._port, self._n_tokens = engine, port, n_tokens

    def ask(self, n_tokens: int, leaves: bool = False) -> Reply:
        """Stream one reply, of which a client that leaves reads the first token."""
        body = {"prompt": PROMPT, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
        connection = HTTPConnection(HOST, self._port, timeout=600)
        began = time.perf_counter()
        first, texts = 0.0, list[str]()
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        while line := answer.readline():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                texts.append(json.loads(line[6:])["choices"][0]["text"])
                if leaves:
                    break
        ended = time.perf_counter()
        answer.close()
        connection.close()
        return Reply("".join(texts), first - began, (ended - first) / max(n_tokens - 1, 1))

    def stream(self, n_tokens: int) -> Reply:
        """Stream the same reply by the model itself, on the thread that owns it."""

        def run(llm: LLM) -> Reply:
            began, first, texts = time.perf_counter(), 0.0, list[str]()
            for piece in llm.stream(PROMPT, max_tokens=n_tokens, temp=0, ignore_eos=True):
                first = first or time.perf_counter()
                texts.append(piece.text)
            ended = time.perf_counter()
            return Reply("".join(texts), first - began, (ended - first) / max(n_tokens - 1, 1))

        return self.engine.between(run).result()

    def speed(self, n_clients: int) -> float:
        """Return tokens per second of so many clients at once, all together."""
        began = time.perf_counter()
        with ThreadPoolExecutor(n_clients) as threads:
            list(threads.map(self.ask, [self._n_tokens] * n_clients))
        return n_clients * self._n_tokens / (time.perf_counter() - began)


def main() -> None:
    """Serve, measure the three, report."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="default: the demo")
    parser.add_argument("--tokens", type=int, default=128, help="of each reply (default: 128)")
    parser.add_argument("--requests", type=int, default=1000, help="default: 1000")
    options = parser.parse_args()
    if not 2 <= options.tokens <= CONTEXT - 32 or options.repeats < MIN_REPEATS:
        parser.error(f"--tokens: 2 to {CONTEXT - 32}; --repeats: {MIN_REPEATS} or more")
    with _served(options) as served:
        card = describe(served.engine.llm.device_info)
        print_card(card)
        layer, firsts = _layer(served, options)
        arms = {ONE: lambda: served.speed(1), TWO: lambda: served.speed(2)}
        clients = take_turns(arms, options.repeats, "tok/s")
        growth = _growth(served, options.requests)
    rows = [
        *_rows(layer, "per token, "),
        *_rows(firsts, "to the first token, "),
        *_rows(clients),
        *(
            Row(f"{what} after {options.requests} requests", summarise([float(n)]), unit, "count")
            for what, (n, unit) in growth.items()
        ),
    ]
    print(*rows, sep="\n")
    ratios = {
        "per token, HTTP / plain": layer.ratio(HTTP, PLAIN, card),
        "two clients / one": clients.ratio(TWO, ONE, card),
    }
    for name, ratio in ratios.items():
        print(f"{name} = {ratio} (medians, 95 % interval, in turns)")
    found = {"model": options.model.name, "tokens": options.tokens, "rows": rows, "ratios": ratios}
    finish("serve", card, found, options.record)


@contextmanager
def _served(options: argparse.Namespace) -> Iterator[Served]:
    """Serve the model at a free port. Raises VkmoeError where it cannot be loaded."""
    config = EngineConfig(options.device, CONTEXT, parallel=2)
    engine = EngineThread(lambda: LLM(options.model, config), max_queue=64)
    listening = bind(HOST, 0)
    with running(engine, [listening]):
        yield Served(engine, listening.getsockname()[1], options.tokens)


@contextmanager
def running(engine: EngineThread, listening: list[socket.socket]) -> Iterator[None]:
    """Serve at these sockets, with the model loaded. Raises VkmoeError where it cannot be."""
    server = Server(make_app(Service(engine, "bench", SamplingConfig()), HOST), engine)
    thread = threading.Thread(target=server.run, args=(listening,))
    thread.start()
    try:
        while engine.state == "loading":
            time.sleep(0.05)
        if engine.error is not None:
            raise engine.error
        yield
    finally:
        server.should_exit = True
        thread.join()


def _layer(served: Served, options: argparse.Namespace) -> tuple[Arms, Arms]:
    """Stream by HTTP and by the model in turns: milliseconds per token, and to the first one."""
    asks: dict[str, Callable[[int], Reply]] = {HTTP: served.ask, PLAIN: served.stream}
    wanted = [ask(options.tokens).text for ask in asks.values()]
    firsts = Arms("ms")

    def turn(name: str) -> float:
        found = asks[name](options.tokens)
        if [found.text, found.text] != wanted:
            raise VkmoeError(f"{name}: not the text of before", "this is a bug in vkmoe")
        firsts.add(name, 1e3 * found.first)
        return 1e3 * found.rest

    arms = {HTTP: lambda: turn(HTTP), PLAIN: lambda: turn(PLAIN)}
    return take_turns(arms, options.repeats, "ms"), firsts


def _growth(served: Served, n_requests: int) -> dict[str, tuple[int, str]]:
    """Return by how much memory, threads and open files grow over so many requests."""
    _ask_many(served, WARM)
    before = _state()
    _ask_many(served, n_requests)
    after = _state()
    return {
        f"growth of {what}": (after[what][0] - before[what][0], unit)
        for what, (_, unit) in before.items()
    }


def _ask_many(served: Served, n_requests: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda i: served.ask(SHORT, i % LEAVES == 0), range(n_requests)))
    while served.engine.n_running or served.engine.n_waiting:
        time.sleep(0.01)


def _state() -> dict[str, tuple[int, str]]:
    """Count memory, threads and open files of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {
        "memory": (int(values["VmRSS"].split()[0]), "KiB"),
        "threads": (int(values["Threads"]), ""),
        "open files": (len(os.listdir("/proc/self/fd")), ""),
    }


def _rows(arms: Arms, what: str = "") -> Sequence[Row]:
    return [Row(f"{what}{name}", arms.summary(name), arms.unit, "host_wall") for name in arms.names]


if __name__ == "__main__":
    run_main(main)
