"""Reads which models a server has: those of a folder, or of a TOML file with options for each.

The file has a table for each model, and may name other servers:

    peers = ["http://192.168.1.7:8080"]

    [models.coder]
    model = "owner/repo:Q4_K_M"  # or a file, or a folder with one
    ctx_size = 8192              # any option of the engine or of sampling
    chat_template_file = "coder.jinja"
    aliases = ["gpt-4"]
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vkmoe.catalogue.caches import bare_stem, models_in
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import ModelFileError, UsageError

Config = TypeVar("Config", EngineConfig, SamplingConfig)

TAG = ":latest"  # of a model's name that has no other, in Ollama's API
_OWN = ("model", "aliases", "chat_template", "chat_template_file")  # beside options
_MOST_BYTES = 1 << 20  # of a file


@dataclass(frozen=True)
class Listed:
    """Describes a model that a server may load."""

    name: str
    model: str  # a file, a folder or a name
    engine: EngineConfig
    sampling: SamplingConfig
    chat_template: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peer:
    """Names another server, and the key that it asks for."""

    url: str
    api_key: str | None = None


@dataclass(frozen=True)
class Roster:
    """Holds the models of a server, and the servers that have others."""

    models: tuple[Listed, ...]
    peers: tuple[Peer, ...] = ()
    reread: Callable[[], Roster] | None = None  # of models that may come and go


def bare_name(name: str) -> str:
    """Return a name without the tag that it has if it has no other."""
    return name.removesuffix(TAG)


def read_roster(path: Path, engine: EngineConfig, sampling: SamplingConfig) -> Roster:
    """Read the models of a folder or a file; options that it does not set are those given.

    Raises ModelFileError for a folder without models, UsageError for a file that is wrong.
    """
    if path.is_dir():
        found = _of_folder(path)
        if not found:
            raise ModelFileError(f"{path} has no model", "name a folder with GGUF files")
        models = tuple(Listed(name, str(file), engine, sampling) for name, file in found.items())
        return Roster(models, reread=partial(read_roster, path, engine, sampling))
    given = _table(path)
    if unknown := sorted(given.keys() - {"models", "peers"}):
        raise _wrong(path, f"it has {unknown[0]!r}", "a file of models has models and peers")
    tables = given.get("models", {})
    if not isinstance(tables, dict) or not all(isinstance(x, dict) for x in tables.values()):
        raise _wrong(path, "models are no tables", "write [models.NAME]")
    models = tuple(_listed(path, name, table, engine, sampling) for name, table in tables.items())
    peers = tuple(_peer(path, each) for each in _sequence(path, given, "peers"))
    if not models:
        raise _wrong(path, "it has no model", "write [models.NAME] and model = FILE below")
    names = [bare_name(name) for each in models for name in (each.name, *each.aliases)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise _wrong(path, f"two models are called {twice[0]!r}", "give each its own names")
    return Roster(models, peers)


def _of_folder(folder: Path) -> dict[str, Path]:
    """Find the models of a folder by their names; where two have one, the folders within tell."""
    files = models_in(folder)
    names = [bare_stem(file) for file in files]
    return {
        str(file.relative_to(folder).with_name(name)) if names.count(name) > 1 else name: file
        for name, file in zip(names, files, strict=True)
    }


def _table(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _wrong(path, "it is larger than 1 MiB", "name a file with a table for each model")
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "see --models") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(
            path, f"it is no TOML: {error}", "see docs/server.md for an example"
        ) from error


def _wrong(path: Path, what: str, hint: str) -> UsageError:
    return UsageError(f"{path}: {what}", hint)


def _sequence(path: Path, table: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = table.get(name, [])
    if not isinstance(found, list):
        raise _wrong(path, f"{name} is no list", f'write {name} = ["..."]')
    return found


def _listed(
    path: Path,
    name: str,
    table: dict[str, Any],
    engine: EngineConfig,
    sampling: SamplingConfig,
) -> Listed:
    model = table.get("model")
    if not isinstance(model, str):
        raise _wrong(path, f"models.{name} has no model", 'write model = "FILE"')
    aliases = _sequence(path, table, "aliases")
    if not all(isinstance(alias, str) for alias in aliases):
        raise _wrong(path, f"aliases of models.{name} are no texts", 'write aliases = ["NAME"]')
    options = {key: value for key, value in table.items() if key not in _OWN}
    known = {item.name for kind in (EngineConfig, SamplingConfig) for item in fields(kind)}
    if unknown := sorted(options.keys() - known):
        raise _wrong(
            path,
            f"models.{name} has {unknown[0]!r}, which is no option",
            "options are those of `vkmoe serve --help`, with _ for -",
        )
    beside = path.parent / os.path.expanduser(model)
    if not beside.exists() and model.endswith(".gguf"):
        raise _wrong(path, f"models.{name}: there is no file {beside}", "name it from that folder")
    return Listed(
        name,
        str(beside) if beside.exists() else model,
        _changed(path, engine, options),
        _changed(path, sampling, options),
        _template(path, name, table),
        tuple(aliases),
    )


def _changed(path: Path, config: Config, options: Mapping[str, Any]) -> Config:
    """Return a config with the options that are its own. Raises UsageError."""
    names = {item.name for item in fields(config)}
    try:
        return replace(config, **{key: options[key] for key in options.keys() & names})
    except UsageError as error:
        raise _wrong(path, str(error), error.hint) from error


def _template(path: Path, name: str, table: Mapping[str, Any]) -> str | None:
    text, file = table.get("chat_template"), table.get("chat_template_file")
    if file is not None:
        try:
            text = (path.parent / os.path.expanduser(str(file))).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise _wrong(
                path,
                f"chat_template_file of models.{name}, {file}, cannot be read: {reason}",
                f"name a file with Jinja, seen from {path.parent}",
            ) from error
    if text is not None and not isinstance(text, str):
        raise _wrong(path, f"chat_template of models.{name} is no text", "write it as Jinja")
    return text


def _peer(path: Path, given: Any) -> Peer:
    table = {"url": given} if isinstance(given, str) else given
    if not isinstance(table, dict) or not _is_address(table.get("url")):
        raise _wrong(path, f"{given!r} is no server", 'write peers = ["http://HOST:PORT"]')
    url, key = table["url"], table.get("api_key")
    if unknown := sorted(table.keys() - {"url", "api_key"}):
        raise _wrong(path, f"the peer {url} has {unknown[0]!r}", "a peer has url and api_key")
    if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
        raise _wrong(path, f"the api_key of {url} is none", 'write api_key = "KEY" in ASCII')
    return Peer(url.rstrip("/").removesuffix("/v1"), key)


def _is_address(url: Any) -> bool:
    """Say whether a value is a web address with a host, and a port if it has one."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
