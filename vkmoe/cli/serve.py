"""This module is `vkmoe serve`: a model over HTTP, for the programs that people use already."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkmoe.cli.notes import log_as_notes, note, notes_at_start
from vkmoe.cli.options import ModelChoice, Output, TemplateChoice, config_options
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.server.settings import ServerSettings

if TYPE_CHECKING:
    from vkmoe.llm import LLM
    from vkmoe.weights.placer import Progress

IDLE_FLAGS = "vkmoe.idle_flags"  # in a context's `meta`: what llama_server.py left out


@config_options
def serve(
    context: typer.Context,
    *,
    which: ModelChoice,
    settings: ServerSettings,
    template: TemplateChoice,
    sampling: SamplingConfig,
    engine: EngineConfig,
    output: Annotated[Output, ("quiet",)],
) -> None:
    """Serve a model over HTTP, in the forms of OpenAI's and Anthropic's APIs.

    At http://HOST:PORT is a page with a chat and a live map of the experts; clients take
    http://HOST:PORT/v1 as the base URL. --parallel N serves N replies at once, which share
    --ctx-size. It listens at once, and /health says when the model is there. Ctrl-C or SIGTERM ends
    it, when replies under way have finished or ten seconds later. The flags of llama-server work
    too; those that have nothing to do here are named once.
    """
    _check_installed()
    from vkmoe.gguf_file.disk import map_file
    from vkmoe.llm.engine_thread import EngineThread
    from vkmoe.server.app import make_app
    from vkmoe.server.models import Hosted, Models
    from vkmoe.server.service import Service
    from vkmoe.server.serving import Server, bind_all

    chosen, text, quiet = which.path(context), template.text, output.quiet
    if chosen is not None:
        map_file(Path(chosen))  # raises before it listens
    config, notes = _shared_context(engine, settings)
    if idle := context.meta.get(IDLE_FLAGS):
        notes.append(f"nothing to do here for {', '.join(idle)}")
    if not settings.keys and not {"127.0.0.1", "localhost", "::1"}.issuperset(settings.hosts):
        notes.append("whatever reaches this address may use the model: --api-key asks for a key")
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    with log_as_notes(quiet, level):
        thread = EngineThread(
            lambda: _load(chosen, config, text, quiet, thread.loaded), settings.max_queue
        )
        service = Service(thread, Path(chosen or "demo").stem, settings, sampling)
        listening = bind_all(settings.hosts, settings.port)
        address = settings.address(listening[0].getsockname()[1])
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        if not quiet:
            for line in (f"listening at {address}; base URL for clients: {address}/v1", *notes):
                note(line)
        models = Models([Hosted(service, lambda others: True)])
        Server(make_app(models), models).run(sockets=listening)
    for error in models.errors:
        raise error


def _shared_context(
    engine: EngineConfig, settings: ServerSettings
) -> tuple[EngineConfig, list[str]]:
    """Give each reply its share of the context, as llama-server does, and say so."""
    whole, n = engine.ctx_size, engine.parallel
    if whole is None or n == 1 or settings.kv_unified:
        return engine, []
    share = max(whole // n, 1)
    line = f"each of {n} replies has a context of {share} tokens: --ctx-size {whole} is shared"
    return replace(engine, ctx_size=share), [line]


def _check_installed() -> None:
    from importlib.util import find_spec

    needed = ("starlette", "uvicorn", "pydantic", "prometheus_client")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise VkmoeError(f"vkmoe serve needs {', '.join(missing)}", 'pip install "vkmoe[server]"')


def _load(
    model: str | None,
    config: EngineConfig,
    chat_template: str | None,
    quiet: bool,
    progress: Progress,
) -> LLM:
    from vkmoe.llm import LLM

    llm = LLM(model, config, chat_template=chat_template, progress=progress)
    if not quiet:
        with suppress(VkmoeError):
            for line in notes_at_start(llm, config):
                note(line)
        note(f"ready, loaded in {llm.load_seconds:.1f} s")
    return llm
