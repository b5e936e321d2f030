"""Turns a model's file into its description, and that into a program; arch/ has the architectures.

Never sees a byte offset: weights arrive as matrices with addresses.
"""

from __future__ import annotations

from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import deepseek2, gpt_oss, llama, olmoe, qwen2moe, qwen3, qwen3moe

__all__ = ["ARCHITECTURES", "read_spec"]

ARCHITECTURES = {
    "deepseek2": deepseek2.read_spec,
    "gpt-oss": gpt_oss.read_spec,
    "llama": llama.read_spec,
    "olmoe": olmoe.read_spec,
    "qwen2moe": qwen2moe.read_spec,
    "qwen3": qwen3.read_spec,
    "qwen3moe": qwen3moe.read_spec,
}


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a model file.

    Raises UnsupportedModelError for an architecture, key or value vkmoe does not know,
    ModelFileError for missing or absurd metadata.
    """
    architecture = file.require("general.architecture", str)
    reader = ARCHITECTURES.get(architecture)
    if reader is None:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not supported",
            f"vkmoe runs {', '.join(sorted(ARCHITECTURES))}",
        )
    return reader(file)
