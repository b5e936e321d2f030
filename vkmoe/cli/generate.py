"""This module is `vkmoe generate`: one prompt in, text out."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.cli.loading import opened
from vkmoe.cli.options import (
    IgnoreEos,
    Json,
    MaxTokens,
    Model,
    Quiet,
    Stop,
    Verbose,
    check_output,
    config_options,
    option,
)
from vkmoe.cli.output import json_document, note, statistics_lines
from vkmoe.cli.prompt import chosen_model, prompt_source, read_prompt, split_words
from vkmoe.config import EngineConfig, SamplingConfig

if TYPE_CHECKING:
    from vkmoe.llm import LLM

__all__ = ["INTERRUPTED", "generate", "reply_limits", "write_reply"]

INTERRUPTED = 130


@config_options
def generate(
    context: typer.Context,
    *,
    words: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] [-]", hidden=True)] = None,
    model: Model = None,
    prompt: Annotated[str | None, option("-p", "--prompt", help="The prompt.")] = None,
    file: Annotated[
        str | None, option("-f", "--file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    sampling: SamplingConfig,
    engine: EngineConfig,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Let a model continue a prompt: -p TEXT, -f FILE, or - for standard input.

    Without MODEL the built-in demo model is used, which writes Python. The text goes to stdout,
    statistics to stderr. Ctrl-C ends the text early, prints the statistics and exits with 130.
    """
    check_output(verbose, quiet)
    positional, stdin = split_words(words or [])
    chosen = chosen_model(context, positional, model)
    text = read_prompt(prompt_source(context, prompt, file, stdin))
    limits = reply_limits(max_tokens, stop, ignore_eos)
    with opened(chosen, engine, verbose, quiet) as llm:
        reason = write_reply(llm, text, sampling, limits, as_json, quiet)
    if reason == "interrupt":
        raise typer.Exit(INTERRUPTED)


def reply_limits(max_tokens: int, stop: list[str] | None, ignore_eos: bool) -> dict[str, Any]:
    """Return what ends a reply, in the form that `LLM.stream` takes."""
    return {
        "max_tokens": None if max_tokens < 0 else max_tokens,
        "stop": stop or [],
        "ignore_eos": ignore_eos,
    }


def write_reply(
    llm: LLM,
    prompt: str,
    sampling: SamplingConfig,
    limits: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> str:
    """Stream the reply, then the statistics; returns why it ended."""
    texts: list[str] = []
    token_ids: list[int] = []
    interrupted = False
    try:
        for piece in llm.stream(prompt, sampling, **limits):
            texts.append(piece.text)
            if piece.token_id >= 0:
                token_ids.append(piece.token_id)
            if not as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if not as_json and texts:
            typer.echo()  # also before an error message
    statistics = llm.last_statistics
    reason = "interrupt" if interrupted or statistics is None else statistics.finish_reason
    if statistics is not None and as_json:
        document = json_document(llm, statistics, "".join(texts), token_ids, reason)
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
    if statistics is not None and not quiet:
        for line in statistics_lines(llm, statistics, reason):
            note(line)
    return reason
