"""Appends the attention of a layer to a program: grouped-query, or latent.

Grouped: q/k/v, attention, its join, output projection. Latent (DeepSeek-V2, arXiv:2405.04434,
section 2.1, absorbed form): q and the compressed row (compressed queries take a norm and a
projection more), the keys' projection applied to the queries, attention, its join, the values'
projection of what was mixed, output projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkmoe.facts import LatentSpec, ModelSpec
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.models.weights import AttentionWeights, LatentWeights
from vkmoe.models.workspace import KvAddresses, LatentWorkspace, Workspace
from vkmoe.ops.attention import AttentionTensors, KvCache, attention
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape
from vkmoe.ops.context import OpContext
from vkmoe.ops.latent_attention import LatentCache, LatentQkv, latent_attention
from vkmoe.ops.matvec import HeadParts, matvec, matvec_heads, matvec_residual
from vkmoe.ops.norms import NormInput, NormOutput, rms_norm
from vkmoe.ops.tuning import Tuning

__all__ = ["AttentionBlock"]


@dataclass(frozen=True)
class AttentionBlock:
    """Appends the attention of layers. `shape` is that of a layer without a window."""

    spec: ModelSpec
    tuning: Tuning
    space: Workspace
    shape: AttentionShape | LatentShape
    split: AttentionSplit
    rope_table: int

    def append(
        self,
        program: Program,
        index: int,
        weights: AttentionWeights | LatentWeights,
        cache: KvAddresses,
        norm: NormInput,
        leaves: NormOutput,
    ) -> int:
        """hidden += attention of layer `index`. Returns the number of partials it leaves."""
        op, space = OpContext(program, self.tuning).of_layer(index), self.space
        op.mark("attention")
        if isinstance(weights, LatentWeights):
            self._latent(op, weights, cache, norm)
            bias = 0
        else:
            self._grouped(op, self.spec.window(index), weights, cache, norm)
            bias = weights.output_bias
        output = op.named("output")
        return matvec_residual(output, weights.output, space.attended, leaves, bias=bias)

    def _grouped(
        self,
        op: OpContext,
        window: int,
        weights: AttentionWeights,
        cache: KvAddresses,
        norm: NormInput,
    ) -> None:
        space, shape = self.space, self.shape
        assert isinstance(shape, AttentionShape), op.label
        matvec(
            op.named("qkv"),
            (weights.q, weights.k, weights.v),
            space.gained,
            space.qkv,
            norm,
            bias=weights.qkv_bias,
        )
        attention(
            op.program,
            replace(shape, window=window),
            self.split,
            KvCache(
                cache.keys,
                cache.values,
                self.rope_table,
                weights.q_gain,
                weights.k_gain,
                weights.sinks,
            ),
            space.qkv,
            AttentionTensors(space.params, space.attention_partials, space.attended),
            f"{op.label} attention",
        )

    def _latent(
        self, op: OpContext, weights: LatentWeights, cache: KvAddresses, norm: NormInput
    ) -> None:
        space, shape = self.space, self.shape
        latent, tensors = self.spec.latent, space.latent
        assert latent is not None and tensors is not None, op.label
        assert isinstance(shape, LatentShape), op.label
        n_heads, scratch = self.spec.n_heads, space.norm_partials
        q, kv_offset = self._queries(op, weights, norm, latent, tensors)
        heads = HeadParts(q, stride=latent.query_dim)
        matvec_heads(op.named("absorbed"), weights.k_up, n_heads, heads, tensors.absorbed, scratch)
        latent_attention(
            op.program,
            shape,
            self.split,
            LatentCache(cache.keys, self.rope_table, weights.kv_gain),
            LatentQkv(tensors.absorbed, q, space.qkv, kv_offset=kv_offset),
            AttentionTensors(space.params, space.attention_partials, tensors.mixed),
            f"{op.label} attention",
        )
        heads = HeadParts(tensors.mixed, stride=latent.kv_rank)
        matvec_heads(op.named("values"), weights.v_up, n_heads, heads, space.attended, scratch)

    def _queries(
        self,
        op: OpContext,
        weights: LatentWeights,
        norm: NormInput,
        latent: LatentSpec,
        tensors: LatentWorkspace,
    ) -> tuple[TensorRef, int]:
        """Append what makes the heads' queries, and the compressed keys and values.

        Returns a tensor whose first words are the queries, and the word of `qkv` at which the
        compressed keys and values begin.
        """
        space, down, q_kv = self.space, weights.q_down, op.named("q/kv")
        if down is None or tensors.q is None or tensors.q_normed is None:
            matvec(q_kv, (weights.q, weights.kv), space.gained, space.qkv, norm)
            return space.qkv, weights.q.n_rows
        matvec(q_kv, (down, weights.kv), space.gained, space.qkv, norm)
        rms_norm(
            op.named("q norm"),
            space.qkv,
            tensors.q_normed,
            latent.q_rank,
            weights.q_gain,
            self.spec.norm_eps,
        )
        scratch = space.norm_partials
        matvec(op.named("q"), (weights.q,), tensors.q_normed, tensors.q, scratch=scratch)
        return tensors.q, latent.q_rank
