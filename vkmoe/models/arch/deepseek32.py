"""Reads DeepSeek-V3.2 and GLM-5: latent attention to positions that an indexer chooses, with the
layers of DeepSeek-V3.

An indexer chooses all positions up to a number that a file has, and attention is then V3's. So the
context ends there, and the indexer's tensors are not used. In GLM-5.2 some layers have no indexer.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import deepseek2
from vkmoe.models.arch.common import limited
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a deepseek32 or glm-dsa file."""
    metadata = Metadata(file)
    n_chosen = metadata.size("attention.indexer.top_k")
    # What an indexer computes, in which layers, and sections that text has alike.
    metadata.ignore(*(f"attention.indexer.{key}" for key in ("head_count", "key_length", "types")))
    metadata.ignore("rope.dimension_sections")
    latent = replace(deepseek2.latent_attention(metadata), indexer=True)
    why = "beyond them its indexer leaves positions out, which vkmoe does not do"
    return limited(deepseek2.latent_spec(metadata, latent), n_chosen, why)
