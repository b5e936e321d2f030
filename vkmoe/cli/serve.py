"""This module is `vkmoe serve`: a model over HTTP, for the programs that people use already."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from vkmoe.cli.notes import log_as_notes, note, notes_at_start
from vkmoe.cli.options import ModelChoice, Output, TemplateChoice, config_options
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.server.settings import ServerSettings

if TYPE_CHECKING:
    from vkmoe.facts import MemoryPlan
    from vkmoe.llm import LLM
    from vkmoe.server.models import Hosted
    from vkmoe.server.roster import Listed, Roster
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
    """Serve a model over HTTP, in the forms of OpenAI, Anthropic, llama-server and Ollama.

    At http://HOST:PORT is a page with a chat and a live map of the experts; clients take
    http://HOST:PORT/v1 as the base URL. --parallel N serves N replies at once, which share
    --ctx-size. It listens at once, and /health says when the model is there. Ctrl-C or SIGTERM ends
    it, when replies under way have finished or ten seconds later. The flags of llama-server work
    too; those that have nothing to do here are named once.
    """
    _check_installed()
    from vkmoe.server.app import make_app
    from vkmoe.server.models import Models
    from vkmoe.server.peers import Peers
    from vkmoe.server.serving import Server, bind_all

    quiet = output.quiet
    config, notes = _shared_context(engine, settings)
    roster = _roster(context, which, template, settings, (config, sampling))
    notes += _notes(context, settings, roster)
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    with log_as_notes(quiet, level), TemporaryDirectory(prefix="vkmoe-") as profiles:
        hosted = [
            _hosted(each, settings, Path(profiles) / f"{index}.json", quiet)
            for index, each in enumerate(roster.models)
        ]
        models = Models(hosted, settings.models_max)
        listening = bind_all(settings.hosts, settings.port)
        address = settings.address(listening[0].getsockname()[1])
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        if not quiet:
            for line in (f"listening at {address}; base URL for clients: {address}/v1", *notes):
                note(line)
        app = make_app(models, Peers(roster.peers, settings.timeout or None))
        Server(app, models).run(sockets=listening)
    for error in models.errors:
        raise error


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
    from vkmoe.gguf_file.disk import map_file
    from vkmoe.llm import demo_model_path
    from vkmoe.server.roster import Listed, Roster, read_roster

    chosen, text = which.path(context), template.text
    if settings.models is not None:
        if chosen is not None or text is not None:
            one = "a model" if chosen is not None else "a chat template"
            raise UsageError(f"--models and {one} are given", "leave one of them out")
        return read_roster(Path(settings.models), *configs)
    if chosen is not None:
        map_file(Path(chosen))
    name = Path(chosen or "demo").stem
    return Roster((Listed(name, chosen or str(demo_model_path()), *configs, text),))


def _hosted(listed: Listed, settings: ServerSettings, profile: Path, quiet: bool) -> Hosted:
    """Make ready what loads a model. Of several, the uses of experts are kept while one sleeps."""
    from vkmoe.catalogue import fetcher
    from vkmoe.catalogue.room import has_room
    from vkmoe.llm.engine_thread import EngineThread
    from vkmoe.llm.files import file_of
    from vkmoe.server.models import Hosted
    from vkmoe.server.service import Service

    several, config = settings.models is not None, listed.engine
    thread = EngineThread(
        lambda: _load(listed, profile, quiet, thread.loaded), settings.max_queue, is_asleep=several
    )
    if several:
        settings = replace(settings, alias=",".join((listed.name, *listed.aliases)))

    def fits(others: Sequence[MemoryPlan]) -> bool:
        return has_room(file_of(listed.model, config, fetcher(config, None)), config, others)

    return Hosted(Service(thread, listed.name, settings, listed.sampling), fits)


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


def _load(listed: Listed, profile: Path, quiet: bool, progress: Progress) -> LLM:
    """Load a model; how it used its experts before it last slept is in `profile`."""
    from vkmoe.catalogue import fetcher
    from vkmoe.llm import LLM
    from vkmoe.llm.files import file_of
    from vkmoe.models import open_model

    config = listed.engine
    file = open_model(file_of(listed.model, config, fetcher(config, progress)))
    if file.expert_tensors and config.expert_profile is None:
        config = replace(config, expert_profile=str(profile))
    llm = LLM(file, config, chat_template=listed.chat_template, progress=progress)
    if not quiet:
        with suppress(VkmoeError):
            for line in notes_at_start(llm, config):
                note(line)
        note(f"{listed.name}: ready, loaded in {llm.load_seconds:.1f} s")
    return llm
