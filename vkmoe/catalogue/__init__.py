"""Finds the file of a model by what a user calls it: a path, a folder, or a name.

A name is that of a repository, with or without a quant: `owner/repo`, `owner/repo:Q4_K_M`, or of a
model of Ollama's: `model:tag`. It is looked for in the caches of other programs (caches.py); what
none has may be downloaded (download.py), if it is a repository's. As in llama.cpp and Ollama,
`hf.co/` may stand before a repository, and `:latest` behind one without a choice of a quant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vkmoe.catalogue.caches import (
    KeptModel,
    is_whole,
    kept_models,
    listed,
    models_in,
    named,
    quant_of,
)
from vkmoe.config import EngineConfig
from vkmoe.errors import DownloadError, ModelFileError

if TYPE_CHECKING:
    from vkmoe.weights.placer import Progress

__all__ = ["Choose", "Fetch", "KeptModel", "fetcher", "find_model", "kept_models", "quant_of"]

_NAME = re.compile(
    r"(?:(?:https://)?(?:hf|huggingface)\.co/(?=[^/]+/))?"
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<quant>[\w.-]+))?"
)

Choose = Callable[[Sequence[KeptModel]], KeptModel]
Fetch = Callable[[str, str], Path]  # downloads "owner/repo" and a quant, "" for any


def find_model(wanted: str | Path, choose: Choose, fetch: Fetch | None = None) -> Path:
    """Return the file that is meant; a path of a file, there or not, is returned as it is.

    `choose` decides between the quants of a model where none is named; `fetch` gets a model of a
    repository that no cache has. Raises ModelFileError for a folder without a model, or with
    several, for a name that no cache has where nothing is fetched, and what `fetch` raises.
    """
    path = Path(os.path.expanduser(wanted))
    if os.path.isdir(path):
        return _only_model(path)
    match = _NAME.fullmatch(str(wanted))
    if os.path.exists(path) or match is None or path.suffix == ".gguf":
        return path
    name, quant = match["name"], match["quant"] or ""
    kept = list(kept_models())
    alike = [model for model in kept if model.name.lower() == name.lower()]
    if not alike and not quant and "/" not in name:
        return path  # a file's name, as it seems
    if "/" in name and quant.lower() == "latest" and all(x.quant != "LATEST" for x in alike):
        quant = ""
    if "/" not in name:
        fetch = None  # a hub's models have owners
    # Of a quant that several programs keep, the first one.
    found = {x.quant: x for x in reversed(alike) if fetch is None or is_whole(x.path)}
    if quant:
        found = {x: found[x] for x in [named(quant, found)] if x is not None}
    if found:
        quants = list(found.values())
        return (quants[0] if len(quants) == 1 else choose(quants)).path
    if fetch is not None:
        return fetch(name, quant)
    raise ModelFileError(f"no model on this machine is called {wanted}", _hint(alike, kept))


def fetcher(config: EngineConfig, progress: Progress | None = None) -> Fetch:
    """Return what downloads models from Hugging Face's hub, the quant that suits this machine best.

    `progress(done, total)` is called with bytes. Raises what `download` raises, and DownloadError
    where Hugging Face's library is not installed.
    """

    def fetch(name: str, quant: str) -> Path:
        try:
            from vkmoe.catalogue.download import download
        except ModuleNotFoundError as error:
            raise DownloadError(
                f"{name} is not on this machine, and to download it vkmoe needs {error.name}",
                'pip install "vkmoe[hub]"',
            ) from None
        return download(name, quant, config, progress)

    return fetch


def _only_model(folder: Path) -> Path:
    found = models_in(folder)
    if not found:
        raise ModelFileError(f"{folder} has no model", "name a folder with a GGUF file, or a file")
    if len(found) > 1:
        names = listed([str(path.relative_to(folder)) for path in found])
        raise ModelFileError(f"{folder} has {len(found)} models", f"name one: {names}")
    return found[0]


def _hint(alike: Sequence[KeptModel], kept: Sequence[KeptModel]) -> str:
    if alike:
        return f"there is {listed(sorted({x.full_name for x in alike}))}"
    if not kept:
        return (
            "give a file's path: no cache of Hugging Face, llama.cpp, LM Studio or Ollama has one"
        )
    return f"there is {listed(sorted({x.name for x in kept}))}; or give a file's path"
