"""Reads from a model file all that is wanted before its weights are loaded, and checks it.

Loading may take minutes: what is wrong with the file or its tokenizer is said before.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import ModelSpec
from vkmoe.generate.tokenizer import Tokenizer
from vkmoe.gguf_file import TensorInfo, open_gguf
from vkmoe.models import read_spec
from vkmoe.models.tensors import read_tensors

__all__ = ["ModelFile", "read_model_file"]


class ModelFile(NamedTuple):
    """What a file vkmoe can run says of itself."""

    spec: ModelSpec
    tokenizer: Tokenizer
    expert_layers: tuple[tuple[TensorInfo, ...], ...]  # expert tensors of each MoE layer


def read_model_file(path: Path) -> ModelFile:
    """Raises ModelFileError, UnsupportedModelError; also for a tokenizer that knows tokens the
    model does not have.
    """
    hint = "the file was converted wrongly or is damaged"
    with open_gguf(path) as file:
        spec = read_spec(file)
        tensors = read_tensors(file, spec)  # what the model lacks comes before its tokenizer's lack
        try:
            tokenizer = Tokenizer.from_metadata(file.metadata)
        except (ModelFileError, UnsupportedModelError) as error:
            raise type(error)(f"{path}: {error}", error.hint or hint) from error
    if tokenizer.n_vocab > spec.n_vocab:
        raise ModelFileError(
            f"{path}: the tokenizer has {tokenizer.n_vocab} tokens, the model {spec.n_vocab}", hint
        )
    experts = tuple(
        tuple(part for matrix in block.matrices for part in matrix.parts)
        for block in tensors.expert_layers
    )
    return ModelFile(spec, tokenizer, experts)
