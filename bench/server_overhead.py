"""What the server costs beside the engine: time of a short request, CPU time of a streamed token.

python -m bench.server_overhead --device cpu --record

`vkmoe serve` runs in a process of its own, and one client asks it over one connection. First, in
turns, each API for one token: what is said is the time from sending the request to the last byte of
its answer, less the engine's own. That is what the server's counts say of prompts and replies: from
the moment the engine's thread gives the request a place until its last token is chosen. The client
takes part of the rest, and so does waking threads.

Then each streaming API for --tokens tokens, in turns with the same reply at once. Said is the CPU
time per token of the thread that speaks HTTP, which is all that the server does beside the engine,
and how much more that is than for the reply at once. Texts of both must be equal.

The demo model is served, and then a synthetic one whose kernels do next to nothing: kernels of a
CPU device run on the server's own cores, those of a GPU do not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import command_line, finish, run_main
from bench.host_time import SMALLEST
from bench.models import custom_model, default_cache, shape_of
from vkmoe.bench.clock import WrongResultError
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row, Summary, percentile, summarise
from vkmoe.devices import choose_device, list_devices
from vkmoe.errors import VkmoeError
from vkmoe.llm import demo_model_path

_LOAD_S = 120.0  # until the model must be there
_TEXT = "def fibonacci(n):"
_ENGINE_SECONDS = ("llamacpp:prompt_seconds_total", "llamacpp:tokens_predicted_seconds_total")
_AIM_MS, _AIM_TOKEN_MS = 5.0, 0.2
_N_LAYERS, _CONTEXT = 2, 4096  # of the model whose kernels do next to nothing
_N_WARM = 5  # turns before requests are timed
_SETTLE_S = 0.01  # until what follows the last byte of an answer is done


class Api(NamedTuple):
    """A way to ask for a reply: its path, and its own names of what all have."""

    path: str
    length: str  # of a reply, in tokens
    is_chat: bool = True

    def body(self, n_tokens: int, streams: bool) -> bytes:
        """Return a request for so many tokens, always the same ones."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": _TEXT}]}
        if not self.is_chat:
            asked = {"prompt": _TEXT}
        asked |= {self.length: n_tokens, "stream": streams, "temperature": 0, "ignore_eos": True}
        return json.dumps(asked).encode()


APIS = (
    Api("/v1/chat/completions", "max_tokens"),
    Api("/completion", "n_predict", is_chat=False),
    Api("/v1/messages", "max_tokens"),
)


def main() -> None:
    """Start the server, measure, report."""
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS - 1)
    parser.add_argument("--model", type=Path, help="a GGUF file, in place of both models")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--requests", type=int, default=200, help="for one token, of each API")
    parser.add_argument("--tokens", type=int, default=300, help="of a streamed reply")
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    given = {options.model.stem: options.model} if options.model else _models(options.cache)
    results: dict[str, Any] = {"requests": options.requests, "tokens": options.tokens, "models": {}}
    for name, model in given.items():
        words = ["--device", options.device, "--ctx-size", str(options.tokens + 256)]
        with Served([*words, str(model)]) as served:
            rests = measure_requests(served, options.requests)
            costs = measure_streams(served, options.tokens, options.repeats)
        results["models"][name] = report(name, rests, costs)
    finish("server_overhead", card, results, options.record)


def _models(cache: Path) -> dict[str, Path]:
    shape = shape_of("tiny", n_layers=_N_LAYERS, **{**SMALLEST, "context": _CONTEXT})
    smallest = custom_model(f"smallest-{_N_LAYERS}-{_CONTEXT}", shape, "q8_0", cache)
    return {"demo": demo_model_path(), "smallest": smallest}


def report(
    name: str, rests: dict[str, list[float]], costs: dict[str, StreamCost]
) -> dict[str, Any]:
    """Print the rows of a model, and return them with whether the aims are met."""
    rows = [*request_rows(rests), *stream_rows(costs)]
    print(f"{name}:")
    for row in rows:
        print(row)
    request = max(summarise(found).median for found in rests.values())
    token = max(summarise(cost.streamed).median for cost in costs.values())
    met = {"request": request <= _AIM_MS, "token": token <= _AIM_TOKEN_MS}
    print(f"aims: {_AIM_MS:g} ms of a request, {_AIM_TOKEN_MS:g} ms of a token: met {met}\n")
    return {"rows": rows, "met": met}


