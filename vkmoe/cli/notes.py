"""This module says on stderr what a user should know of a run, and opens a model with that.

It owns the notes about the machine, about options of the expert cache that do nothing or leave it
nothing to do, and the messages of the Vulkan validation layer. What contradicts itself is an error
of the config.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING

import typer

from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.modes import CpuLayers
from vkmoe.option_fields import flags_of, long_flag

if TYPE_CHECKING:
    from vkmoe.facts import DeviceInfo, MemoryPlan
    from vkmoe.llm import LLM
    from vkmoe.models import ModelFile

_LONG_PROMPT = 1.0  # seconds until a bar says that it is being read


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
def log_as_notes(quiet: bool, least: int = logging.INFO) -> Iterator[None]:
    """Show what vkmoe logs from the level `least` on; with `quiet` the errors alone."""
    log = logging.getLogger("vkmoe")
    handler = _Notes(logging.ERROR if quiet else least)
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


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
        else (rich.MofNCompleteColumn(),)
    )
    columns = (label, rich.BarColumn(), *figures, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def downloading(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show what is logged, and a bar of (bytes done, in all), while a model is downloaded."""
    with (
        log_as_notes(quiet),
        counting("downloading", shown=not quiet, in_bytes=True) as progress,
    ):
        yield progress


