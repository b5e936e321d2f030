#!/usr/bin/env python3
"""Takes the pictures of the page that README shows: docs/page-light.png and docs/page-dark.png.

What they show is real: the demo model writes, on a software GPU with room for a part of its
experts. Needs Chromium (apt-get install chromium, or python -m tools.fetch_chromium).
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tools.fetch_chromium import chromium

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("Once upon a time", "The little dog")
SETTINGS = {"temperature": 0.7, "seed": 4, "max_tokens": 160}


@contextmanager
def served(model: str | None, slots: int, device: str) -> Iterator[str]:
    """Run `vkmoe serve` until its model is there, and give its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [str(ROOT / ".venv" / "bin" / "vkmoe"), "serve", *([model] if model else [])]
    options = ["--port", str(port), "--expert-slots", str(slots), "--device", device]
    server = subprocess.Popen([*program, *options, "--ctx-size", "1024"])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        else:
            sys.exit("make_pictures: the model is never there")
        yield address
    finally:
        server.terminate()
        server.wait(60)


def picture(browser: Browser, address: str, theme: str, file: Path) -> None:
    """Let the model write, and take the picture while it does."""
    context = browser.new_context(
        viewport={"width": 1440, "height": 900}, color_scheme="dark" if theme == "dark" else "light"
    )
    page = context.new_page()
    page.goto(address)
    text = json.dumps(SETTINGS)
    page.evaluate("text => localStorage.setItem('vkmoe.settings', text)", text)
    page.reload()
    page.wait_for_selector("#state[data-state=ready]")
    for n, prompt in enumerate(PROMPTS, start=1):
        page.get_by_label("Message", exact=True).fill(prompt)
        page.keyboard.press("Enter")
        if n < len(PROMPTS):
            page.wait_for_selector(".assistant .figures")
    page.wait_for_function(
        "() => { const all = document.querySelectorAll('.assistant .body');"
        " return all[all.length - 1].innerText.length > 200; }"
    )
    page.screenshot(path=file)
    context.close()


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; without: the demo model")
    parser.add_argument("--slots", type=int, default=12, help="expert slots of a layer")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--into", type=Path, default=ROOT / "docs", help="folder of the pictures")
    given = parser.parse_args()
    with served(given.model, given.slots, given.device) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for theme in ("light", "dark"):
            picture(browser, address, theme, given.into / f"page-{theme}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