class Served:
    """Runs `vkmoe serve` in a process of its own, and asks it over one connection."""

    def __init__(self, words: list[str]) -> None:
        """Start it; a block of `with` waits for the model. Raises VkmoeError where that fails."""
        command = [sys.executable, "-m", "vkmoe", "serve", "--port", "0", *words]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self._log = self._process.stderr
        first = self._log.readline()
        found = re.search(r"listening at http://([^:/]+):(\d+)", first)
        if found is None:
            self._process.kill()
            self._process.communicate()
            raise VkmoeError(f"the server does not start: {first.strip()}", "see vkmoe serve")
        self._reader = threading.Thread(target=self._log.read)  # else the pipe is full some time
        self._reader.start()
        self._connection = HTTPConnection(found[1], int(found[2]), timeout=_LOAD_S)

    def __enter__(self) -> Served:
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        ends = time.monotonic() + _LOAD_S
        while self._asked("GET", "/health")[0] != 200:
            if time.monotonic() > ends:
                raise VkmoeError("the model is not loaded in time", "take a smaller one")
            time.sleep(0.05)

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        self._log.close()

    def _asked(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException) as error:
            raise VkmoeError(f"the server is gone: {error}", "see vkmoe serve") from error

    def ask(self, path: str, body: bytes) -> bytes:
        """Return what an API answers. Raises WrongResultError for an error."""
        status, answer = self._asked("POST", path, body)
        if status != 200:
            raise WrongResultError(f"{path} answers {status}: {answer[:200]!r}")
        return answer

    def engine_seconds(self) -> float:
        """Return the seconds that prompts and replies have taken since the server began."""
        text = self._asked("GET", "/metrics")[1].decode()
        counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        return sum(float(counts[name]) for name in _ENGINE_SECONDS)

    def cpu_seconds(self) -> float:
        """Return the CPU time that Linux counts for the thread that speaks HTTP, the first one."""
        pid = self._process.pid
        schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
        return int(schedstat.split()[0]) * 1e-9


def measure_requests(served: Served, n: int) -> dict[str, list[float]]:
    """Return what each API takes beside the engine for one token, in milliseconds, in turns."""
    ways = [(api, False) for api in APIS] + [(APIS[0], True)]
    rests: dict[str, list[float]] = {}
    for turn in range(n + _N_WARM):
        for api, streams in ways:
            body, before = api.body(1, streams), served.engine_seconds()
            began = time.perf_counter()
            served.ask(api.path, body)
            seconds = time.perf_counter() - began
            rest = seconds - (served.engine_seconds() - before)
            if turn >= _N_WARM:
                rests.setdefault(f"{api.path}{', streamed' * streams}", []).append(1e3 * rest)
    return rests


class StreamCost(NamedTuple):
    """What a token costs the thread that speaks HTTP, in milliseconds of CPU, once per repeat."""

    streamed: list[float]
    more: list[float]  # than a token of the reply at once


def measure_streams(served: Served, n_tokens: int, repeats: int) -> dict[str, StreamCost]:
    """Return what streaming costs with each API, in turns with the same reply at once."""
    costs = {api.path: StreamCost([], []) for api in APIS}
    for turn in range(repeats + 1):
        for api in APIS:
            spent: dict[bool, float] = {}
            found: dict[bool, str] = {}
            for streams in (True, False):
                before = served.cpu_seconds()
                answer = served.ask(api.path, api.body(n_tokens, streams))
                time.sleep(_SETTLE_S)
                spent[streams] = 1e3 * (served.cpu_seconds() - before) / n_tokens
                found[streams] = text_of(answer)
            if not found[True] or found[True] != found[False]:
                raise WrongResultError(f"{api.path} streams another text than it has at once")
            if turn:  # the first one is not counted
                costs[api.path].streamed.append(spent[True])
                costs[api.path].more.append(spent[True] - spent[False])
    return costs


def text_of(answer: bytes) -> str:
    """Return the text of an answer in any of the APIs, whole or as events."""
    lines = answer.decode().splitlines()
    if answer[:1] != b"{":
        lines = [line[6:] for line in lines if line.startswith("data: {")]
    return "".join(text for line in lines for text in _texts(json.loads(line)))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts that any of the APIs has in a part of an answer."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, str):
            yield from (each,) if key in ("content", "text") else ()
        elif isinstance(each, dict | list):
            yield from _texts(each)


def request_rows(rests: dict[str, list[float]]) -> Iterator[Row]:
    """Sum up the milliseconds of each way beside the engine."""
    for name, found in rests.items():
        p95 = percentile(found, 95)
        what = f"{name}: a request for one token, beside the engine"
        yield Row(what, summarise(found), "ms", "host_wall")
        yield Row(f"{what}, 95th percentile", Summary(p95, p95, p95, len(found)), "ms", "host_wall")


def stream_rows(costs: dict[str, StreamCost]) -> Iterator[Row]:
    """Sum up what a token of a stream costs with each API."""
    for name, cost in costs.items():
        what = f"{name}: CPU time per streamed token"
        yield Row(what, summarise(cost.streamed), "ms", "thread_time")
        yield Row(f"{what}, more than at once", summarise(cost.more), "ms", "thread_time")


if __name__ == "__main__":
    run_main(main)
