"""This module is `vkmoe generate`: one prompt in, text out, or a file of prompts and of replies.

It owns the words about a generation, for people and as JSON; `vkmoe chat` and `vkmoe trace` use
them too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vkmoe.cli.notes import counting, note, opened, prompt_progress
from vkmoe.cli.options import (
    Limits,
    Output,
    PromptChoice,
    check_output,
    config_options,
    is_typed,
    read_source,
)
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.generate.prompts import PromptLine, RepliesFile, read_prompts
from vkmoe.interrupts import INTERRUPTED
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.llm import LLM, GenerationResult, GenerationStatistics, Piece, Request


@dataclass(frozen=True)
class _Many:
    prompts: str | None = option(
        None,
        "Reply to every line of a file (- is standard input): JSON objects with prompt or "
        "messages, and id, max_tokens, stop, seed, temp and so on where they differ. Each "
        "reply is one line of JSON, written when it is finished.",
        metavar="FILE",
    )
    output: str | None = option(
        None,
        "Where replies to --prompts go. Those that are there already are not generated "
        "again. Default: standard output.",
        "-o",
        "--output",
        metavar="FILE",
    )


@config_options
def generate(
    context: typer.Context,
    *,
    given: PromptChoice,
    many: _Many,
    limits: Limits,
    sampling: SamplingConfig,
    engine: EngineConfig,
    output: Output,
) -> None:
    """Let a model continue a prompt: -p TEXT, -f FILE, or - for standard input.

    Without MODEL the built-in demo model is used, which writes Python. The text goes to stdout,
    statistics to stderr. Ctrl-C ends the text early, prints the statistics and exits with 130.
    With --prompts FILE it replies to many, --parallel at once; after Ctrl-C, the same command goes
    on where it ended if it has an --output.
    """
    chosen, quiet = given.path(context), output.quiet
    source, value = given.source(context, prompts=many.prompts)
    if source == "prompts":
        lines = read_prompts(Path(value), sampling, limits.of_request)
        with _replies_file(many.output, value, engine) as replies:
            left = [line for line in lines if line.id not in replies.ids]
            if not quiet and len(left) < len(lines):
                n_there = len(lines) - len(left)
                note(f"{n_there} of {len(lines)} replies are in {many.output} already")
            if left:
                with opened(chosen, engine, output.verbose, quiet) as llm:
                    _reply_to_all(llm, Path(value), left, replies, quiet)
        return
    if many.output is not None and is_typed(context, "output"):
        raise UsageError("--output is for replies to --prompts", "send the text to a file: > FILE")
    text = read_source(source, value)
    with opened(chosen, engine, output.verbose, quiet) as llm:
        write_reply(llm, text, sampling, limits, output)


def write_reply(
    llm: LLM, prompt: str, sampling: SamplingConfig, limits: Limits, output: Output
) -> None:
    """Stream the reply, then the statistics. Raises typer.Exit after Ctrl-C."""
    pieces: list[Piece] = []
    interrupted = False
    try:
        for piece in watched(llm, prompt, sampling, limits, output.quiet):
            pieces.append(piece)
            if not output.as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if not output.as_json and pieces:
            typer.echo()  # also before an error message
    statistics = llm.last_statistics
    reason = "interrupt" if interrupted or statistics is None else statistics.finish_reason
    if statistics is not None and output.as_json:
        document = _document(llm, statistics, pieces, reason)
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
    if not output.quiet:
        note_statistics(llm, reason)
    if reason == "interrupt":
        raise typer.Exit(INTERRUPTED)


def watched(
    llm: LLM, prompt: str | list[int], sampling: SamplingConfig, limits: Limits, quiet: bool
) -> Iterator[Piece]:
    """Stream a reply, with a bar on stderr while a long prompt is read."""
    with prompt_progress(shown=not quiet) as progress:
        yield from llm.stream(prompt, sampling, progress=progress, **limits.of_request)


# ----- many prompts -----


def _replies_file(output: str | None, prompts: str, engine: EngineConfig) -> RepliesFile:
    """Open the file for replies before a model is loaded. Raises UsageError, VkmoeError."""
    if output is None:
        return RepliesFile(None)
    check_output("--output", Path(output), "the replies", [prompts], engine)
    return RepliesFile(Path(output))


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
    llm: LLM, statistics: GenerationStatistics, pieces: Sequence[Piece], reason: str
) -> dict[str, Any]:
    """Return the result of --json; rates are tokens per second."""
    from vkmoe.experts.records.report import as_document

    experts = as_document(llm.expert_statistics)
    cache = ("hit_rate", "n_uses", "n_hits", "policy", "copies", "predictions")
    values = asdict(statistics) | {"finish_reason": reason}  # Ctrl-C may come after it
    return {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [piece.token_id for piece in pieces if piece.token_id >= 0],
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
