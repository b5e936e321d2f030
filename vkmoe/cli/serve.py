"""This module is `vkmoe serve`: a model over HTTP, for the programs that people use already."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vkmoe.cli.notes import log_as_notes, note, notes_at_start
from vkmoe.cli.options import ModelChoice, Output, config_options
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.llm import LLM
    from vkmoe.weights.placer import Progress


@dataclass(frozen=True)
class _Served:
    host: str = option("127.0.0.1", "The address to listen at; 0.0.0.0 is all there are.")
    port: int = option(8080, "The port; 0: a free one.", minimum=0, maximum=65535)
    api_key: str | None = option(
        None, "Ask every client for this key; several are split by commas."
    )
    alias: str | None = option(None, "The name that clients know the model by.", metavar="NAME")
    max_queue: int = option(64, "Most requests that wait for their turn.", minimum=0)
    timeout: float = option(600.0, "Seconds until a reply is ended; 0: never.", minimum=0)
    log_level: Literal["error", "warning", "info"] = option(
        "info", "What the log says; info: also a line for each request, without its texts."
    )

    @property
    def keys(self) -> list[str]:
        """List the keys of which a client needs one."""
        return [key.strip() for key in (self.api_key or "").split(",") if key.strip()]

    def address(self, port: int) -> str:
        """Return the address that clients take."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"


@config_options
def serve(
    context: typer.Context,
    *,
    which: ModelChoice,
    served: _Served,
    sampling: SamplingConfig,
    engine: EngineConfig,
    output: Annotated[Output, ("quiet",)],
) -> None:
    """Serve a model over HTTP, in the forms of OpenAI's and Anthropic's APIs.

    At http://HOST:PORT is a page with a chat and a live map of the experts; clients take
    http://HOST:PORT/v1 as the base URL. --parallel N serves N replies at once. It listens at once,
    and /health says when the model is there. Ctrl-C or SIGTERM ends it, when replies under way have
    finished or ten seconds later.
    """
    _check_installed()
    from vkmoe.gguf_file.disk import map_file
    from vkmoe.server.app import make_app
    from vkmoe.server.engine_thread import EngineThread
    from vkmoe.server.service import Service
    from vkmoe.server.serving import Server, bind

    chosen, quiet, host = which.path(context), output.quiet, served.host
    if chosen is not None:
        map_file(Path(chosen))  # raises before it listens
    if not (quiet or served.keys or host in ("127.0.0.1", "localhost", "::1")):
        note("whatever reaches this address may use the model: --api-key asks for a key")
    with log_as_notes(quiet, logging.getLevelNamesMapping()[served.log_level.upper()]):
        thread = EngineThread(lambda: _load(chosen, engine, quiet, thread.loaded), served.max_queue)
        name = served.alias or Path(chosen or "demo").stem
        service = Service(thread, name, sampling, served.timeout or None)
        listening = bind(host, served.port)
        address = served.address(listening.getsockname()[1])
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        if not quiet:
            note(f"listening at {address}; base URL for clients: {address}/v1")
        Server(make_app(service, host, served.keys), thread).run(sockets=[listening])
    if thread.error is not None:
        raise thread.error


def _check_installed() -> None:
    from importlib.util import find_spec

    needed = ("starlette", "uvicorn", "pydantic", "prometheus_client")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise VkmoeError(f"vkmoe serve needs {', '.join(missing)}", 'pip install "vkmoe[server]"')


def _load(model: str | None, config: EngineConfig, quiet: bool, progress: Progress) -> LLM:
    from vkmoe.llm import LLM

    llm = LLM(model, config, progress=progress)
    if not quiet:
        with suppress(VkmoeError):
            for line in notes_at_start(llm, config):
                note(line)
        note(f"ready, loaded in {llm.load_seconds:.1f} s")
    return llm
