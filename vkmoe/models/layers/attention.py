"""Appends what mixes the positions of a layer to a program: attention, grouped-query or latent, or
a gated delta rule.

A mixer to come is a class here and its line in MIXERS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from vkmoe.facts import AttentionSpec, DeltaNetSpec, LatentSpec, Mixer, ModelSpec
from vkmoe.gpu.program import TensorRef
from vkmoe.kernels.attention.operations import (
    AttentionTensors,
    KvCache,
    LatentCache,
    LatentQkv,
    attention,
    latent_attention,
)
from vkmoe.kernels.attention.shapes import AttentionShape, LatentShape
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.matmul.operations import matmul, matmul_heads, matmul_residual, row_parts
from vkmoe.kernels.matvec.operations import Matrix, matvec, matvec_heads, matvec_residual
from vkmoe.kernels.norms.operations import (
    NormedPart,
    NormInput,
    NormOutput,
    norm_residual,
    rms_norm,
)
from vkmoe.kernels.prompt_attention.operations import (
    PromptTensors,
    append_latent_rows,
    append_rows,
    latent_prompt_attention,
    prompt_attention,
)
from vkmoe.kernels.recurrent.operations import (
    DeltaMemory,
    HeadGates,
    Projected,
    delta_inputs,
    delta_step,
    gate_heads,
)
from vkmoe.models.kv_caches import KvAddresses
from vkmoe.models.weights import AttentionWeights, DeltaNetWeights, LatentWeights, LayerWeights
from vkmoe.models.workspace import (
    AttentionKernels,
    DeltaKernels,
    LatentWorkspace,
    MixerKernels,
    Workspace,
)


@dataclass(frozen=True)
class AttentionBlock(ABC):
    """Appends the attention of layer `index`; there is a subclass for each kind of mixer."""

    spec: ModelSpec
    space: Workspace
    index: int
    layer: LayerWeights
    cache: KvAddresses

    def append(self, op: OpContext, norm: NormInput, leaves: NormOutput) -> int:
        """Append hidden += attention of the layer. Returns the number of partials it leaves."""
        weights, attended = self.layer.mixer, self.space.attended
        op.mark("attention")
        self._attend(op, norm)
        output, space = op.named("output"), self.space
        if not weights.post_gain:
            bias = weights.output_bias
            return matvec_residual(output, weights.output, attended, leaves, bias=bias)
        into = space.block_output(weights.gain)
        matvec_residual(output, weights.output, attended, into, bias=weights.output_bias)
        return self._add_normed(op, leaves)

    def append_prompt(self, op: OpContext) -> None:
        """Append hidden += attention of the layer, for rows of prompts."""
        space, weights = self.space, self.layer.mixer
        op.mark("attention")
        width, eps, gain = self.spec.width, self.spec.norm_eps, weights.gain
        rms_norm(op.named("norm"), space.hidden, space.gained, width, gain, eps)
        self._attend_prompt(op)
        output, params = op.named("output"), space.params
        x, into = row_parts(space.attended), space.hidden
        if weights.post_gain:
            into = space.block_output(weights.gain).hidden
        adds, bias = not weights.post_gain, weights.output_bias
        matmul_residual(output, weights.output, x, row_parts(into), params, bias=bias, adds=adds)
        if weights.post_gain:
            self._add_normed(op, NormOutput(space.hidden, space.gained, space.norm_partials, gain))

    def _add_normed(self, op: OpContext, leaves: NormOutput) -> int:
        """Append hidden += norm(what attention gives). Returns the number of partials it leaves."""
        parts, gain = (NormedPart(self.space.block_output(0).hidden),), self.layer.mixer.post_gain
        width, eps = self.spec.width, self.spec.norm_eps
        return norm_residual(op.named("post norm"), parts, gain, leaves, width, eps)

    @property
    def kernels(self) -> MixerKernels:
        """Return the shape and split of the layer's mixer, in caches as large as they are."""
        kernels = self.space.mixers[self.spec.layers[self.index].mixer]
        return kernels.of_context(self.cache.context)

    @property
    def attention(self) -> AttentionKernels:
        """Return `kernels` of a layer with attention."""
        kernels = self.kernels
        assert isinstance(kernels, AttentionKernels), self.index
        return kernels

    @abstractmethod
    def _attend(self, op: OpContext, norm: NormInput) -> None:
        """Append what leaves the mixed values of all heads in `attended`."""

    @abstractmethod
    def _attend_prompt(self, op: OpContext) -> None:
        """Append the same for rows of prompts, whose normed state is in `gained`."""


