"""Finds the file of a model by what a user calls it: a path, a folder, or a name.

A name is that of a repository, with or without a quant: `owner/repo`, `owner/repo:Q4_K_M`, or of a
model of Ollama's: `model:tag`. It is looked for in the caches of other programs (caches.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from vkmoe.catalogue.caches import KeptModel, kept_models, models_in, quant_of
from vkmoe.errors import ModelFileError

__all__ = ["Choose", "KeptModel", "find_model", "kept_models", "quant_of"]

_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<quant>[\w.-]+))?")
_MOST_NAMED = 8  # models that an error lists

Choose = Callable[[Sequence[KeptModel]], KeptModel]


def find_model(wanted: str | Path, choose: Choose) -> Path:
    """Return the file that is meant; a path of a file, there or not, is returned as it is.

    `choose` decides between the quants of a model where none is named. Raises ModelFileError for a
    folder without a model, or with several, and for a name that no cache has.
    """
    path = Path(wanted).expanduser()
    if path.is_dir():
        return _only_model(path)
    match = _NAME.fullmatch(str(wanted))
    if path.exists() or match is None or path.suffix == ".gguf":
        return path
    kept = list(kept_models())
    alike = [model for model in kept if model.name.lower() == match["name"].lower()]
    if not alike and not match["quant"] and "/" not in match["name"]:
        return path  # a file's name, as it seems
    quant = (match["quant"] or "").upper()
    # Of a quant that several programs keep, the first one.
    found = {model.quant: model for model in reversed(alike) if quant in ("", model.quant)}
    if not found:
        raise ModelFileError(f"no model on this machine is called {wanted}", _hint(alike, kept))
    quants = list(found.values())
    return (quants[0] if len(quants) == 1 else choose(quants)).path


def _only_model(folder: Path) -> Path:
    found = models_in(folder)
    if not found:
        raise ModelFileError(f"{folder} has no model", "name a folder with a GGUF file, or a file")
    if len(found) > 1:
        names = _listed([str(path.relative_to(folder)) for path in found])
        raise ModelFileError(f"{folder} has {len(found)} models", f"name one: {names}")
    return found[0]


def _hint(alike: Sequence[KeptModel], kept: Sequence[KeptModel]) -> str:
    if alike:
        return f"there is {_listed(sorted({f'{x.name}:{x.quant}' for x in alike}))}"
    if not kept:
        return (
            "give a file's path: no cache of Hugging Face, llama.cpp, LM Studio or Ollama has one"
        )
    return f"there is {_listed(sorted({x.name for x in kept}))}; or give a file's path"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
