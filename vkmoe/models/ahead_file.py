"""Finds the file that has the layer which guesses tokens ahead, where the model's own has none.

Such files are called `mtp-*.gguf` and lie beside the model. They have the metadata of the model
they are for, and none of its layers.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from vkmoe.config import EngineConfig
from vkmoe.errors import UnsupportedModelError, VkmoeError
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.models import AheadFile, ModelFile, has_ahead, read_whole_spec

log = logging.getLogger("vkmoe")
PATTERN = "mtp-*.gguf"


def with_ahead(model: ModelFile, config: EngineConfig) -> ModelFile:
    """Return the model with the file that guesses for it: that of an option, its own, or another.

    A file that was asked for must fit: raises UnsupportedModelError, and what reading it raises.
    """
    if config.draft_model is not None:
        return replace(model, ahead=_open(Path(config.draft_model), model))
    if model.ahead is not None or config.draft not in ("auto", "mtp"):
        return model
    for path in sorted(Path(model.file.path).parent.glob(PATTERN)):
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
        spec, wanted = read_whole_spec(file), model.spec
        if spec.ahead is None or not has_ahead(file, spec):
            raise UnsupportedModelError(
                f"{path} has no layer that guesses tokens ahead", "leave out --draft-model"
            )
        if _sizes(spec) != _sizes(wanted):
            raise UnsupportedModelError(
                f"{path} guesses tokens for another model than {wanted.name}",
                "name the file that was made with the model",
            )
        unless_fitting.pop_all()
    return AheadFile(file, spec.ahead)


def _sizes(spec: ModelSpec) -> tuple[object, ...]:
    """List what is alike in both files; which layers are dense may be known by their tensors."""
    return spec.architecture, spec.width, spec.n_layers, spec.layers[-1]


def _name(file: GgufFile) -> str:
    """Name what a file was made from."""
    return file.get("general.name", str, "")
