"""This module is `vkmoe generate`: one prompt in, text out, or a file of prompts and of replies.

It owns the words about a generation, for people and as JSON; `vkmoe chat` and `vkmoe trace` use
them too.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.cli.notes import counting, note, opened, prompt_progress
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
    is_typed,
    option,
    prompt_source,
    read_source,
    split_words,
)
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.generate.prompts import PromptLine, RepliesFile, read_prompts
from vkmoe.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from vkmoe.llm import LLM, GenerationResult, GenerationStatistics, Piece, Request

__all__ = ["generate", "note_statistics", "reply_limits", "watched", "write_reply"]


@config_options
def generate(
    context: typer.Context,
    *,
    words: Words = None,
    model: Model = None,
    prompt: Prompt = None,
    file: PromptFile = None,
    prompts: Annotated[
        str | None,
        option(
            "--prompts",
            metavar="FILE",
            help="Reply to every line of a file (- is standard input): JSON objects with prompt or "
            "messages, and id, max_tokens, stop, seed, temp and so on where they differ. Each "
            "reply is one line of JSON, written when it is finished.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where replies to --prompts go. Those that are there already are not generated "
            "again. Default: standard output.",
        ),
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
    With --prompts FILE it replies to many, --parallel at once; after Ctrl-C, the same command goes
    on where it ended if it has an --output.
    """
    positional, stdin = split_words(words or [])
    chosen = chosen_model(context, positional, model)
    limits = reply_limits(max_tokens, stop, ignore_eos)
    given = {"prompt": prompt, "file": file, "stdin": "-" if stdin else None, "prompts": prompts}
    source, value = prompt_source(context, **given)
    if source == "prompts":
        lines = read_prompts(Path(value), sampling, limits)
        with _replies_file(output, value, engine) as replies:
            left = [line for line in lines if line.id not in replies.ids]
            if not quiet and len(left) < len(lines):
                note(f"{len(lines) - len(left)} of {len(lines)} replies are in {output} already")
            if left:
                with opened(chosen, engine, verbose, quiet) as llm:
                    _reply_to_all(llm, Path(value), left, replies, quiet)
        return
    if output is not None and is_typed(context, "output"):
        raise UsageError("--output is for replies to --prompts", "send the text to a file: > FILE")
    text = read_source(source, value)
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


# ----- many prompts -----


def _replies_file(output: str | None, prompts: str, engine: EngineConfig) -> RepliesFile:
    """Open the file for replies before a model is loaded. Raises UsageError, VkmoeError."""
    from vkmoe.experts.records.keeper import (
        check_outputs,
        reason_against_writing,
        record_outputs,
    )

    if output is None:
        return RepliesFile(None)
    path = Path(output)
    check_outputs([("--output", path), *record_outputs(engine)], [prompts])
    if reason := reason_against_writing(path):
        raise VkmoeError(f"the replies cannot be written: {reason}", "give another --output")
    return RepliesFile(path)


def _reply_to_all(
    llm: LLM, path: Path, lines: Sequence[PromptLine], replies: RepliesFile, quiet: bool
) -> None:
    """Write a reply to each line as they are finished. Raises typer.Exit after Ctrl-C."""
    from vkmoe.experts.records.report import as_lines

    requests = [_request(llm, path, line) for line in lines]
    began, n_done, n_prompt, n_generated = time.perf_counter(), 0, 0, 0
    interrupted = False
    try:
        with counting("replies", shown=not quiet) as progress:
            for index, result in llm.generate_many(requests):
                replies.write(_reply_document(lines[index], result))
                n_done += 1
                n_prompt += result.statistics.n_prompt_tokens - result.statistics.n_reused_tokens
                n_generated += result.statistics.n_generated_tokens
                progress(n_done, len(lines))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - began
    if not quiet:
        note(
            f"{n_done} of {len(lines)} replies in {seconds:.1f} s | theirs: {n_prompt} prompt "
            f"tokens read, {n_generated} tokens generated, {n_generated / seconds:.1f} tok/s"
        )
        for text in as_lines(llm.expert_statistics):
            note(text)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _request(llm: LLM, path: Path, line: PromptLine) -> Request:
    """Turn a line into tokens. Raises PromptError, UnsupportedModelError, which name the line."""
    try:
        prompt = line.prompt
        if prompt is None:
            text = llm.chat_template.render(line.messages, **line.template_names)
            prompt = tuple(llm.tokenizer.encode(text, add_special=False))
        return llm.request(prompt, line.sampling, **line.limits)
    except VkmoeError as error:
        raise PromptError(f"{path}, line {line.number}: {error}", error.hint) from error


def _reply_document(line: PromptLine, result: GenerationResult) -> dict[str, Any]:
    statistics = result.statistics
    return {
        "id": line.id,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "n_prompt_tokens": statistics.n_prompt_tokens,
        "n_generated_tokens": statistics.n_generated_tokens,
        "seed": statistics.seed,
    }


# ----- what a reply took -----


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
    cache = ("hit_rate", "n_uses", "n_hits", "policy", "copies", "predictions")
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
