"""What experts do is seen over HTTP, and changed while a text goes on, which stays what it is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Served, serving

pytestmark = pytest.mark.usefixtures("one_device")

ASKED = {"prompt": "def main():", "max_tokens": 70, "temperature": 0, "ignore_eos": True}
LONG = {**ASKED, "max_tokens": 150}


@pytest.fixture(scope="module")
def cached() -> Iterator[Served]:
    with serving(device="llvmpipe", expert_mode="cache", expert_slots=12) as served:
        served.wait()
        yield served


def events(
    served: Served, seconds: float, during: threading.Thread | None = None
) -> list[tuple[str, Any]]:
    """The events of the stream for some seconds, which begin when `during` has ended."""
    found: list[tuple[str, Any]] = []
    with served.client.stream("GET", "/experts/stream?rate=20") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        ends, name = time.monotonic() + seconds, ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((name, json.loads(line[6:])))
            if during is not None and during.is_alive():
                ends = time.monotonic() + seconds
            if time.monotonic() > ends:
                return found
    return found


@pytest.mark.full
def test_changes_while_a_text_goes_on_leave_it_as_it_is(cached: Served) -> None:
    wanted = cached.post("/v1/completions", LONG).json()["choices"][0]["text"]
    texts: list[str] = []

    def generate() -> None:
        texts.append(cached.post("/v1/completions", LONG).json()["choices"][0]["text"])

    thread = threading.Thread(target=generate)
    thread.start()
    for change in ({"slots": 8}, {"policy": "lru"}, {"pin": [[0, 3], [1, 5]]}, {"slots": 12}):
        answer = cached.client.patch("/experts", json=change)
        assert answer.status_code == 200, answer.text
        time.sleep(0.05)
    thread.join()
    assert texts == [wanted]
    now = cached.client.get("/experts").json()
    assert now["slots"] == [12] * 6 and now["policy"] == "lru" and 3 in now["pinned"][0]
    assert cached.client.patch("/experts", json={"unpin": [[0, 3], [1, 5]]}).status_code == 200


def test_a_stream_tells_every_move(cached: Served) -> None:
    """A snapshot with the deltas over it is what a later snapshot says."""
    thread = threading.Thread(target=cached.post, args=("/v1/completions", ASKED))
    thread.start()
    found = events(cached, 0.5, during=thread)
    thread.join()
    assert found[0][0] == "snapshot" and {name for name, _ in found[1:]} == {"delta"}
    moves = [move for _, delta in found[1:] for move in delta["moves"]]
    assert moves and all(move[2] in "dhfc" and move[3] for move in moves)
    places = [list(row) for row in found[0][1]["places"]]
    for layer, expert, place, _ in moves:
        places[layer][expert] = place
    last = events(cached, 0.3)
    assert ["".join(row) for row in places] == last[0][1]["places"]


def test_why_says_where_the_time_went(cached: Served) -> None:
    cached.post("/v1/completions", ASKED)
    found = cached.client.get("/why").json()
    assert found["n_tokens"] == 64 and found["largest"] in found["parts"]
    assert found["sentence"].endswith(".") and found["ms_per_token"] > 0


@pytest.mark.parametrize(
    "change",
    [{"slots": -1}, {"policy": "fifo"}, {"pin": [[0]]}, {"pin": [[99, 1]]}, {"slots": "x"}],
)
def test_changes_that_cannot_be_are_refused(cached: Served, change: dict[str, Any]) -> None:
    before = cached.client.get("/experts").json()["slots"]
    answer = cached.client.patch("/experts", json=change)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert cached.client.get("/experts").json()["slots"] == before
    assert cached.client.get("/experts/stream?rate=21").status_code == 400


def test_where_nothing_moves_a_change_says_why(server: Served) -> None:
    answer = server.client.patch("/experts", json={"slots": 4})
    assert answer.status_code == 400 and "expert" in answer.json()["error"]["message"]
    assert server.client.get("/experts").json()["mode"]["name"] == "resident"


def test_prometheus_counts_go_on_while_nothing_looks_at_experts(cached: Served) -> None:
    """And what they come to is what /experts shows."""

    def counts() -> dict[str, float]:
        lines = cached.client.get("/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.startswith("vkmoe_expert_")]
        return {name.removeprefix("vkmoe_expert_"): float(value) for name, value in found}

    cached.engine.between(lambda llm: llm.engine.experts.unwatch()).result(60)
    before = counts()
    done = cached.post(
        "/v1/completions", {**ASKED, "prompt": "import json", "max_tokens": 40}
    ).json()["usage"]
    cached.engine.between(lambda llm: None).result(60)  # behind the last run
    after = counts()
    assert cached.engine.llm.engine.experts.watch is None
    n_rows = done["total_tokens"] - done["prompt_tokens_details"]["cached_tokens"] - 1
    news = {name: after[name] - before[name] for name in after}
    assert news["hits_total"] + news["misses_total"] == n_rows * 6 * 4  # layers, experts used
    assert news["hits_total"] > 0 and news["misses_total"] > 0
    assert news['bytes_total{way="read_through"}'] > 0 and news['bytes_total{way="copied"}'] > 0
    shown = cached.client.get("/experts").json()
    total = shown["hits"]["total"]
    assert (total["hits"], total["uses"] - total["hits"]) == (
        after["hits_total"],
        after["misses_total"],
    )
    assert shown["bytes"] == {
        name.split('"')[1]: value for name, value in after.items() if name.startswith("bytes")
    }
