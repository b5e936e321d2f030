"""Finds the file of what guesses tokens ahead, where the model's own has nothing of the kind.

Such files lie beside the model. Those called `mtp-*.gguf` have a layer, the metadata of the model
they are for, and none of its layers; those with `assistant` in their name have a drafter.
"""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from vkmoe.config import EngineConfig
from vkmoe.errors import UnsupportedModelError, VkmoeError
from vkmoe.facts import AttentionSpec, LayerSpec, ModelSpec
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.models import AheadFile, ModelFile, drafter_of, has_ahead, read_whole_spec

log = logging.getLogger("vkmoe")
PATTERNS = ("mtp-*.gguf", "*assistant*.gguf")


def with_ahead(model: ModelFile, config: EngineConfig) -> ModelFile:
    """Return the model with the file that guesses for it: that of an option, its own, or another.

    A file that was asked for must fit: raises UnsupportedModelError, and what reading it raises.
    """
    if config.draft_model is not None:
        return replace(model, ahead=_open(Path(config.draft_model), model))
    if model.ahead is not None or config.draft not in ("auto", "mtp"):
        return model
    folder = Path(model.file.path).parent
    for path in sorted(path for pattern in PATTERNS for path in folder.glob(pattern)):
        try:
            found = _open(path, model)
            if _name(found.file) != _name(model.file):
                found.file.close()
                continue
        except (VkmoeError, OSError) as error:
            log.debug("%s is not for this model: %s", path, error)
            continue
        log.info("tokens can be guessed ahead by %s", path.name)
        return replace(model, ahead=found)
    return model


def _open(path: Path, model: ModelFile) -> AheadFile:
    """Open a file for a model; closed where it does not fit."""
    with ExitStack() as unless_fitting:
        file = open_gguf(path)
        unless_fitting.callback(file.close)
        guesser: LayerSpec | ModelSpec | None = drafter_of(file)
        if isinstance(guesser, ModelSpec):
            fits = _fits(guesser, file, model.spec)
        else:
            spec = read_whole_spec(file)
            guesser, fits = spec.ahead, _sizes(spec) == _sizes(model.spec)
            if guesser is None or not has_ahead(file, spec):
                raise UnsupportedModelError(
                    f"{path} has no layer that guesses tokens ahead", "leave out --draft-model"
                )
        if not fits:
            raise UnsupportedModelError(
                f"{path} guesses tokens for another model than {model.spec.name}",
                "name the file that was made with the model",
            )
        unless_fitting.pop_all()
    return AheadFile(file, guesser)


def _fits(drafter: ModelSpec, file: GgufFile, spec: ModelSpec) -> bool:
    """Say whether a drafter reads states, tokens, keys and values such as a model has.

    It must be no wider, as both share a workspace, and have norms with the same epsilon.
    """
    kept = {mixer.cached for mixer in spec.mixers if isinstance(mixer, AttentionSpec)}
    seen = {mixer.cached for mixer in drafter.mixers if isinstance(mixer, AttentionSpec)}
    width = file.require(f"{drafter.architecture}.embedding_length_out", int)
    theirs, ours = ((x.n_vocab, x.norm_eps) for x in (drafter, spec))
    return theirs == ours and drafter.width <= width == spec.width and seen <= kept


def _sizes(spec: ModelSpec) -> tuple[object, ...]:
    """List what is alike in both files; which layers are dense may be known by their tensors."""
    return spec.architecture, spec.width, spec.n_layers, spec.layers[-1]


def _name(file: GgufFile) -> str:
    """Name the model that a file was made from, or for."""
    name = re.sub("[^a-z0-9]", "", file.get("general.name", str, "").lower())
    return name.removesuffix("assistant")
