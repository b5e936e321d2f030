"""Qwen3 (dense): RMSNorm, q/k norm per head, grouped attention with neox RoPE, SiLU
feed-forward.
"""

from __future__ import annotations

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import ExpertSpec, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.metadata import Metadata

__all__ = ["common_spec", "read_spec"]

MAX_GROUP = 16  # heads per KV head that attention.comp has room for


def read_spec(file: GgufFile) -> ModelSpec:
    """The spec of a qwen3 file."""
    metadata = Metadata(file)
    spec = common_spec(metadata, experts=None)
    metadata.finish()
    return spec


def common_spec(metadata: Metadata, experts: ExpertSpec | None) -> ModelSpec:
    """What Qwen3 and Qwen3-MoE share."""
    file = metadata.file
    width = metadata.size("embedding_length")
    n_heads = metadata.size("attention.head_count", largest=4096)
    n_kv_heads = metadata.size("attention.head_count_kv", n_heads, largest=4096)
    head_dim = metadata.size("attention.key_length", max(1, width // n_heads), largest=256)
    value_dim = metadata.size("attention.value_length", head_dim, largest=256)
    if n_heads % n_kv_heads or value_dim != head_dim or head_dim % 32:
        raise ModelFileError(
            f"{file.path}: {n_heads} heads of {head_dim}, {n_kv_heads} KV heads of {value_dim}: "
            "heads must be a multiple of KV heads, widths equal and a multiple of 32",
            "the file was converted wrongly or is damaged",
        )
    if n_heads // n_kv_heads > MAX_GROUP:
        raise UnsupportedModelError(
            f"{file.path}: {n_heads} heads share {n_kv_heads} KV heads",
            f"vkmoe runs models with at most {MAX_GROUP} heads per KV head",
        )
    embeddings = file.tensors.get("token_embd.weight")
    n_vocab = embeddings.shape[0] if embeddings is not None else 0
    return ModelSpec(
        architecture=file.require("general.architecture", str),
        name=metadata.name,
        n_layers=metadata.size("block_count", largest=4096),
        width=width,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_vocab=n_vocab,
        context_length=metadata.size("context_length"),
        norm_eps=metadata.positive("attention.layer_norm_rms_epsilon"),
        rope=metadata.rope(head_dim),
        qk_norm="per_head",
        feed_forward_width=metadata.size("feed_forward_length", experts.width if experts else None),
        experts=experts,
        tied_embeddings="output.weight" not in file.tensors,
    )
