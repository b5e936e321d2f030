"""The memory plan of a model on a device, without loading anything (`vkmoe info`)."""

from __future__ import annotations

from typing import Literal

from vkmoe.config import EngineConfig
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.decoder import Workspace
from vkmoe.models.tensors import read_tensors
from vkmoe.ops.attention import AttentionShape, choose_split
from vkmoe.ops.tuning import choose_tuning
from vkmoe.placement.host import available_bytes
from vkmoe.placement.loader import weight_bytes
from vkmoe.placement.planner import plan

__all__ = ["attention_shape", "preview"]

_QK_NORMS: dict[str, Literal["none", "per_head", "full_width"]] = {
    "none": "none",
    "head": "per_head",
    "full": "full_width",
}


def attention_shape(spec: ModelSpec, ctx_size: int, kv_type: str) -> AttentionShape:
    """The shape of one layer's attention with `ctx_size` places in its cache."""
    return AttentionShape(
        spec.n_heads,
        spec.n_kv_heads,
        spec.head_dim,
        spec.rope.dim,
        ctx_size,
        spec.rope.style,
        _QK_NORMS[spec.qk_norm],
        spec.norm_eps,
        spec.head_dim**-0.5,
        "F16" if kv_type == "f16" else "F32",
    )


def preview(
    file: GgufFile, spec: ModelSpec, config: EngineConfig, device: DeviceInfo
) -> MemoryPlan:
    """What loading `file` on `device` would decide.

    Raises ModelFileError and UnsupportedModelError for its tensors, UsageError and
    OutOfMemoryError as the planner does.
    """
    sizes = weight_bytes(read_tensors(file, spec))
    tuning = choose_tuning(device)
    shape = attention_shape(spec, config.ctx_size or spec.context_length, config.kv_type)
    scratch = Workspace(spec, tuning, choose_split(shape, tuning), shape).n_bytes
    return plan(config, spec, device, sizes, scratch, available_bytes())
