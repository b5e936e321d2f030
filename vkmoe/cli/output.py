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
    """One line on stderr, which never mixes with the text on stdout."""
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
    """Why a model runs on the CPU: no GPU, another choice, or no permission. Empty for a GPU."""
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
def counting(label: str, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Make a function of (done, in all) that draws a bar on stderr where that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (label, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def statistics_lines(llm: LLM, statistics: GenerationStatistics, reason: str) -> list[str]:
    """Times and speeds; memory and what is needed to repeat the run; the expert cache, if any."""
    s = statistics
    reused = f" ({s.n_reused_tokens} reused)" if s.n_reused_tokens else ""
    memory = ", ".join(f"{place} {size / 2**20:.1f} MiB" for place, size in llm.memory.items())
    return [
        f"load {s.load_seconds:.2f} s | first token {s.ttft_seconds:.2f} s | "
        f"prompt {s.n_prompt_tokens} tokens{reused}, {s.prompt_rate:.1f} tok/s | "
        f"reply {s.n_generated_tokens} tokens, {s.decode_rate:.1f} tok/s | ended by {reason}",
        f"memory: {memory} | seed {s.seed}",
        *_expert_lines(llm),
    ]


def _expert_lines(llm: LLM) -> list[str]:
    """What the expert cache and the host pool did since the model was loaded, if there are any."""
    report = llm.expert_statistics
    rate, counters, pool, n_tokens = (
        report.total.hit_rate, report.counters, report.pool, report.n_tokens
    )  # fmt: skip
    lines = []
    if counters is not None and rate is not None and report.setup.experts_in == "cache":
        parts = [f"{100 * rate:.0f} % of uses from device memory"]
        parts.append(f"{_mib(counters.missed_bytes / max(n_tokens, 1), 2)} read through per token")
        parts.append(f"{_mib(counters.upload_bytes)} uploaded")
        if counters.n_landed:
            parts.append(f"{counters.n_landed} kept as they were read")
        if counters.stall_ns:
            parts.append(f"waited {_milliseconds(counters.stall_ns, n_tokens)} per token")
        if (guesses := report.predictions) is not None:
            share = 100 * guesses.n_right / guesses.n_hinted
            parts.append(f"{guesses.n_hinted} guessed, {share:.0f} % of them rightly")
        if report.copies is not None and report.copies.hidden is not None:
            parts.append(f"{100 * report.copies.hidden:.0f} % of the copying hidden")
        lines.append("experts: " + ", ".join(parts))
    if pool is not None:
        hits = f"{100 * pool.n_hits / pool.n_uses:.0f} % of {pool.n_uses} uses, " * (
            pool.n_uses > 0
        )
        parts = [f"{hits}{pool.n_reads} experts read from the file ({_mib(pool.read_bytes)})"]
        parts.append(f"waited {_milliseconds(pool.stall_ns, n_tokens)} per token")
        if pool.n_hinted:
            share = 100 * pool.n_right / pool.n_hinted
            parts.append(f"{pool.n_hinted} guessed, {share:.0f} % of them rightly")
        if pool.hidden is not None:
            parts.append(f"{100 * pool.hidden:.0f} % of the reading hidden")
        lines.append("host pool: " + ", ".join(parts))
    return lines


def _mib(n_bytes: float, digits: int = 1) -> str:
    return f"{n_bytes / 2**20:.{digits}f} MiB"


def _milliseconds(time_ns: int, n_tokens: int) -> str:
    return f"{time_ns / 1e6 / max(n_tokens, 1):.2f} ms"


def json_document(
    llm: LLM, statistics: GenerationStatistics, text: str, token_ids: list[int], reason: str
) -> dict[str, Any]:
    """The result of `vkmoe generate --json`; rates are tokens per second."""
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": reason,
        "model": llm.spec.name,
        "device": llm.device_info.name,
        "ctx_size": llm.plan.ctx_size,
        "memory_bytes": dict(llm.memory),
        "expert_cache": _expert_values(llm),
        "host_pool": _pool_values(llm),
        **_statistics_values(statistics),
    }


def _expert_values(llm: LLM) -> dict[str, Any] | None:
    """The counters of the expert cache since the model was loaded; None without a cache."""
    report = llm.expert_statistics
    if report.counters is None:
        return None
    return {
        "hit_rate": report.total.hit_rate,
        "n_uses": report.total.n_uses,
        "n_hits": report.total.n_hits,
        **dataclasses.asdict(report.counters),
        "predictor": report.setup.predictor,
        "copies": dataclasses.asdict(report.copies) if report.copies else None,
        "predictions": dataclasses.asdict(report.predictions) if report.predictions else None,
    }


def _pool_values(llm: LLM) -> dict[str, Any] | None:
    """The counters of a host pool that is smaller than the model; None without one."""
    pool = llm.expert_statistics.pool
    return None if pool is None else dataclasses.asdict(pool)


def _statistics_values(statistics: GenerationStatistics) -> dict[str, Any]:
    values = dataclasses.asdict(statistics)
    del values["finish_reason"]  # the document has it: an interrupt outside the loop differs
    return {**values, "prompt_rate": statistics.prompt_rate, "decode_rate": statistics.decode_rate}