@contextmanager
def prompt_progress(shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Make a function of (done, in all) that draws a bar while a prompt takes long to read."""
    began = time.monotonic()
    with ExitStack() as stack:
        draw: Callable[[int, int], None] | None = None

        def progress(done: int, total: int) -> None:
            nonlocal draw
            if done >= total:
                stack.close()  # the reply begins
                return
            if draw is None and time.monotonic() - began > _LONG_PROMPT:
                draw = stack.enter_context(counting("prompt", shown))
            if draw is not None:
                draw(done, total)

        yield progress


# ----- a model, and the notes on its run -----


@contextmanager
def opened(
    model: str | None,
    config: EngineConfig,
    verbose: bool,
    quiet: bool,
    *,
    file: ModelFile | None = None,
    chat_template: str | None = None,
) -> Iterator[LLM]:
    """Load the model. Without `quiet`, stderr tells about progress and a missing GPU.

    `file` is the model's, where it is open already. Raises UsageError where both were asked for,
    VkmoeError at the end of a run under validation that was not silent.
    """
    if verbose and quiet:
        raise UsageError("--verbose and --quiet contradict each other", "give one of them")
    if model is None and not quiet:
        note("no model given: using the built-in demo model, which writes Python")
    with (
        log_as_notes(quiet),
        _load(model if file is None else file, config, quiet, chat_template) as llm,
        _validated(llm, quiet) if config.validation else nullcontext(),
    ):
        for line in () if quiet else notes_at_start(llm, config):
            note(line)
        if verbose:
            device = llm.device_info
            note(f"device {device.index}: {device.name} ({device.type}, {device.driver})")
            for each in llm.plan.lines:
                size = f"{each.n_bytes / 2**20:10.1f} MiB"
                note(f"{size} {each.place}: {each.item} ({each.reason})")
        yield llm


def _load(
    model: str | ModelFile | None, config: EngineConfig, quiet: bool, chat_template: str | None
) -> AbstractContextManager[LLM]:
    from vkmoe.llm import LLM

    with counting("loading", shown=not quiet, in_bytes=True) as progress:
        return LLM(model, config, chat_template=chat_template, progress=progress)


@contextmanager
def _validated(llm: LLM, quiet: bool) -> Iterator[None]:
    """Print the layer's messages when the block ends, also by an error, which stays the error.

    Raises VkmoeError when there were messages and nothing else went wrong.
    """
    try:
        yield
    finally:
        messages = llm.engine.device.validation_messages()
        for message in messages:
            note("validation: " + " ".join(message.split()))
        if not messages and not quiet:
            note("validation: no messages")
    if messages:
        raise VkmoeError(
            f"the validation layer reported {len(messages)} message{'s' * (len(messages) > 1)}",
            "this is a bug in vkmoe or in the driver; report it with the messages above",
        )


def notes_at_start(llm: LLM, config: EngineConfig) -> Iterator[str]:
    """Describe the machine, how many experts are on it unless all are, and idle options."""
    from vkmoe.experts.decide.settings import sizing_line

    yield from cpu_notes(llm.device_info, config.device)
    if config.threads is not None and llm.device_info.is_vulkan and not llm.plan.cpu_layers:
        yield f"--threads has no effect: {llm.device_info.name} runs shaders"
    if config.ctx_size is not None and config.ctx_size > llm.spec.context_length:
        trained = f"{llm.spec.name} was trained for {llm.spec.context_length}"
        yield f"a context of {config.ctx_size} tokens: {trained}, and may write nonsense beyond"
    sizing = llm.plan.sizing
    if llm.plan.cpu_layers or llm.plan.mode_reason:
        yield f"experts: {mode_line(llm.plan)}"
    elif sizing is not None and llm.plan.mode.can_miss:
        yield sizing_line(sizing)
    if line := guess_line(llm.plan):
        yield f"guesses: {line}"
    yield from cache_notes(config, llm.plan, not llm.engine.device.native.has_upload_queue)
    if llm.engine.link is not None and (slow := llm.engine.link.note()):
        yield slow


def mode_line(plan: MemoryPlan) -> str:
    """Say in a line which mode runs, where experts are computed in it, and why."""
    mode, sizing = plan.mode, plan.sizing
    reasons = "; ".join(filter(None, (plan.mode_reason, mode.reason)))
    why = f" ({reasons})" if reasons else ""
    if not plan.cpu_layers and (sizing is None or sizing.status == "empty"):
        return "the model has none"
    parts = [mode.name, mode.words(plan.cpu_layers)]
    if mode.has_slots and sizing is not None:
        share = f"{sizing.slots_text} of {sizing.n_experts}"
        parts.insert(1, f"{share} of each layer on the device")
    if mode.can_miss and not mode.by_cpu:
        in_file = plan.host_slots and not plan.exchanges
        parts.append("the others in host memory" + " and the file" * bool(in_file))
    return ", ".join(filter(None, parts)) + why


def guess_line(plan: MemoryPlan) -> str:
    """Say in a line how many tokens are guessed ahead at a time; empty where none are."""
    if not plan.n_guesses:
        return ""
    tokens = "a token" if plan.n_guesses == 1 else f"{plan.n_guesses} tokens"
    return f"{tokens} ahead (--draft mtp)"


def cpu_notes(chosen: DeviceInfo, wanted: str | None) -> Iterator[str]:
    """Say why a model runs on the CPU, and what keeps a GPU away. Empty for a GPU.

    `wanted` is what --device names. Where that is a CPU, no GPU is missed.
    """
    if not chosen.is_cpu:
        return
    from vkmoe.devices import list_devices, without_cpu, without_vulkan
    from vkmoe.gpu.device import VULKAN, blocked_render_nodes

    asked = (wanted or VULKAN).strip().lower() != VULKAN
    devices = list_devices()
    gpus = [device.name for device in devices if not device.is_cpu]
    if gpus:
        yield f"running on the CPU, not on {', '.join(gpus)}"
    elif not asked:
        yield "no GPU found: running on the CPU"
    if chosen.is_vulkan and not all(device.is_vulkan for device in devices):
        yield f"{chosen.name} runs shaders on the CPU; --device cpu is many times as fast"
    if reason := without_cpu():
        yield reason
    if asked:
        return
    if reason := without_vulkan():
        yield reason
    elif blocked := blocked_render_nodes():
        yield (
            f"no permission to open {', '.join(blocked)}: to use that GPU, join the `render` "
            "group (sudo usermod -aG render $USER) and log in again"
        )


# ----- the expert cache: what was asked, compared with what was planned -----

_OF_EXPERTS = ("expert_cache", "expert_slots", "executor")  # idle only without any experts
_OF_THE_POOL = {"expert_policy", "moe_predict_prefetch"}  # which decide about a small host pool too
_OF_SLOTS = {
    *_OF_THE_POOL, "expert_allocation", "moe_warmpin", "moe_warmpin_after",
    "expert_resident_ids", "miss", "promote_on_read", "expert_copies",
}  # fmt: skip


def cache_notes(config: EngineConfig, plan: MemoryPlan, one_queue: bool = False) -> list[str]:
    """Make lines on a small host pool and what `idle_notes` has; often none.

    `one_queue`: the device cannot copy while it computes.
    """
    lines = idle_notes(config, plan)
    if plan.host_slots:
        (pool,) = (line for line in plan.lines if line.item.startswith("host pool"))
        lines.insert(
            0,
            f"{pool.item}, {pool.n_bytes / 2**20:,.1f} MiB ({pool.reason}); "
            f"the executor is {plan.executor}: {plan.executor_reason}",
        )
    if one_queue and config.expert_copies == "overlap" and plan.mode.has_slots:
        lines.append("--expert-copies overlap: on one queue, copies and tokens still take turns")
    return lines


def idle_notes(config: EngineConfig, plan: MemoryPlan) -> list[str]:
    """Make the lines on options without effect and on residents that leave no slot."""
    return [*plan.notes, *_idle(config, plan), *_full(config, plan)]


def _idle(config: EngineConfig, plan: MemoryPlan) -> Iterator[str]:
    sizing, idle = plan.sizing, _OF_SLOTS
    if isinstance(plan.mode, CpuLayers):
        reason = "the CPU computes experts"
    elif sizing is None or sizing.status == "empty":
        reason, idle = "the model has no experts", {*_OF_SLOTS, *_OF_EXPERTS}
    elif not plan.mode.can_miss:
        reason = f"all {sizing.n_experts} experts of each layer are on the device"
    elif not plan.mode.has_slots:
        reason, idle = "no expert has a slot", idle - (_OF_THE_POOL if plan.host_slots else set())
    else:
        yield from dependent_notes(config)
        return
    yield from _without_effect(reason, config, idle)


def dependent_notes(config: EngineConfig) -> Iterator[str]:
    """Name the options that say more about another one, which is off."""
    if config.moe_warmpin == 0:
        yield from _without_effect("with --moe-warmpin 0", config, ["moe_warmpin_after"])


def _without_effect(reason: str, config: EngineConfig, names: Collection[str]) -> Iterator[str]:
    """Name the options among `names` that differ from their default."""
    flags = [
        long_flag(flags_of(item), getattr(config, item.name))
        for item in fields(config)
        if item.name in names and getattr(config, item.name) != item.default
    ]
    if flags:
        listed = " and ".join([", ".join(flags[:-1]), flags[-1]] if len(flags) > 1 else flags)
        yield f"{reason}: {listed} {'have' if len(flags) > 1 else 'has'} no effect"


def _full(config: EngineConfig, plan: MemoryPlan) -> Iterator[str]:
    """Say that residents take all slots, so that nothing else can be cached."""
    residents = config.residents
    if not plan.mode.has_slots or residents is None:
        return
    smallest = min(plan.expert_slots)
    shared = config.expert_allocation == "global"
    room = sum(plan.expert_slots) / len(plan.expert_slots) if shared else smallest
    if residents.n >= room:
        taken = "the only slot" if smallest == 1 else f"all {smallest} slots"
        yield (
            f"--expert-resident-ids takes {taken} of a layer: no slot is left to follow the text"
        )
