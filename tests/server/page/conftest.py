"""Debian's Chromium, and pages of it that fail a test when anything goes wrong in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.needs import missing
from tests.server.conftest import Served, serving
from tools.fetch_chromium import chromium

# How long a thing may take that comes at all: busy cores need many seconds.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = chromium()
    if program is None:
        missing("no Chromium: apt-get install chromium, or python -m tools.fetch_chromium")
    with sync_playwright() as playwright:
        # Containers have neither the sandbox's namespaces nor a large /dev/shm.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        opened = playwright.chromium.launch(executable_path=program, args=arguments)
        yield opened
        opened.close()


@contextmanager
def warmed(**options: Any) -> Iterator[Served]:
    """Serve the demo model, after a first reply: new drivers compile kernels during that one."""
    with serving(**options) as served:
        served.wait()
        body = {"messages": [{"role": "user", "content": "def main():"}], "max_tokens": 4}
        assert served.post("/v1/chat/completions", body, timeout=600).status_code == 200
        yield served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with warmed() as served:
        yield served


@contextmanager
def opened(
    browser: Browser, address: str, wait: bool = True, faults: bool = True, **options: Any
) -> Iterator[Page]:
    """A page of its own context; with `faults`, errors and requests to elsewhere fail the test."""
    with browser.new_context(viewport={"width": 1440, "height": 900}, **options) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        found: list[str] = []
        page.on("pageerror", lambda error: found.append(f"error: {error}"))
        # The browser notes each answer that is an error; the page shows those itself.
        noted = "Failed to load resource: the server responded"
        page.on(
            "console",
            lambda m: (
                found.append(m.text)
                if m.type in ("error", "warning") and not m.text.startswith(noted)
                else None
            ),
        )
        page.on(
            "request",
            lambda r: (
                None if r.url.startswith((address, "data:")) else found.append(f"asks {r.url}")
            ),
        )
        page.goto(address)
        if wait:
            page.wait_for_selector("#state[data-state=ready]")
        yield page
        assert not faults or found == []


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with opened(browser, server.address) as found:
        yield found


def scripted(page: Page, *deltas: dict[str, Any], error: str | None = None) -> list[dict[str, Any]]:
    """Have the page's next replies say this; returns the bodies of its requests, as they come."""
    asked: list[dict[str, Any]] = []
    end: list[Any] = [
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"predicted_n": 7}},
        "[DONE]",
    ]
    if error is not None:
        end = [{"error": {"message": error, "type": "server_error", "code": None}}]
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    data = [each if isinstance(each, str) else json.dumps(each) for each in [*chunks, *end]]

    def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "{}"))
        body = "".join(f"data: {each}\n\n" for each in data)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    return asked


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def is_done(page: Page, n_messages: int) -> None:
    """Wait until the last message is a whole reply."""
    page.wait_for_function(
        "n => { const all = document.querySelectorAll('.message');"
        " return all.length === n && all[n - 1].querySelector('.figures') &&"
        " !document.querySelector('.send.stop'); }",
        arg=n_messages,
    )
