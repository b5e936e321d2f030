"""What runs where the Vulkan loader cannot be loaded, and what is said to who asks for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.samples import sampled
from tests.server.test_ending import served, wait

NOT_INSTALLED = (
    "error: the Vulkan loader (libvulkan.so.1) is not installed\n"
    "hint: install libvulkan1 (Debian, Ubuntu) or vulkan-loader (Fedora, Arch)\n"
)


@pytest.fixture(autouse=True)
def no_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes find an empty file where libvulkan is, which the system refuses to load."""
    (tmp_path / "libvulkan.so.1").touch()
    folders = [str(tmp_path), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(folders))
    monkeypatch.delenv("VKMOE_DEVICE", raising=False)


def vkmoe(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vkmoe", *words], capture_output=True, text=True)


@pytest.mark.usefixtures("cpu_native")
@pytest.mark.parametrize(
    "command",
    [
        ("devices",),
        ("--version",),
        ("plan",),
        ("info",),
        ("tune",),
        ("generate", "-p", "x", "-n", "4"),
        ("generate", "-p", "x", "-n", "4", "--device", "cpu"),
        ("selftest", "--device", "cpu", "--only", "embed.q8_0"),
        ("bench", "decode", "--device", "cpu", "--quick"),
    ],
    ids=" ".join,
)
@pytest.mark.sample(3)
def test_the_cpu_needs_no_vulkan(command: tuple[str, ...]) -> None:
    done = vkmoe(*command)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr


@pytest.mark.usefixtures("cpu_native")
def test_the_cpu_serves_without_vulkan() -> None:
    with served("--device", "cpu") as (_, address, _):
        wait(address)
        asked = {"prompt": "import ", "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(f"{address}/v1/completions", json=asked, timeout=60)
    assert reply.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("command", ["plan", "selftest", "bench transfer", "devices"])
@pytest.mark.parametrize("device", sampled(["vulkan", "nvidia"], "nvidia".__eq__))
def test_a_gpu_that_is_asked_for_needs_it(command: str, device: str) -> None:
    done = vkmoe(*command.split(), "--device", device)
    assert (done.returncode, done.stderr) == (1, NOT_INSTALLED)


@pytest.mark.usefixtures("cpu_native")
def test_who_misses_a_gpu_learns_why() -> None:
    said = vkmoe("devices").stderr
    assert said.startswith("no GPU found: running on the CPU\nthe Vulkan loader (libvulkan.so.1)")
