"""This module is `vkmoe perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.cli.notes import note, opened
from vkmoe.cli.options import ModelChoice, Output, config_options, read_source
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.interrupts import INTERRUPTED
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.generate.perplexity import Estimate, Windows
    from vkmoe.llm import LLM

OPTIONS = tuple(  # one window after the other, and none of them generates
    item.name
    for item in fields(EngineConfig)
    if item.name not in ("parallel", "draft", "draft_tokens", "draft_model")
)
DEFAULT_WINDOW = 512  # as llama-perplexity has it
NOTE_SECONDS = 5.0  # between two notes of the running value


@dataclass(frozen=True)
class _Text:
    file: str | None = option(
        None, "The text; - is standard input.", "-f", "--file", metavar="FILE"
    )
    stride: int | None = option(
        None,
        "Begin a window this many tokens behind the last, and count as many of each. "
        "Default: windows follow each other, and half of each counts.",
        minimum=1,
    )


@config_options
def perplexity(
    context: typer.Context,
    *,
    which: ModelChoice,
    text: _Text,
    engine: Annotated[EngineConfig, OPTIONS],
    output: Output,
) -> None:
    """Measure how well a model predicts a text: e to the mean of minus the log of each probability.

    As llama.cpp's `llama-perplexity` defines it, so that figures compare: the text is cut into
    windows of --ctx-size tokens (default 512), each read anew with BOS where the model wants one;
    the second half of each counts. A rest that fills no window is left out. The standard error
    is by that of the mean, as if tokens were independent. With --stride S, llama-perplexity
    --ppl-stride S counts the same where its own -c is S/2 less. Ctrl-C prints what is known until
    then, and exits with 130.
    """
    from vkmoe.generate.perplexity import Windows
    from vkmoe.models import open_model

    chosen, path = which.path(context), which.file(context)
    if text.file is None:
        raise UsageError("no text given", "name a file of text: -f FILE")
    words = read_source("file", text.file, "text")
    if engine.ctx_size is not None:
        Windows(engine.ctx_size, text.stride)  # complains before the model is opened
    with open_model(path) as file:
        length = engine.ctx_size
        if length is None:
            length = min(DEFAULT_WINDOW, file.spec.context_length)
        windows, config = (
            Windows(length, text.stride),
            replace(engine, ctx_size=length, draft="none"),
        )
        with opened(chosen, config, output.verbose, output.quiet, file=file) as llm:
            _measure(llm, words, windows, output)


def _measure(llm: LLM, text: str, windows: Windows, output: Output) -> None:
    """Print the perplexity of a text, and on stderr now and then what is known until then."""
    began = last_note = last_end = time.perf_counter()
    estimate: Estimate | None = None
    interrupted = False
    try:
        for estimate in llm.perplexity(text, windows):
            now = time.perf_counter()
            # Of the last one alone: the first ones take longer, while programs are recorded.
            window_seconds, last_end = now - last_end, now
            if not output.quiet and now - last_note >= NOTE_SECONDS:
                last_note = now
                left = (estimate.n_planned - estimate.n_windows) * window_seconds
                done = f"window {estimate.n_windows} of {estimate.n_planned}"
                note(f"{done}: perplexity {_shown(estimate)}, {left:.0f} s left")
    except KeyboardInterrupt:
        interrupted = True
    if estimate is not None:
        seconds = time.perf_counter() - began
        if output.as_json:
            typer.echo(json.dumps(_document(llm, windows, estimate, seconds), indent=2))
        else:
            typer.echo(f"perplexity {_shown(estimate)}")
        if not (output.quiet or output.as_json):
            rate = estimate.n_windows * windows.length / seconds
            note(
                f"{estimate.n_tokens} tokens predicted in {estimate.n_windows} of "
                f"{estimate.n_planned} windows of {windows.length}, {rate:.1f} tok/s"
            )
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _shown(estimate: Estimate) -> str:
    return f"{estimate.perplexity:.4f} +/- {estimate.standard_error:.4f}"


def _document(llm: LLM, windows: Windows, estimate: Estimate, seconds: float) -> dict[str, Any]:
    return {
        "perplexity": estimate.perplexity,
        "standard_error": estimate.standard_error,
        "mean_nll": estimate.mean,
        "n_tokens": estimate.n_tokens,
        "n_windows": estimate.n_windows,
        "n_planned": estimate.n_planned,
        "window": windows.length,
        "stride": windows.stride,
        "seconds": seconds,
        "model": llm.spec.name,
        "device": llm.device_info.name,
    }
