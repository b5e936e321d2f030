"""This module finds a model's file, and reads its tokenizer before the weights are loaded."""

from __future__ import annotations

import os
from functools import partial
from importlib.resources import files
from pathlib import Path

from vkmoe.catalogue import Fetch, find_model
from vkmoe.catalogue.choose import best_quant
from vkmoe.config import EngineConfig
from vkmoe.errors import ModelFileError
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.models import ModelFile


def demo_model_path() -> Path:
    """Return the path of the small model that comes with vkmoe."""
    return Path(str(files("vkmoe") / "data" / "demo.gguf"))


def file_of(model: str | os.PathLike[str] | None, config: EngineConfig, fetch: Fetch) -> Path:
    """Find the file of a model; None: the demo model's. Raises what `find_model` does."""
    if model is None:
        return demo_model_path()
    return find_model(os.fspath(model), partial(best_quant, config=config), fetch)


def read_tokenizer(model: ModelFile) -> Tokenizer:
    """Read a model's tokenizer, before its weights are loaded, which may take minutes.

    Raises ModelFileError, UnsupportedModelError; also for a tokenizer that knows tokens the model
    does not have.
    """
    tokenizer = Tokenizer.from_file(model.file)
    if tokenizer.n_vocab > model.spec.n_vocab:
        raise ModelFileError(
            f"{model.file.path}: the tokenizer has {tokenizer.n_vocab} tokens, the model "
            f"{model.spec.n_vocab}",
            "the file was converted wrongly or is damaged",
        )
    return tokenizer
