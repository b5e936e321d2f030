"""This module is `vkmoe trace`: it generates like `vkmoe generate` and records the experts used."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkmoe.cli.generate import reply_limits, write_reply
from vkmoe.cli.notes import note, opened
from vkmoe.cli.options import (
    IgnoreEos,
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
    option,
    read_prompt,
    split_words,
)
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UsageError, VkmoeError

if TYPE_CHECKING:
    from vkmoe.batch import RunResult, TokenBatch
    from vkmoe.experts.records.trace import TraceHeader
    from vkmoe.llm import LLM
    from vkmoe.models import ModelFile

__all__ = ["trace"]


@config_options
def trace(
    context: typer.Context,
    *,
    words: Words = None,
    model: Model = None,
    prompt: Prompt = None,
    file: PromptFile = None,
    output: Annotated[
        str, option("-o", "--output", metavar="FILE", help="The trace, a file of JSON lines.")
    ] = "trace.jsonl",
    overwrite: Annotated[
        bool, option("--overwrite", kind=bool, help="Replace a file that is there already.")
    ] = False,
    with_ids: Annotated[
        bool,
        option(
            "--with-ids",
            kind=bool,
            help="Record a name for each token too, so that `vkmoe simulate` can tell what its "
            "predictor by tokens is worth: a hash with a salt that is not written down. The "
            "file shows which places have the same token, from which text might be guessed.",
        ),
    ] = False,
    salt: Annotated[
        str | None,
        option(
            "--salt",
            metavar="TEXT",
            help="Salt of --with-ids, which it implies: give the same for traces that are to be "
            "simulated together, and keep it secret. Default: random, and forgotten.",
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    sampling: SamplingConfig,
    engine: EngineConfig,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Generate, and record which experts every token of prompt and reply uses.

    `vkmoe simulate` reads the file, which holds neither the text nor any weights. Without
    --with-ids it does not name tokens either; but experts follow the token, so places that use the
    same ones most likely have the same token. What was recorded before Ctrl-C stays usable. A file
    that is there already is replaced only with --overwrite. A long prompt of your own subject tells
    more than a long reply: the trace of a reply depends on the sampling options.
    """
    from vkmoe.weights.sizes import trace_header

    positional, stdin = split_words(words or [])
    chosen = chosen_model(context, positional, model)
    text = read_prompt(context, prompt, file, stdin)
    limits = reply_limits(max_tokens, stop, ignore_eos)
    if engine.draft != "none":
        raise UsageError(
            f"--draft {engine.draft} runs tokens that the reply may not have",
            "trace without it: the reply is the same",
        )
    path = _free_path(output, overwrite, file, engine)
    with (
        _open(chosen) as source,
        opened(chosen, engine, verbose, quiet, file=source) as llm,
        _recording(
            llm, path, trace_header(source.spec, source.tensors), text, _key(salt, with_ids), quiet
        ),
    ):
        write_reply(llm, text, sampling, limits, as_json=False, quiet=quiet)


def _key(salt: str | None, with_ids: bool) -> bytes | None:
    """Return the salt of tokens' names; None: they are not recorded."""
    if salt is None and not with_ids:
        return None
    return secrets.token_bytes(64) if salt is None else hashlib.sha512(salt.encode()).digest()


def _free_path(output: str, overwrite: bool, prompt: str | None, engine: EngineConfig) -> Path:
    """Check the file to write before a model is loaded. Raises UsageError, VkmoeError."""
    from vkmoe.experts.records.keeper import (
        check_outputs,
        reason_against_writing,
        record_outputs,
    )
    from vkmoe.experts.records.profile import is_read_only

    if output == "-":
        raise UsageError(
            "--output - would mix the trace with the reply on stdout", "give the trace a file"
        )
    path = Path(output)
    outputs = [("--output", path), *record_outputs(engine)]
    sources, profile = [prompt] if prompt is not None else [], engine.expert_profile
    if profile is not None and is_read_only(Path(profile)):
        sources.append(profile)
    check_outputs(outputs, sources)
    if reason := reason_against_writing(path):
        raise VkmoeError(f"the trace cannot be written: {reason}", "give another --output")
    if path.is_file() and not overwrite:
        raise UsageError(
            f"{path} is there already", "give another --output, or --overwrite to replace it"
        )
    return path


def _open(model: str | None) -> ModelFile:
    """Open the file of a model to trace. Raises UnsupportedModelError for one without experts."""
    from vkmoe.errors import UnsupportedModelError
    from vkmoe.llm import demo_model_path
    from vkmoe.models import open_model

    file = open_model(model if model is not None else demo_model_path())
    if file.spec.experts is None:
        file.close()
        raise UnsupportedModelError(
            f"{file.file.path}: {file.spec.name} has no experts, there is no routing to record",
            "trace a mixture-of-experts model; `vkmoe info` tells what a file holds",
        )
    return file


@contextmanager
def _recording(
    llm: LLM, path: Path, header: TraceHeader, prompt: str, salt: bytes | None, quiet: bool
) -> Iterator[None]:
    """Write the routing of every token the model runs; at the end say what there is."""
    from vkmoe.experts.records.trace import TraceWriter

    n_prompt = len(llm.tokenizer.encode(prompt))
    writer: TraceWriter | None = None
    with ExitStack() as stack:

        def record(batch: TokenBatch, result: RunResult) -> None:
            nonlocal writer
            if writer is None:  # an error before the first token leaves an older file alone
                writer = stack.enter_context(TraceWriter(path, header, salt))
            rows = zip(batch.positions, result.routing, batch.tokens, strict=True)
            for position, routing, token in rows:
                writer.write(routing, position < n_prompt, token)

        llm.scheduler.after_run = record
        stack.callback(setattr, llm.scheduler, "after_run", None)
        try:
            yield
        finally:
            if writer is not None and not quiet:
                size = path.stat().st_size
                note(f"routing of {writer.n_tokens} tokens is in {path}, {size / 2**10:,.1f} KiB")
