"""docs/expert-cache.md names every option of the expert cache, every status, and no option that is
not there."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields

import pytest

from tests.docs.documents import ROOT, blocks, command_lines
from tools.make_help import page
from vkmoe.cli import main
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.settings import size_cache, sizing_line
from vkmoe.option_fields import flags_of

OTHERS = (
    "--device",
    "--ctx-size",
    "-c",
    "--cache-type-k",
    "-ctk",
    "--cache-type-v",
    "-ctv",
    "--validation",
    "--tuning",
    "--parallel",
    "-np",
    "--ubatch-size",
    "-ub",
    "--draft",
    "--draft-model",
    "--threads",
    "-t",
    "--cache-ram",
    "-cram",
    "--canary",
    "--no-canary",
)  # not about experts
TEXT = (ROOT / "docs" / "expert-cache.md").read_text()


def expert_flags() -> list[str]:
    found = [
        flag
        for item in fields(EngineConfig)
        for flags in flags_of(item)
        for flag in flags.split("/")
        if flag not in OTHERS
    ]
    assert len(found) > 10, "the options have other names now"
    return found


def commands() -> list[str]:
    return command_lines("".join(blocks(TEXT, "bash")))


@pytest.mark.parametrize("flag", expert_flags())
def test_flag_is_explained(flag: str) -> None:
    assert re.search(rf"{flag}(?![\w-])", TEXT)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))))
def test_flag_exists(flag: str) -> None:
    """Some benchmark's or some command's."""
    bench = "".join(path.read_text() for path in (ROOT / "bench").glob("*.py"))
    assert re.search(rf"`[^`\n]*{flag}(?![\w-])", page()) or f'"{flag}"' in bench


@pytest.mark.parametrize("command", commands())
def test_command_takes_these_options(command: str) -> None:
    _, name, *words = shlex.split(command)
    section = page().split(f"## vkmoe {name}\n")[1].split("\n## ")[0]
    for word in words:
        assert not word.startswith("-") or re.search(rf"[`\s]{word}(?![\w-])", section), word


@pytest.mark.parametrize(
    ("slots", "sizes"), [((8,), (1,)), ((1,), (1,)), ((0,), (1,)), ((1,), (0,)), ((), ())]
)
def test_status_is_explained(slots: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """What the line at the start says of a cache is a row of the table."""
    sizing = size_cache(slots, sizes, n_experts=32, n_used=4, asked="--expert-slots")
    line = sizing_line(sizing)
    verdict = re.split(r" \(|; to change", line.rsplit(": ", 1)[1])[0]
    assert f"\n| {verdict} | " in TEXT, line


def test_the_line_at_the_start_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    slots = ("--expert-slots", "12", "--expert-copies", "wait", "--no-promote-on-read")
    run = ("generate", "-p", "x", "-n", "1", "--device", "vulkan", "--expert-mode", "cache")
    assert main([*run, *slots]) == 0
    assert blocks(TEXT, "text")[0] in capsys.readouterr().err


def test_simulator_and_statistics_are_said_to_agree() -> None:
    """The page has one figure of both; tests/engine/test_simulator_agrees.py shows that it is."""
    rate = re.search(r"^hit rate +([\d.]+) % of", TEXT, re.MULTILINE)
    assert rate and f"with `--slots 12` it says {rate[1]} %" in TEXT
