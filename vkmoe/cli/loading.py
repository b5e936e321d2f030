"""This module opens a model for a command, and says on stderr what a user should know of the run.

It owns notes about the machine and the expert cache, and the messages of the Vulkan validation
layer at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from vkmoe.cli.cache_notes import cache_notes
from vkmoe.cli.output import counting, cpu_notes, log_as_notes, note
from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError

if TYPE_CHECKING:
    from vkmoe.llm import LLM
    from vkmoe.models.model_file import ModelFile

__all__ = ["opened"]


@contextmanager
def opened(
    model: str | None,
    config: EngineConfig,
    verbose: bool,
    quiet: bool,
    *,
    file: ModelFile | None = None,
) -> Iterator[LLM]:
    """Load the model. Without `quiet`, stderr tells about progress and a missing GPU.

    `file` is the model's, where it is open already. Raises VkmoeError at the end of a run under
    validation that was not silent.
    """
    if model is None and not quiet:
        note("no model given: using the built-in demo model, which writes Python")
    with (
        log_as_notes(quiet),
        _load(model if file is None else file, config, quiet) as llm,
        _validated(llm, quiet) if config.validation else nullcontext(),
    ):
        if not quiet:
            if llm.device_info.is_cpu:
                _explain_cpu(llm)
            _explain_cache(llm, config)
        if verbose:
            _describe(llm)
        yield llm


def _explain_cpu(llm: LLM) -> None:
    from vkmoe.gpu.device import list_devices

    for line in cpu_notes(llm.device_info, list_devices()):
        note(line)


def _explain_cache(llm: LLM, config: EngineConfig) -> None:
    """Say how many experts are on the device, unless all are, and which options do nothing."""
    from vkmoe.experts.decide.settings import sizing_line

    sizing = llm.plan.sizing
    if sizing is not None and not llm.plan.mode.on_device:
        note(sizing_line(sizing))
    one_queue = not llm.engine.device.native.has_upload_queue
    for line in cache_notes(config, llm.plan, one_queue):
        note(line)
    if llm.engine.link is not None and (slow := llm.engine.link.note()):
        note(slow)


def _load(
    model: str | ModelFile | None, config: EngineConfig, quiet: bool
) -> AbstractContextManager[LLM]:
    from vkmoe.llm import LLM

    with counting("loading", shown=not quiet, in_bytes=True) as progress:
        return LLM(model, config, progress=progress)


def _describe(llm: LLM) -> None:
    device = llm.device_info
    note(f"device {device.index}: {device.name} ({device.type}, {device.driver})")
    for line in llm.plan.lines:
        note(f"{line.n_bytes / 2**20:10.1f} MiB {line.place}: {line.item} ({line.reason})")


@contextmanager
def _validated(llm: LLM, quiet: bool) -> Iterator[None]:
    """Print the layer's messages when the block ends, also by an error, which stays the error.

    Raises VkmoeError when there were messages and nothing else went wrong.
    """
    try:
        yield
    except BaseException:
        _report(llm, quiet)
        raise
    n_messages = _report(llm, quiet)
    if n_messages:
        raise VkmoeError(
            f"the validation layer reported {n_messages} message{'s' if n_messages > 1 else ''}",
            "this is a bug in vkmoe or in the driver; report it with the messages above",
        )


def _report(llm: LLM, quiet: bool) -> int:
    messages = llm.engine.device.validation_messages()
    for message in messages:
        note("validation: " + " ".join(message.split()))
    if not messages and not quiet:
        note("validation: no messages")
    return len(messages)