class GroupedAttention(AttentionBlock):
    """Appends grouped-query attention."""

    def _attend(self, op: OpContext, norm: NormInput) -> None:
        space, weights = self.space, self.layer.mixer
        shape, split = self.attention.shape, self.attention.split
        assert isinstance(shape, AttentionShape) and isinstance(weights, AttentionWeights), op.label
        matvec(
            op.named("qkv"),
            _projections(weights),
            space.gained,
            space.qkv,
            norm,
            bias=weights.qkv_bias,
        )
        attention(
            op.named("attention"),
            shape,
            split,
            self._kv_cache(weights),
            space.qkv,
            AttentionTensors(space.params, space.attention_partials, space.attended),
        )
        self._gate(op, weights, shape)

    def _gate(self, op: OpContext, weights: AttentionWeights, shape: AttentionShape) -> None:
        """Append the gates of the heads' outputs, where there are any: they lie behind q, k, v."""
        if weights.gate is None:
            return
        space = self.space
        gates = HeadGates(space.qkv, shape.qkv_width, "sigmoid")
        label, dim = op.named("gate"), shape.head_dim
        gate_heads(label, space.attended, dim, shape.n_heads, gates, space.params)

    def _attend_prompt(self, op: OpContext) -> None:
        space, weights, kernels = self.space, self.layer.mixer, self.attention
        shape, params = kernels.shape, space.params
        assert isinstance(shape, AttentionShape) and isinstance(weights, AttentionWeights), op.label
        x, y = row_parts(space.gained), row_parts(space.qkv)
        matmul(op.named("qkv"), _projections(weights), x, y, params, bias=weights.qkv_bias)
        append_rows(op.named("append"), shape, self._kv_cache(weights), space.qkv, params)
        prompt_attention(
            op.named("attention"),
            shape,
            kernels.tiling,
            self._kv_cache(weights),
            space.qkv,
            PromptTensors(params, space.attended),
        )
        self._gate(op, weights, shape)

    def _kv_cache(self, weights: AttentionWeights) -> KvCache:
        cache = self.cache
        keys, values = cache.caches
        k_gain = weights.k_gain if weights.k else weights.q_gain
        return KvCache(
            keys,
            values,
            cache.rope_table,
            weights.q_gain,
            k_gain,
            weights.sinks,
            cache.n_regions,
        )


class LatentAttention(AttentionBlock):
    """Appends latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1, absorbed form).

    The keys' projection is applied to the queries, the values' to what was mixed.
    """

    def _attend(self, op: OpContext, norm: NormInput) -> None:
        space, weights, latent = self.space, self.layer.mixer, self.spec.layers[self.index].mixer
        tensors, shape, split = space.latent, self.attention.shape, self.attention.split
        assert isinstance(latent, LatentSpec) and tensors is not None, op.label
        assert isinstance(shape, LatentShape) and isinstance(weights, LatentWeights), op.label
        n_heads, stride = latent.n_heads, latent.query_dim
        q, kv_offset = self._queries(op, weights, latent, tensors, norm)
        matvec_heads(op.named("absorbed"), weights.k_up, n_heads, q, stride, tensors.absorbed)
        latent_attention(
            op.named("attention"),
            shape,
            split,
            self._latent_cache(weights),
            LatentQkv(tensors.absorbed, q, space.qkv, kv_offset=kv_offset),
            AttentionTensors(space.params, space.attention_partials, tensors.mixed),
        )
        values, mixed, rank = op.named("values"), tensors.mixed, latent.kv_rank
        matvec_heads(values, weights.v_up, n_heads, mixed, rank, space.attended)

    def _attend_prompt(self, op: OpContext) -> None:
        space, weights, latent = self.space, self.layer.mixer, self.spec.layers[self.index].mixer
        tensors, shape, params = space.latent, self.attention.shape, space.params
        assert isinstance(latent, LatentSpec) and tensors is not None, op.label
        assert isinstance(shape, LatentShape) and isinstance(weights, LatentWeights), op.label
        q, kv_offset = self._prompt_queries(op, weights, latent)
        heads = row_parts(q, head_stride=latent.query_dim)
        absorbed, n_heads = row_parts(tensors.absorbed), latent.n_heads
        matmul_heads(op.named("absorbed"), weights.k_up, n_heads, heads, absorbed, params)
        cache = self._latent_cache(weights)
        qkv = LatentQkv(tensors.absorbed, q, space.qkv, kv_offset=kv_offset)
        append_latent_rows(op.named("append"), shape, cache, qkv, params)
        attend, mixed = op.named("attention"), PromptTensors(params, tensors.mixed)
        latent_prompt_attention(attend, shape, self.attention.tiling, cache, qkv, mixed)
        heads, y = row_parts(tensors.mixed, head_stride=latent.kv_rank), row_parts(space.attended)
        matmul_heads(op.named("values"), weights.v_up, n_heads, heads, y, params)

    def _latent_cache(self, weights: LatentWeights) -> LatentCache:
        cache = self.cache
        (rows,) = cache.caches
        return LatentCache(rows, cache.rope_table, weights.kv_gain, cache.n_regions)

    def _prompt_queries(
        self, op: OpContext, weights: LatentWeights, latent: LatentSpec
    ) -> tuple[TensorRef, int]:
        """Append the same as `_queries` for rows of prompts."""
        space, tensors, down = self.space, self.space.latent, weights.q_down
        q_kv, x, qkv = op.named("q/kv"), row_parts(space.gained), row_parts(space.qkv)
        if down is None or tensors is None or tensors.q is None or tensors.q_normed is None:
            matmul(q_kv, (weights.q, weights.kv), x, qkv, space.params)
            return space.qkv, weights.q.n_rows
        matmul(q_kv, (down, weights.kv), x, qkv, space.params)
        normed, eps = tensors.q_normed, self.spec.norm_eps
        rms_norm(op.named("q norm"), space.qkv, normed, latent.q_rank, weights.q_gain, eps)
        matmul(op.named("q"), (weights.q,), row_parts(normed), row_parts(tensors.q), space.params)
        return tensors.q, latent.q_rank

    def _queries(
        self,
        op: OpContext,
        weights: LatentWeights,
        latent: LatentSpec,
        tensors: LatentWorkspace,
        norm: NormInput,
    ) -> tuple[TensorRef, int]:
        """Append what makes the heads' queries, and the compressed keys and values.

        Compressed queries take a norm and a projection more. Returns a tensor whose first words are
        the queries, and the word of `qkv` at which the compressed keys and values begin.
        """
        space, down, q_kv = self.space, weights.q_down, op.named("q/kv")
        if down is None or tensors.q is None or tensors.q_normed is None:
            matvec(q_kv, (weights.q, weights.kv), space.gained, space.qkv, norm)
            return space.qkv, weights.q.n_rows
        matvec(q_kv, (down, weights.kv), space.gained, space.qkv, norm)
        normed, eps = tensors.q_normed, self.spec.norm_eps
        rms_norm(op.named("q norm"), space.qkv, normed, latent.q_rank, weights.q_gain, eps)
        matvec(op.named("q"), (weights.q,), normed, tensors.q)
        return tensors.q, latent.q_rank


