"""Each request has one line in the log, which has none of its texts."""

from __future__ import annotations

import logging
import re
import signal
import time

import httpx
import pytest

from tests.server.conftest import Served
from tests.server.test_ending import served, wait

SECRET = "secret words"
COSTS = r": \d+ \+ 12 tokens, the first after \d+\.\d{3} s, \d+\.\d tok/s"


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 12}, f"200 in SECONDS{COSTS}"),
        (
            "/v1/completions",
            {"prompt": SECRET, "max_tokens": 12, "stream": True},
            f"200 in SECONDS{COSTS}",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 12},
            f"200 in SECONDS{COSTS}",
        ),
        ("/v1/completions", {"prompt": SECRET, "n": -1}, "400 in SECONDS"),
        ("/v1/nothing%0Ahere?secret words", {}, "404 in SECONDS"),
    ],
    ids=["whole", "stream", "messages", "refused", "nothing"],
)
def test_a_request_has_one_line(
    server: Served, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, object], line: str
) -> None:
    with caplog.at_level(logging.INFO, "vkmoe"):
        server.post(path, {"ignore_eos": True, **body})
        for _ in range(500):
            found = [text for each in caplog.records if "POST" in (text := each.getMessage())]
            if found:
                break
            time.sleep(0.01)
    wanted = f"POST {path.partition('?')[0]} {line}".replace("SECONDS", r"\d+\.\d{3} s")
    assert len(found) == 1 and re.fullmatch(wanted, found[0]), found
    assert "secret" not in found[0]


def test_a_line_is_short_whatever_is_asked(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vkmoe"):
        server.client.request("A" * 30_000, "/" + "a" * 30_000)
        server.client.get("/health")  # whose line comes later
    assert max(len(each.getMessage()) for each in caplog.records) < 300


@pytest.mark.parametrize("level", ["info", "warning"])
def test_the_level_says_whether_there_are_lines(level: str) -> None:
    with served("--ctx-size", "64", "--log-level", level) as (process, address, lines):
        wait(address)
        assert httpx.get(f"{address}/v1/models", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        found = [line for line in lines if line.startswith("GET /v1/models 200 in ")]
    assert len(found) == (level == "info")
