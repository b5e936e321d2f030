"""`vkmoe generate`: one prompt in, text out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from vkmoe.cli.loading import note, opened
from vkmoe.cli.options import (
    Function,
    Lines,
    check_output,
    config_options,
    engine_config,
    option,
    output_options,
    sampling_config,
)
from vkmoe.cli.prompt import chosen_model, prompt_source, read_prompt, split_words
from vkmoe.cli.statistics import json_document, statistics_lines
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UsageError

if TYPE_CHECKING:
    from vkmoe.llm import LLM

__all__ = ["generate", "reply_options"]

INTERRUPTED = 130


def reply_options(max_tokens: int) -> Callable[[Function], Function]:
    """Decorate a command with what ends a reply; `max_tokens` is the default of -n."""

    def decorate(function: Function) -> Function:
        for add in (
            option("--ignore-eos", is_flag=True, help="Never choose the tokens that end a reply."),
            option(
                "--stop",
                multiple=True,
                type=Lines(),
                help="End the reply before this text; repeatable (in the variable: one per line).",
            ),
            option(
                "-n",
                "--max-tokens",
                type=click.IntRange(min=-1),
                default=max_tokens,
                show_default=True,
                help="Most tokens of a reply; -1: until the context is full.",
            ),
        ):
            function = add(function)
        return function

    return decorate


@click.command(short_help="Continue a prompt.")
@click.argument("words", nargs=-1, metavar="[MODEL] [-]")
@option("-m", "--model", default=None, metavar="FILE", help="The model, a GGUF file.")
@option("-p", "--prompt", default=None, help="The prompt.")
@option("-f", "--file", default=None, metavar="FILE", help="Read the prompt from a file.")
@reply_options(max_tokens=256)
@config_options(SamplingConfig)
@config_options(EngineConfig)
@option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the text.")
@output_options
@click.pass_context
def generate(context: click.Context, /, **values: Any) -> None:
    """Let a model continue a prompt: -p TEXT, -f FILE, or - for standard input.

    Without MODEL the built-in demo model is used, which writes Python. The text goes to stdout,
    statistics to stderr. Ctrl-C ends the text early, prints the statistics and exits with 130.
    """
    engine, sampling = engine_config(values), sampling_config(values)
    check_output(values["verbose"], values["quiet"])
    positional, stdin = split_words(values["words"])
    model = chosen_model(positional, values["model"])
    prompt = read_prompt(prompt_source(values["prompt"], values["file"], stdin))
    stop = checked_stop(values["stop"])
    with opened(model, engine, values["verbose"], values["quiet"]) as llm:
        limits = {
            "max_tokens": None if values["max_tokens"] < 0 else values["max_tokens"],
            "stop": stop,
            "ignore_eos": values["ignore_eos"],
        }
        reason = _run(llm, prompt, sampling, limits, values["as_json"], values["quiet"])
    if reason == "interrupt":
        context.exit(INTERRUPTED)


def _run(
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
            click.echo()  # also before an error message
    statistics = llm.last_statistics
    reason = "interrupt" if interrupted or statistics is None else statistics.finish_reason
    if statistics is not None and as_json:
        document = json_document(llm, statistics, "".join(texts), token_ids, reason)
        click.echo(json.dumps(document, ensure_ascii=False, indent=2))
    if statistics is not None and not quiet:
        for line in statistics_lines(llm, statistics, reason):
            note(line)
    return reason


def checked_stop(stop: tuple[str, ...]) -> list[str]:
    """The stop strings. Raises UsageError for an empty one."""
    if not all(stop):
        raise UsageError("--stop is empty", "leave it out for no stop string")
    return list(stop)
