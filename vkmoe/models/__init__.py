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
from dataclasses import dataclass, replace

from vkmoe.closing import Closing
from vkmoe.errors import ModelFileError, UnsupportedModelError, UsageError
from vkmoe.facts import LayerSpec, ModelSpec
from vkmoe.gguf_file import GgufFile, TensorInfo, open_gguf
from vkmoe.models.arch import (
    bailingmoe2,
    dots1,
    ernie4_5_moe,
    gemma4,
    glm4moe,
    gpt_oss,
    hunyuan_moe,
    hy_v3,
    latent,
    llama,
    minimax_m2,
    olmoe,
    qwen,
    qwen35,
)
from vkmoe.models.tensors import ModelTensors, read_ahead, read_tensors

__all__ = ["ARCHITECTURES", "AheadFile", "ModelFile", "model_of", "open_model", "read_spec"]

ARCHITECTURES = {
    "bailingmoe2": bailingmoe2.read_spec,
    "deepseek2": latent.read_deepseek2,
    "deepseek32": latent.read_deepseek32,
    "dots1": dots1.read_spec,
    "ernie4_5-moe": ernie4_5_moe.read_spec,
    "gemma4": gemma4.read_spec,
    "glm-dsa": latent.read_deepseek32,
    "glm4moe": glm4moe.read_spec,
    "gpt-oss": gpt_oss.read_spec,
    "hunyuan-moe": hunyuan_moe.read_spec,
    "hy_v3": hy_v3.read_spec,
    "llama": llama.read_spec,
    "minimax-m2": minimax_m2.read_spec,
    "mistral4": latent.read_mistral4,
    "olmoe": olmoe.read_spec,
    "qwen2moe": qwen.read_qwen2moe,
    "qwen3": qwen.read_qwen3,
    "qwen35": qwen35.read_spec,
    "qwen35moe": qwen35.read_spec,
    "qwen3moe": qwen.read_qwen3moe,
    "qwen3next": qwen35.read_spec,
}


# Of small models that guess tokens for another; `drafter_of` reads them.
DRAFTERS = {"gemma4-assistant": gemma4.read_drafter}


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a model file, without the layer that guesses tokens ahead.

    Raises UnsupportedModelError for what vkmoe does not know, ModelFileError for absurd metadata.
    """
    return replace(read_whole_spec(file), ahead=None)


def read_whole_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a file with the layer that guesses, whether the file has it or not."""
    architecture = file.require("general.architecture", str)
    if architecture in DRAFTERS:
        raise _no_model(file, "a small model that guesses tokens for another")
    reader = ARCHITECTURES.get(architecture)
    if reader is None:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not supported",
            f"vkmoe runs {', '.join(sorted(ARCHITECTURES))}",
        )
    return reader(file)


@dataclass(frozen=True)
class AheadFile:
    """Holds the file of what guesses tokens ahead, and its description: a layer, or a drafter."""

    file: GgufFile
    guesser: LayerSpec | ModelSpec


@dataclass(frozen=True)
class ModelFile(Closing):
    """Holds a file that vkmoe can run, its model's description, and where the tensors lie.

    The layer that guesses tokens `ahead` is not a part of these, unless `guessing` makes it one.
    """

    file: GgufFile
    spec: ModelSpec
    tensors: ModelTensors
    ahead: AheadFile | None = None  # None: no file has one

    @property
    def expert_tensors(self) -> tuple[tuple[TensorInfo, ...], ...]:
        """List the tensors of the routed experts, for each MoE layer."""
        return tuple(
            tuple(part for matrix in block.matrices for part in matrix.parts)
            for block in self.tensors.expert_layers
        )

    def guessing(self) -> ModelFile:
        """Return the model with the layer that guesses tokens ahead; both share the open files.

        Raises UsageError where there is none, and what `read_tensors` raises.
        """
        if self.ahead is None:
            raise UsageError(
                f"{self.file.path} has no layer that guesses tokens ahead",
                "name a file that has it with --draft-model, or use --draft lookup",
            )
        guesser = self.ahead.guesser
        if isinstance(guesser, ModelSpec):
            spec = replace(self.spec, drafter=guesser)
        else:
            spec = replace(self.spec, ahead=guesser)
        tensors = replace(self.tensors, ahead=read_ahead(self.ahead.file, spec))
        return replace(self, spec=spec, tensors=tensors)

    def close(self) -> None:
        """Let go of the files."""
        self.file.close()
        if self.ahead is not None:
            self.ahead.file.close()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a model file and read all but its weights and its tokenizer; closed on errors."""
    file = open_gguf(path)
    try:
        return model_of(file)
    except BaseException:
        file.close()
        raise


def model_of(file: GgufFile) -> ModelFile:
    """Read all of a model file but its weights and its tokenizer."""
    whole, spec = read_whole_spec(file), read_spec(file)
    if is_ahead_alone(file, spec):
        raise _no_model(file, "the layer that guesses tokens ahead for one")
    ahead = AheadFile(file, whole.ahead) if whole.ahead and has_ahead(file, spec) else None
    return ModelFile(file, spec, read_tensors(file, spec), ahead)


def drafter_of(file: GgufFile) -> ModelSpec | None:
    """Read the spec of a drafter; None: the file has none. Raises as `read_spec` does."""
    reader = DRAFTERS.get(file.require("general.architecture", str))
    return reader(file) if reader is not None else None


def _no_model(file: GgufFile, found: str) -> ModelFileError:
    """Say that a file has but a part that others need."""
    hint = "give the model's file, and this one with --draft-model"
    return ModelFileError(f"{file.path} has no model, but {found}", hint)


def has_ahead(file: GgufFile, spec: ModelSpec) -> bool:
    """Say whether a file has the layer that guesses, which some converters leave out."""
    return f"blk.{spec.n_layers}.nextn.eh_proj.weight" in file.tensors


def is_ahead_alone(file: GgufFile, spec: ModelSpec) -> bool:
    """Say whether a file has the layer that guesses, and none of the model's."""
    return has_ahead(file, spec) and not any(name.startswith("blk.0.") for name in file.tensors)
