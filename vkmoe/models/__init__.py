"""Turns a model's file into its description, and that into a program; arch/ has the architectures.

A program has decode rows (1, 2, 4 or 8) or the rows of a prompt's chunk. The two kinds differ by
rounding, never by their number. Decode rows are computed one after the other or side by side, each
as if it were alone. Kernels of prompts read each weight once for a tile of rows; pairs of a row and
a chosen expert are sorted by expert, and the results of a row are added up by rank, so that no sum
depends on the sorting. Experts without a slot may be brought to the device once for each chunk.

An open file holds what was read of it before any weights: it is opened once for each load and
handed on. Weights arrive as matrices with addresses: nothing here sees a byte offset.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from vkmoe.closing import Closing
from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile, TensorInfo, open_gguf
from vkmoe.models.arch import (
    bailingmoe2,
    deepseek2,
    deepseek32,
    dots1,
    ernie4_5_moe,
    glm4moe,
    gpt_oss,
    hy_v3,
    llama,
    minimax_m2,
    mistral4,
    olmoe,
    qwen2moe,
    qwen3,
    qwen3moe,
    qwen35,
)
from vkmoe.models.tensors import ModelTensors, read_tensors

__all__ = ["ARCHITECTURES", "ModelFile", "open_model", "read_spec"]

ARCHITECTURES = {
    "bailingmoe2": bailingmoe2.read_spec,
    "deepseek2": deepseek2.read_spec,
    "deepseek32": deepseek32.read_spec,
    "dots1": dots1.read_spec,
    "ernie4_5-moe": ernie4_5_moe.read_spec,
    "glm-dsa": deepseek32.read_spec,
    "glm4moe": glm4moe.read_spec,
    "gpt-oss": gpt_oss.read_spec,
    "hy_v3": hy_v3.read_spec,
    "llama": llama.read_spec,
    "minimax-m2": minimax_m2.read_spec,
    "mistral4": mistral4.read_spec,
    "olmoe": olmoe.read_spec,
    "qwen2moe": qwen2moe.read_spec,
    "qwen3": qwen3.read_spec,
    "qwen35": qwen35.read_spec,
    "qwen35moe": qwen35.read_spec,
    "qwen3moe": qwen3moe.read_spec,
    "qwen3next": qwen35.read_spec,
}


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a model file.

    Raises UnsupportedModelError for what vkmoe does not know, ModelFileError for absurd metadata.
    """
    architecture = file.require("general.architecture", str)
    reader = ARCHITECTURES.get(architecture)
    if reader is None:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not supported",
            f"vkmoe runs {', '.join(sorted(ARCHITECTURES))}",
        )
    return reader(file)


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
    """Open a model file and read all but its weights and its tokenizer; closed on errors."""
    file = open_gguf(path)
    try:
        spec = read_spec(file)
        return ModelFile(file, spec, read_tensors(file, spec))
    except BaseException:
        file.close()
        raise
