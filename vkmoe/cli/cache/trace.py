"""This module is `vkmoe trace`: it generates like `vkmoe generate` and records the experts used."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkmoe.cli.generate import write_reply
from vkmoe.cli.notes import note, opened
from vkmoe.cli.options import (
    Limits,
    Output,
    PromptChoice,
    check_output,
    config_options,
    read_source,
)
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UnsupportedModelError, UsageError
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.batch import RunResult, TokenBatch
    from vkmoe.experts.records.trace import TraceHeader
    from vkmoe.llm import LLM
    from vkmoe.models import ModelFile


@dataclass(frozen=True)
class _Recording:
    output: str = option(
        "trace.jsonl", "The trace, a file of JSON lines.", "-o", "--output", metavar="FILE"
    )
    overwrite: bool = option(False, "Replace a file that is there already.")
    with_ids: bool = option(
        False,
        "Record a name for each token too, so that `vkmoe simulate` can tell what its "
        "predictor by tokens is worth: a hash with a salt that is not written down. The "
        "file shows which places have the same token, from which text might be guessed.",
    )
    salt: str | None = option(
        None,
        "Salt of --with-ids, which it implies: give the same for traces that are to be "
        "simulated together, and keep it secret. Default: random, and forgotten.",
        metavar="TEXT",
    )

    def key(self) -> bytes | None:
        """Return the salt of tokens' names; None: they are not recorded."""
        if self.salt is not None:
            return hashlib.sha512(self.salt.encode()).digest()
        return secrets.token_bytes(64) if self.with_ids else None


@config_options
def trace(
    context: typer.Context,
    *,
    given: PromptChoice,
    recording: _Recording,
    limits: Limits,
    sampling: SamplingConfig,
    engine: EngineConfig,
    output: Annotated[Output, ("verbose", "quiet")],
) -> None:
    """Generate, and record which experts every token of prompt and reply uses.

    `vkmoe simulate` reads the file, which holds neither the text nor any weights. Without
    --with-ids it does not name tokens either; but experts follow the token, so places that use the
    same ones most likely have the same token. What was recorded before Ctrl-C stays usable. A file
    that is there already is replaced only with --overwrite. A long prompt of your own subject tells
    more than a long reply: the trace of a reply depends on the sampling options.
    """
    from vkmoe.weights.sizes import trace_header

    chosen = given.path(context)
    text = read_source(*given.source(context))
    engine = replace(engine, draft="none") if engine.draft == "auto" else engine
    if engine.draft != "none":
        raise UsageError(
            f"--draft {engine.draft} runs tokens that the reply may not have",
            "trace without it: the reply is the same",
        )
    path = _free_path(recording.output, recording.overwrite, given.file, engine)
    with _open(chosen) as source:
        header = trace_header(source.spec, source.tensors)
        with (
            opened(chosen, engine, output.verbose, output.quiet, file=source) as llm,
            _recording(llm, path, header, text, recording.key(), output.quiet),
        ):
            write_reply(llm, text, sampling, limits, output)


def _free_path(output: str, overwrite: bool, prompt: str | None, engine: EngineConfig) -> Path:
    """Check the file to write before a model is loaded. Raises UsageError, VkmoeError."""
    from vkmoe.experts.records.profile import is_read_only

    if output == "-":
        raise UsageError(
            "--output - would mix the trace with the reply on stdout", "give the trace a file"
        )
    path, profile = Path(output), engine.expert_profile
    sources = [prompt] if prompt is not None else []
    if profile is not None and is_read_only(Path(profile)):
        sources.append(profile)
    check_output("--output", path, "the trace", sources, engine)
    if path.is_file() and not overwrite:
        raise UsageError(
            f"{path} is there already", "give another --output, or --overwrite to replace it"
        )
    return path


def _open(model: str | None) -> ModelFile:
    """Open the file of a model to trace. Raises UnsupportedModelError for one without experts."""
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
