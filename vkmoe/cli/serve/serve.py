"""This module is `vkmoe serve`: a model over HTTP, for the programs that people use already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkmoe.cli.options import ModelChoice, Output, TemplateChoice, config_options
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.server.settings import ServerSettings

if TYPE_CHECKING:
    from vkmoe.server.hosting.roster import Roster

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
    """Serve a model over HTTP, in the forms of OpenAI, Anthropic, llama-server and Ollama.

    At http://HOST:PORT is a page with a chat and a live map of the experts; clients take
    http://HOST:PORT/v1 as the base URL. --parallel N serves N replies at once, which share
    --ctx-size. It listens at once, and /health says when the model is there. Ctrl-C or SIGTERM ends
    it, when replies under way have finished or ten seconds later. The flags of llama-server work
    too; those that have nothing to do here are named once.
    """
    _check_installed()
    from vkmoe.cli.serve.hosting import host

    config, notes = _shared_context(engine, settings)
    roster = _roster(context, which, template, settings, (config, sampling))
    host(roster, settings, [*notes, *_notes(context, settings, roster)], output.quiet)


def _notes(context: typer.Context, settings: ServerSettings, roster: Roster) -> Iterator[str]:
    """Say what a user may not expect of these options."""
    if idle := context.meta.get(IDLE_FLAGS):
        yield f"nothing to do here for {', '.join(idle)}"
    if not settings.keys and not {"127.0.0.1", "localhost", "::1"}.issuperset(settings.hosts):
        yield "whatever reaches this address may use the model: --api-key asks for a key"
    if settings.models is not None:
        yield f"models: {', '.join(each.name for each in roster.models)}"


def _roster(
    context: typer.Context,
    which: ModelChoice,
    template: TemplateChoice,
    settings: ServerSettings,
    configs: tuple[EngineConfig, SamplingConfig],
) -> Roster:
    """Find what is to be served: one model, or those of --models. Raises before it listens."""
    from vkmoe.catalogue.caches import bare_stem
    from vkmoe.gguf_file.disk import map_file
    from vkmoe.llm import demo_model_path
    from vkmoe.server.hosting.roster import Listed, Roster, read_roster

    chosen, text = which.path(context), template.text
    if settings.models is not None:
        if chosen is not None or text is not None:
            one = "a model" if chosen is not None else "a chat template"
            raise UsageError(f"--models and {one} are given", "leave one of them out")
        return read_roster(Path(settings.models), *configs)
    if chosen is not None:
        map_file(Path(chosen))
    name = bare_stem(Path(chosen or "demo"))
    return Roster((Listed(name, chosen or str(demo_model_path()), *configs, text),))


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
