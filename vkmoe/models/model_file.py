"""This module has an open model file: the file itself, and what was read of it before any weights.

It is opened once for each load and handed on: to the plan, the loader and whatever reads on from
the file while the model runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from vkmoe.closing import Closing
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile, TensorInfo, open_gguf
from vkmoe.models import read_spec
from vkmoe.models.tensors import ModelTensors, read_tensors

__all__ = ["ModelFile", "open_model"]


@dataclass(frozen=True)
class ModelFile(Closing):
    """Holds a file that vkmoe can run, its model's description, and where the tensors lie."""

    file: GgufFile
    spec: ModelSpec
    tensors: ModelTensors

    @property
    def expert_tensors(self) -> tuple[tuple[TensorInfo, ...], ...]:
        """List the tensors of the routed experts, for each MoE layer."""
        return tuple(
            tuple(part for matrix in block.matrices for part in matrix.parts)
            for block in self.tensors.expert_layers
        )

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a model file and read all but its weights and its tokenizer.

    Raises ModelFileError, UnsupportedModelError, with the file closed.
    """
    file = open_gguf(path)
    try:
        spec = read_spec(file)
        return ModelFile(file, spec, read_tensors(file, spec))
    except BaseException:
        file.close()
        raise
