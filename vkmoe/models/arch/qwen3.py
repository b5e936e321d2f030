"""Reads Qwen3 (dense): RMSNorm, q/k norm per head, grouped attention, neox RoPE, SiLU."""

from __future__ import annotations

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch.common import attention_specs, dense_specs, model_spec
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a qwen3 file."""
    metadata = Metadata(file)
    mixers = attention_specs(metadata, qk_norm="per_head")
    return model_spec(metadata, mixers, dense_specs(metadata))
