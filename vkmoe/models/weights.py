"""A model's weights as the program sees them: matrices and gains with addresses, spans with
offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.program import Range
from vkmoe.ops.experts import ExpertShape
from vkmoe.ops.matvec import Matrix

__all__ = ["LayerWeights", "ModelWeights"]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Gains are addresses of f32 vectors."""

    attention_gain: int
    q: Matrix
    k: Matrix
    v: Matrix
    output: Matrix
    q_gain: int
    k_gain: int
    feed_forward_gain: int
    router: Matrix | None  # None: a dense layer, whose only span is `dense_span`
    expert_shape: ExpertShape
    expert_homes: tuple[Range, ...]  # the bytes the routed experts may lie in
    dense_span: int = 0


@dataclass(frozen=True)
class ModelWeights:
    """All weights, the rotary table and the expert table, by address."""

    embeddings: Matrix
    output_gain: int
    output: Matrix
    layers: tuple[LayerWeights, ...]
    rope_table: int
    expert_table: Range