class DeltaNet(AttentionBlock):
    """Appends a gated delta rule, behind a short convolution (kernels/recurrent/operations.py)."""

    def _attend(self, op: OpContext, norm: NormInput) -> None:
        x, space = self.space.gained, self.space
        matvec(op.named("qkv"), self._matrices, x, space.qkv, norm)
        self._step(op)

    def _attend_prompt(self, op: OpContext) -> None:
        space = self.space
        x, y = row_parts(space.gained), row_parts(space.qkv)
        matmul(op.named("qkv"), self._matrices, x, y, space.params)
        self._step(op)

    @property
    def _weights(self) -> DeltaNetWeights:
        weights = self.layer.mixer
        assert isinstance(weights, DeltaNetWeights), self.index
        return weights

    @property
    def _matrices(self) -> tuple[Matrix, ...]:
        """List what is projected of a row: channels, gates, then b and a of each head."""
        weights = self._weights
        return weights.qkv, weights.gate, weights.beta, weights.alpha

    def _step(self, op: OpContext) -> None:
        """Append what follows the projections, alike for rows of prompts and those decoded."""
        space, weights, kernels = self.space, self._weights, self.kernels
        assert isinstance(kernels, DeltaKernels) and space.mixed is not None, op.label
        shape, (ring, states) = kernels.shape, self.cache.caches
        vectors = weights.taps, weights.scales, weights.biases
        memory = DeltaMemory(ring, states, *vectors, self.cache.n_regions)
        beta = shape.n_channels + shape.out_words
        projected = Projected(space.qkv, beta, beta + shape.n_heads)
        delta_inputs(op.named("inputs"), shape, memory, projected, space.params, space.mixed)
        step, out = op.named("delta"), space.attended
        delta_step(step, shape, kernels.split, memory, space.mixed, space.params, out)
        gain, eps = weights.out_gain, self.spec.norm_eps
        gates = HeadGates(space.qkv, shape.n_channels, "silu", gain, eps)
        gate_heads(op.named("gate"), out, shape.head_dim, shape.n_heads, gates, space.params)


def _projections(weights: AttentionWeights) -> tuple[Matrix, ...]:
    """List what is projected of a row: q, k and v that the layer has, and behind them gates."""
    qkv = weights.q, weights.k, weights.v, weights.gate
    return tuple(matrix for matrix in qkv if matrix is not None)


# What appends each kind of mixer.
MIXERS: dict[type[Mixer], type[AttentionBlock]] = {
    AttentionSpec: GroupedAttention,
    DeltaNetSpec: DeltaNet,
    LatentSpec: LatentAttention,
}
