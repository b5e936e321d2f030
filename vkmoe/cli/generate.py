"""This module is `vkmoe generate`: one prompt in, text out.

It owns the words about a generation, for people and as JSON; `vkmoe chat` and `vkmoe trace` use
them too.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from vkmoe.cli.notes import note, opened, prompt_progress
from vkmoe.cli.options import (
    IgnoreEos,
    Json,
    MaxTokens,
    Model,
    Prompt,
    PromptFile,
    Quiet,
    Stop,
    Verbose,
    Words,
    chosen_model,
    config_options,
    read_prompt,
    split_words,
)
from vkmoe.config import EngineConfig, SamplingConfig

if TYPE_CHECKING:
    from vkmoe.llm import LLM, GenerationStatistics, Piece

__all__ = ["INTERRUPTED", "generate", "note_statistics", "reply_limits", "watched", "write_reply"]

INTERRUPTED = 130


@config_options
def generate(
    context: typer.Context,
    *,
    words: Words = None,
    model: Model = None,
    prompt: Prompt = None,
    file: PromptFile = None,
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
    positional, stdin = split_words(words or [])
    chosen = chosen_model(context, positional, model)
    text = read_prompt(context, prompt, file, stdin)
    limits = reply_limits(max_tokens, stop, ignore_eos)
    with opened(chosen, engine, verbose, quiet) as llm:
        write_reply(llm, text, sampling, limits, as_json, quiet)


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
) -> None:
    """Stream the reply, then the statistics. Raises typer.Exit after Ctrl-C."""
    texts: list[str] = []
    token_ids: list[int] = []
    interrupted = False
    try:
        for piece in watched(llm, prompt, sampling, limits, quiet):
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
        document = _document(llm, statistics, "".join(texts), token_ids, reason)
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
    if not quiet:
        note_statistics(llm, reason)
    if reason == "interrupt":
        raise typer.Exit(INTERRUPTED)


def watched(
    llm: LLM, prompt: str | list[int], sampling: SamplingConfig, limits: dict[str, Any], quiet: bool
) -> Iterator[Piece]:
    """Stream a reply, with a bar on stderr while a long prompt is read."""
    with prompt_progress(shown=not quiet) as progress:
        yield from llm.stream(prompt, sampling, progress=progress, **limits)


def note_statistics(llm: LLM, reason: str) -> None:
    """Say times and speeds, memory, what repeats the run, and what the expert cache did."""
    from vkmoe.experts.records.report import as_lines

    s = llm.last_statistics
    if s is None:
        return
    reused = f" ({s.n_reused_tokens} reused)" if s.n_reused_tokens else ""
    memory = ", ".join(f"{place} {size / 2**20:.1f} MiB" for place, size in llm.memory.items())
    note(
        f"load {s.load_seconds:.2f} s | first token {s.ttft_seconds:.2f} s | "
        f"prompt {s.n_prompt_tokens} tokens{reused}, {s.prompt_rate:.1f} tok/s | "
        f"reply {s.n_generated_tokens} tokens, {s.decode_rate:.1f} tok/s | ended by {reason}"
    )
    if s.n_drafted_tokens:
        note(
            f"drafts: {s.n_accepted_tokens} of {s.n_drafted_tokens} tokens accepted, "
            f"{s.accepted_per_step:.2f} a step"
        )
    for line in [f"memory: {memory} | seed {s.seed}", *as_lines(llm.expert_statistics)]:
        note(line)


def _document(
    llm: LLM, statistics: GenerationStatistics, text: str, token_ids: list[int], reason: str
) -> dict[str, Any]:
    """Return the result of --json; rates are tokens per second."""
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
