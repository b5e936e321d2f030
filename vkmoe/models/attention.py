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
from vkmoe.ops.attention import KvCache, attention
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape
from vkmoe.ops.latent_attention import LatentCache, latent_attention
from vkmoe.ops.matvec import Matrix, matvec, matvec_heads, matvec_residual
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
        label = f"layer {index}"
        program.mark("attention", index)
        if isinstance(weights, LatentWeights):
            self._latent(program, label, weights, cache, norm)
            bias = 0
        else:
            self._grouped(program, index, weights, cache, norm)
            bias = weights.output_bias
        return matvec_residual(
            program,
            self.tuning,
            weights.output,
            self.space.attended,
            leaves,
            f"{label} output",
            bias=bias,
        )

    def _grouped(
        self,
        program: Program,
        index: int,
        weights: AttentionWeights,
        cache: KvAddresses,
        norm: NormInput,
    ) -> None:
        space, label, shape = self.space, f"layer {index}", self.shape
        assert isinstance(shape, AttentionShape), label
        matvec(
            program,
            self.tuning,
            (weights.q, weights.k, weights.v),
            space.gained,
            space.qkv,
            f"{label} qkv",
            norm,
            bias=weights.qkv_bias,
        )
        attention(
            program,
            replace(shape, window=self.spec.window(index)),
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
            space.params,
            space.attention_partials,
            space.attended,
            f"{label} attention",
        )

    def _latent(
        self,
        program: Program,
        label: str,
        weights: LatentWeights,
        cache: KvAddresses,
        norm: NormInput,
    ) -> None:
        space, shape = self.space, self.shape
        latent, tensors = self.spec.latent, space.latent
        assert latent is not None and tensors is not None, label
        assert isinstance(shape, LatentShape), label
        q, kv_offset = self._queries(program, label, weights, norm, latent, tensors)
        absorbed, mixed = tensors.absorbed, tensors.mixed
        self._heads(program, weights.k_up, q, absorbed, f"{label} absorbed", latent.query_dim)
        latent_attention(
            program,
            shape,
            self.split,
            LatentCache(cache.keys, self.rope_table, weights.kv_gain),
            absorbed,
            q,
            space.qkv,
            space.params,
            space.attention_partials,
            mixed,
            f"{label} attention",
            kv_offset=kv_offset,
        )
        self._heads(program, weights.v_up, mixed, space.attended, f"{label} values", latent.kv_rank)

    def _heads(
        self,
        program: Program,
        stack: Matrix,
        x: TensorRef,
        y: TensorRef,
        label: str,
        stride: int,
    ) -> None:
        """Multiply each head's matrix with its part of x, `stride` words behind the head before."""
        n_heads, scratch = self.spec.n_heads, self.space.norm_partials
        matvec_heads(program, self.tuning, stack, n_heads, x, y, label, scratch, x_stride=stride)

    def _queries(
        self,
        program: Program,
        label: str,
        weights: LatentWeights,
        norm: NormInput,
        latent: LatentSpec,
        tensors: LatentWorkspace,
    ) -> tuple[TensorRef, int]:
        """Append what makes the heads' queries, and the compressed keys and values.

        Returns a tensor whose first words are the queries, and the word of `qkv` at which the
        compressed keys and values begin.
        """
        space, tuning, down = self.space, self.tuning, weights.q_down
        if down is None or tensors.q is None or tensors.q_normed is None:
            matrices = (weights.q, weights.kv)
            matvec(program, tuning, matrices, space.gained, space.qkv, f"{label} q/kv", norm)
            return space.qkv, weights.q.n_rows
        matvec(program, tuning, (down, weights.kv), space.gained, space.qkv, f"{label} q/kv", norm)
        rms_norm(
            program,
            tuning,
            space.qkv,
            tensors.q_normed,
            latent.q_rank,
            weights.q_gain,
            self.spec.norm_eps,
            f"{label} q norm",
        )
        scratch = space.norm_partials
        matvec(
            program,
            tuning,
            (weights.q,),
            tensors.q_normed,
            tensors.q,
            f"{label} q",
            scratch=scratch,
        )
        return tensors.q, latent.q_rank
