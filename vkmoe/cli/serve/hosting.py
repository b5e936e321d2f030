"""Serves models until a signal ends it: makes each ready, says where they are, reports errors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from vkmoe.catalogue import fetcher
from vkmoe.catalogue.choose import has_room
from vkmoe.cli.notes import log_as_notes, note, notes_at_start
from vkmoe.errors import UnavailableError, VkmoeError
from vkmoe.facts import MemoryPlan
from vkmoe.llm import LLM
from vkmoe.llm.engine_thread import EngineThread, LoadingEnded
from vkmoe.llm.files import file_of
from vkmoe.models import open_model
from vkmoe.server.app import make_app
from vkmoe.server.hosting.models import Hosted, Makers, Models
from vkmoe.server.hosting.peers import Peers
from vkmoe.server.hosting.roster import Listed, Roster
from vkmoe.server.service import Service
from vkmoe.server.settings import ServerSettings
from vkmoe.server.transport.serving import Server, bind_all
from vkmoe.weights.placer import Progress


def host(roster: Roster, settings: ServerSettings, notes: Iterable[str], quiet: bool) -> None:
    """Serve the models of `roster`, after `notes` on stderr. Raises what a model failed with."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    with (
        log_as_notes(quiet, level),
        TemporaryDirectory(prefix="vkmoe-") as profiles,
        _unmentioned(profiles),
    ):
        models = _models(roster, settings, Path(profiles), quiet)
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


@contextmanager
def _unmentioned(folder: str) -> Iterator[None]:
    """Leave out what is logged of the files in a folder of the server's own, unless it warns."""

    def may_be_said(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or folder not in record.getMessage()

    log = logging.getLogger("vkmoe")
    log.addFilter(may_be_said)
    try:
        yield
    finally:
        log.removeFilter(may_be_said)


def _models(roster: Roster, settings: ServerSettings, profiles: Path, quiet: bool) -> Models:
    """Make ready what loads the models of a roster, also those that come later."""
    n_made = count()

    def made(listed: Listed) -> Hosted:
        return _hosted(listed, settings, profiles / f"{next(n_made)}.json", quiet)

    def there() -> Makers:
        found = roster.reread() if roster.reread else roster
        return {each.name: partial(made, each) for each in found.models}

    hosted = [made(each) for each in roster.models]
    return Models(hosted, settings.models_max, there if roster.reread else None)


def _hosted(listed: Listed, settings: ServerSettings, profile: Path, quiet: bool) -> Hosted:
    """Make ready what loads a model. Of several, the uses of experts are kept while one sleeps."""
    several, config = settings.models is not None, listed.engine

    @cache  # what has room is what is loaded, whichever quant would suit the machine by then
    def file() -> Path:
        return file_of(listed.model, config, fetcher(config, thread.loaded))

    def load() -> LLM:
        return _load(listed, file(), profile, quiet, thread.loaded)

    def fits(others: Sequence[MemoryPlan]) -> bool:
        try:
            return has_room(file(), config, others)
        except LoadingEnded:  # while the model was downloaded
            raise UnavailableError("the model is being closed") from None

    thread = EngineThread(load, settings.max_queue, is_asleep=several)
    names = (listed.name, *listed.aliases) if several else ()

    return Hosted(Service(thread, listed.name, settings, listed.sampling, aliases=names), fits)


def _load(listed: Listed, path: Path, profile: Path, quiet: bool, progress: Progress) -> LLM:
    """Load a model; how it used its experts before it last slept is in `profile`."""
    config, file = listed.engine, open_model(path)
    if file.expert_tensors and config.expert_profile is None:
        config = replace(config, expert_profile=str(profile))
    llm = LLM(file, config, chat_template=listed.chat_template, progress=progress)
    if not quiet:
        with suppress(VkmoeError):
            for line in notes_at_start(llm, config):
                note(line)
        note(f"{listed.name}: ready, loaded in {llm.load_seconds:.1f} s")
    return llm
