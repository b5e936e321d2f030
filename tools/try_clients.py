"""Run libraries that others wrote against `vkmoe serve`, and print what works as a table.

    python -m tools.try_clients                       # all of them, in their newest versions
    python -m tools.try_clients --only openai,ai_sdk --folder /tmp/clients

The libraries are installed by pip and npm into a folder, which `--folder` keeps for the next time.
The server has the demo model, on the CPU. What each library is asked is in tools/clients. A cell
that fails gives its reason on stderr, and the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ("chat", "stream", "tools", "structured")
NO_DOWNLOADS = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
SERVER_SECONDS, CLIENT_SECONDS = 60, 300


class Client(NamedTuple):
    """Names a library: the packages that it needs, of which the first gives the row its version."""

    title: str
    packages: tuple[str, ...]


IN_PYTHON = {
    "openai": Client("openai", ("openai",)),
    "anthropic": Client("anthropic", ("anthropic",)),
    "ollama": Client("ollama", ("ollama",)),
    "litellm": Client("LiteLLM", ("litellm",)),
    "langchain": Client(
        "LangChain", ("langchain", "langchain-openai", "langchain-anthropic", "langchain-ollama")
    ),
    "instructor": Client("Instructor", ("instructor", "anthropic")),
    "pydantic_ai": Client("Pydantic AI", ("pydantic-ai-slim[openai]",)),
    "lm_eval": Client("lm-eval", ("lm-eval[api]", "httpx", "pydantic")),
}
IN_NODE = {
    "ai_sdk": Client(
        "AI SDK",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    )
}


class Row(NamedTuple):
    """Holds what one library did: for each check why it failed, or "" if it passed."""

    title: str
    version: str
    found: Mapping[str, str]


def run_python(folder: Path, name: str, client: Client, address: str) -> Row:
    """Install a library with pip, where no other one holds its version back; run its checks."""
    home = folder / name
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "-q", *client.packages])
    package = client.packages[0].partition("[")[0]
    shown = _run([*pip, "show", package])
    version = next(x for x in shown.splitlines() if x.startswith("Version: ")).split()[1]
    words = [str(python), "-m", "tools.clients", f"{name}_package", address]
    return Row(client.title, version, _report(words, ROOT, folder))


def run_node(folder: Path, name: str, client: Client, address: str) -> Row:
    """Install a library with npm, and run its checks."""
    home = folder / name
    home.mkdir(exist_ok=True)
    _run(["npm", "install", "--silent", "--prefix", str(home), *client.packages])
    about = home / "node_modules" / client.packages[0] / "package.json"
    script = home / f"{name}.mjs"  # beside its packages
    shutil.copy(ROOT / "tools" / "clients" / script.name, script)
    found = _report(["node", str(script), address], home, folder)
    return Row(client.title, json.loads(about.read_text())["version"], found)


def _run(words: Sequence[str]) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def _report(words: Sequence[str], where: Path, folder: Path) -> dict[str, str]:
    """Run a program of tools/clients, and read the last line that it prints."""
    environment = {**os.environ, **NO_DOWNLOADS, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        words, cwd=where, env=environment, capture_output=True, text=True, timeout=CLIENT_SECONDS
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(done.stderr.strip()[-2000:] or "it printed nothing")
    found: dict[str, str] = json.loads(lines[-1])
    if any(found.values()):
        sys.stderr.write(done.stderr)
    return found


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """Serve the demo model at a free port; yield the address when the model is there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    template = ROOT / "tools" / "clients" / "template.jinja"
    words = [sys.executable, "-m", "vkmoe", "serve", "--port", str(port), "--device", "cpu"]
    words += ["--ctx-size", "8192", "--parallel", "2", "--chat-template-file", str(template)]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as file, subprocess.Popen(words, cwd=ROOT, stderr=file) as server:
        try:
            _wait(f"{address}/health", server)
            yield address
        finally:
            server.terminate()


def _wait(address: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers. Raises RuntimeError where it ends, or takes too long."""
    end = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urlopen(address):
                return
        except URLError:  # not yet there, or without its model
            time.sleep(0.1)
    raise RuntimeError("the server does not start")


def row_of(folder: Path, name: str, address: str) -> Row:
    """Try one library; where it cannot even be tried, that is why its chat failed."""
    run, client = (run_node, IN_NODE[name]) if name in IN_NODE else (run_python, IN_PYTHON[name])
    try:
        return run(folder, name, client, address)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return Row(client.title, "?", {"chat": str(error)})


def table(rows: Sequence[Row]) -> str:
    """Write rows as a table for docs/server.md."""
    lines = [f"| client | version | {' | '.join(CHECKS)} |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row.found.get(check) for check in CHECKS)
        words = ("—" if cell is None else "FAILED" if cell else "yes" for cell in cells)
        lines.append(f"| {row.title} | {row.version} | {' | '.join(words)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default=",".join((*IN_PYTHON, *IN_NODE)))
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := {*names} - {*IN_PYTHON, *IN_NODE}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with serving(folder / "server.log") as address:
            rows = [row_of(folder, name, address) for name in names]
    print(f"Tried on {date.today()}:\n\n{table(rows)}")
    failed = [(row.title, *each) for row in rows for each in row.found.items() if each[1]]
    for title, check, reason in failed:
        print(f"{title}, {check}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
