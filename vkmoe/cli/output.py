"""This module writes what a command says beside its result: lines and bars on stderr, statistics.

It owns the words about a generation, for people and as JSON. Words about options without effect are
in cache_notes.py, words about a model's shape in info.py.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from vkmoe.facts import DeviceInfo
    from vkmoe.llm import LLM, GenerationStatistics

__all__ = ["counting", "cpu_notes", "json_document", "log_as_notes", "note", "statistics_lines"]


def note(text: str) -> None:
    """Write one line to stderr, which never mixes with the text on stdout."""
    sys.stdout.flush()
    typer.echo(text, err=True)


class _Notes(logging.Handler):
    """Shows each message of the log as a note."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        note(kind + " ".join(record.getMessage().split()))


@contextmanager
def log_as_notes(quiet: bool) -> Iterator[None]:
    """Show what vkmoe logs; with `quiet` the errors alone."""
    log = logging.getLogger("vkmoe")
    handler = _Notes(logging.ERROR if quiet else logging.INFO)
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def cpu_notes(chosen: DeviceInfo, devices: list[DeviceInfo]) -> list[str]:
    """Say why a model runs on the CPU: no GPU, another choice, no permission. Empty for a GPU."""
    if not chosen.is_cpu:
        return []
    from vkmoe.gpu.device import blocked_render_nodes

    gpus = [device.name for device in devices if not device.is_cpu]
    lines = [
        f"running on the CPU, not on {', '.join(gpus)}"
        if gpus
        else "no GPU found: running on the CPU"
    ]
    if blocked := blocked_render_nodes():
        lines.append(
            f"no permission to open {', '.join(blocked)}: to use that GPU, join the `render` "
            "group (sudo usermod -aG render $USER) and log in again"
        )
    return lines


@contextmanager
def counting(
    label: str, shown: bool = True, in_bytes: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Make a function of (done, in all) that draws a bar on stderr where that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda done, total: None
        return
    from rich import progress as rich
    from rich.console import Console

    figures = (
        (rich.DownloadColumn(), rich.TransferSpeedColumn())
        if in_bytes
        else (rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    )
    columns = (label, rich.BarColumn(), *figures)
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def statistics_lines(llm: LLM, statistics: GenerationStatistics, reason: str) -> list[str]:
    """Say times and speeds, memory, what repeats the run, and what the expert cache did."""
    from vkmoe.experts.records.report import as_lines

    s = statistics
    reused = f" ({s.n_reused_tokens} reused)" if s.n_reused_tokens else ""
    memory = ", ".join(f"{place} {size / 2**20:.1f} MiB" for place, size in llm.memory.items())
    return [
        f"load {s.load_seconds:.2f} s | first token {s.ttft_seconds:.2f} s | "
        f"prompt {s.n_prompt_tokens} tokens{reused}, {s.prompt_rate:.1f} tok/s | "
        f"reply {s.n_generated_tokens} tokens, {s.decode_rate:.1f} tok/s | ended by {reason}",
        f"memory: {memory} | seed {s.seed}",
        *as_lines(llm.expert_statistics),
    ]


def json_document(
    llm: LLM, statistics: GenerationStatistics, text: str, token_ids: list[int], reason: str
) -> dict[str, Any]:
    """Return the result of `vkmoe generate --json`; rates are tokens per second."""
    from vkmoe.experts.records.report import as_document

    experts = as_document(llm.expert_statistics)
    cache = ("hit_rate", "n_uses", "n_hits", "predictor", "copies", "predictions")
    values = dataclasses.asdict(statistics) | {"finish_reason": reason}  # Ctrl-C may come after it
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": reason,
        "model": llm.spec.name,
        "device": llm.device_info.name,
        "ctx_size": llm.plan.ctx_size,
        "memory_bytes": dict(llm.memory),
        "expert_cache": experts["cache"]
        and {name: experts[name] for name in cache} | experts["cache"],
        "host_pool": experts["host_pool"],
        **values,
        "prompt_rate": statistics.prompt_rate,
        "decode_rate": statistics.decode_rate,
    }
