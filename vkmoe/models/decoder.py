"""Builds the forward pass of one token as a program, from parts that all architectures share.

A layer is attention (grouped-query, or latent), then its feed-forward block. The norms are fused: a
producer of `hidden` leaves `gained` = hidden * gain of the next norm and partial sums of squares,
and its consumer multiplies its dot products by the norm's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import ON_DEVICE, Activation, ExpertMode, LatentSpec, ModelSpec
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.models.weights import (
    AttentionWeights,
    Block,
    FeedForwardWeights,
    LatentWeights,
    ModelWeights,
)
from vkmoe.models.workspace import KvAddresses, LatentWorkspace, Workspace, router_shape
from vkmoe.ops.attention import (
    AttentionTensors,
    KvCache,
    LatentCache,
    LatentQkv,
    attention,
    latent_attention,
)
from vkmoe.ops.attention_shapes import AttentionShape, LatentShape
from vkmoe.ops.candidates import candidates, finish
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import ExpertBlock, LandingMemory, expert_down, expert_gate_up, gather
from vkmoe.ops.matvec import HeadParts, embed, matvec, matvec_heads, matvec_residual
from vkmoe.ops.norms import NormInput, NormOutput, rms_norm
from vkmoe.ops.router import Landing, RouterTensors, router_topk
from vkmoe.ops.tuning import Tuning

__all__ = ["Decoder"]


@dataclass(frozen=True)
class Decoder:
    """Builds the programs of a model; `mode` says what becomes of missed experts.

    What appends a part of a layer takes the norm before it and what it leaves to the next norm, and
    returns the number of partials it leaves.
    """

    spec: ModelSpec
    tuning: Tuning
    weights: ModelWeights
    workspace: Workspace
    caches: tuple[KvAddresses, ...]
    mode: ExpertMode = ON_DEVICE

    @property
    def cache_bytes(self) -> list[int]:
        """List the bytes of each layer's KV cache."""
        kinds = (self.workspace.attention[layer.mixer] for layer in self.spec.layers)
        return [sum(kind.state_bytes) for kind in kinds]

    def token_program(self, with_logits: bool) -> Program:
        """Build a token's program: all layers; with logits also the output head and the candidates.

        Reads `params`, leaves `log` (and `logits`, `candidates`). Copies in and out
        are not in it.
        """
        program = Program("decode" if with_logits else "prompt")
        space, weights, layers = self.workspace, self.weights, self.weights.layers
        first_gain, *next_gains = (*(layer.mixer.gain for layer in layers), weights.output_gain)
        op = OpContext(program, self.tuning)
        op.mark("embed")
        leaves = self._leaves(first_gain)
        n_partials = embed(op.named("embed"), weights.embeddings, space.params, leaves)
        for index, (layer, next_gain) in enumerate(zip(layers, next_gains, strict=True)):
            inner, leaves = op.of_layer(index), self._leaves(layer.feed_forward.gain)
            n_partials = self._attention(inner, index, self._norm(n_partials), leaves)
            leaves = self._leaves(next_gain)
            n_partials = self._feed_forward(inner, index, self._norm(n_partials), leaves)
        if with_logits:
            op.mark("head")
            norm, lists = self._norm(n_partials), space.candidate_lists
            matvec(op.named("logits"), (weights.output,), space.gained, space.logits, norm)
            top = op.named("candidates")
            candidates(top, space.logits, self.spec.n_vocab, lists, space.candidates)
        return program

    def close_program(self, program: Program) -> None:
        """Append the dispatch that tells the host that everything before it ran."""
        program.mark("finish")
        finish(program, self.workspace.params, self.workspace.log)

    def _norm(self, n_partials: int) -> NormInput:
        spec = self.spec
        return NormInput(self.workspace.norm_partials, n_partials, spec.width, spec.norm_eps)

    def _leaves(self, gain: int) -> NormOutput:
        space = self.workspace
        return NormOutput(space.hidden, space.gained, space.norm_partials, gain)

    # ----- attention -----

    def _attention(self, op: OpContext, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """Append hidden += attention of the layer."""
        weights, attended = self.weights.layers[index].mixer, self.workspace.attended
        op.mark("attention")
        if isinstance(weights, LatentWeights):
            self._latent(op, index, weights, norm)
        else:
            self._grouped(op, index, weights, norm)
        output = op.named("output")
        return matvec_residual(output, weights.output, attended, leaves, bias=weights.output_bias)

    def _grouped(
        self, op: OpContext, index: int, weights: AttentionWeights, norm: NormInput
    ) -> None:
        """Append grouped-query attention; it leaves the mixed values of all heads in `attended`."""
        space, cache = self.workspace, self.caches[index]
        kernels = space.attention[self.spec.layers[index].mixer]
        assert isinstance(kernels.shape, AttentionShape), op.label
        qkv = (weights.q, weights.k, weights.v)
        matvec(op.named("qkv"), qkv, space.gained, space.qkv, norm, bias=weights.qkv_bias)
        attention(
            op.program,
            kernels.shape,
            kernels.split,
            KvCache(
                cache.keys,
                cache.values,
                self.weights.layers[index].rope_table,
                weights.q_gain,
                weights.k_gain,
                weights.sinks,
            ),
            space.qkv,
            AttentionTensors(space.params, space.attention_partials, space.attended),
            f"{op.label} attention",
        )

    def _latent(self, op: OpContext, index: int, weights: LatentWeights, norm: NormInput) -> None:
        """Append latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1, absorbed form).

        The keys' projection is applied to the queries, the values' to what was mixed. Leaves the
        mixed values of all heads in `attended`.
        """
        space, latent = self.workspace, self.spec.layers[index].mixer
        tensors, kernels = space.latent, space.attention[latent]
        assert isinstance(latent, LatentSpec) and tensors is not None, op.label
        assert isinstance(kernels.shape, LatentShape), op.label
        n_heads, scratch = latent.n_heads, space.norm_partials
        q, kv_offset = self._queries(op, weights, latent, tensors, norm)
        heads = HeadParts(q, stride=latent.query_dim)
        matvec_heads(op.named("absorbed"), weights.k_up, n_heads, heads, tensors.absorbed, scratch)
        rope_table = self.weights.layers[index].rope_table
        latent_attention(
            op.program,
            kernels.shape,
            kernels.split,
            LatentCache(self.caches[index].keys, rope_table, weights.kv_gain),
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
        latent: LatentSpec,
        tensors: LatentWorkspace,
        norm: NormInput,
    ) -> tuple[TensorRef, int]:
        """Append what makes the heads' queries, and the compressed keys and values.

        Compressed queries take a norm and a projection more. Returns a tensor whose first words are
        the queries, and the word of `qkv` at which the compressed keys and values begin.
        """
        space, down, q_kv = self.workspace, weights.q_down, op.named("q/kv")
        if down is None or tensors.q is None or tensors.q_normed is None:
            matvec(q_kv, (weights.q, weights.kv), space.gained, space.qkv, norm)
            return space.qkv, weights.q.n_rows
        matvec(q_kv, (down, weights.kv), space.gained, space.qkv, norm)
        normed, eps = tensors.q_normed, self.spec.norm_eps
        rms_norm(op.named("q norm"), space.qkv, normed, latent.q_rank, weights.q_gain, eps)
        matvec(op.named("q"), (weights.q,), normed, tensors.q, scratch=space.norm_partials)
        return tensors.q, latent.q_rank

    # ----- feed-forward: routed experts, a shared one beside them, or one block alone -----

    def _feed_forward(self, op: OpContext, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """Append hidden += the feed-forward block of the layer.

        A layer with experts has three parts: its routing (`_score`, `_choose`), the routed experts
        (`_gather`, `_experts`), and the shared one, whose first half waits for none of these.
        """
        space, layer = self.workspace, self.weights.layers[index].feed_forward
        activation = self.spec.layers[index].feed_forward.activation
        if layer.router is None:
            op.mark("dense")
            dense = ExpertBlock(layer.block.shape, space.routing, span=layer.block.span)
            return self._experts(op, dense, norm, leaves, activation)
        moe_layer, shared = self.weights.moe_layers.index(index), self._shared(layer)
        self._score(op, layer, norm)
        if shared is not None:
            op.mark("shared")
            block, act = shared
            half = op.named("shared gate/up")
            expert_gate_up(half, block, space.gained, act, norm, activation)
        self._choose(op, layer, moe_layer)
        op.mark("routed")
        experts = self._gather(op, layer.block, moe_layer)
        n_partials = self._experts(op, experts, norm, leaves, activation)
        if shared is not None:
            op.mark("shared")
            block, act = shared
            n_partials = expert_down(op.named("shared down"), block, act, leaves)
        return n_partials

    def _score(self, op: OpContext, layer: FeedForwardWeights, norm: NormInput) -> None:
        """Append the logits of the routed experts, and of the shared one's weight if it has any."""
        space, gate, bias = self.workspace, layer.shared_gate, layer.router_bias
        assert gate is None or not bias, "biases are for the routed experts alone"
        assert layer.router is not None, op.label
        matrices = (layer.router, gate) if gate else (layer.router,)
        op.mark("router")
        matvec(op.named("router"), matrices, space.gained, space.router_logits, norm, bias=bias)

    def _choose(self, op: OpContext, layer: FeedForwardWeights, moe_layer: int) -> None:
        """Append the choice of experts by their logits, and the look-up of where they are."""
        space, mode = self.workspace, self.mode
        n_places = self.weights.n_landing if mode.lands else 0
        op.mark("choice")
        router_topk(
            op.named("top-k"),
            router_shape(self.spec),
            moe_layer,
            RouterTensors(space.router_logits, space.params, space.routing, space.routing_log),
            self.weights.expert_table,
            Landing(len(self.weights.moe_layers), n_places, mode.gathers),
            selection_bias=layer.selection_bias,
        )

    def _gather(self, op: OpContext, block: Block, moe_layer: int) -> ExpertBlock:
        """Return the chosen experts as they are read, gathered first if misses are served so."""
        space, mode, log = self.workspace, self.mode, self.workspace.routing_log
        landing = LandingMemory(block.landing_ranges, space.log, log.filled(moe_layer))
        if mode.gathers:
            label = f"{op.label} gather"
            gather(op.program, space.routing, landing, block.shape.span_bytes, block.ranges, label)
        kept = landing if mode.keeps else None
        return ExpertBlock(block.shape, space.routing, log.n_used, block.ranges, kept)

    def _experts(
        self,
        op: OpContext,
        experts: ExpertBlock,
        norm: NormInput,
        leaves: NormOutput,
        activation: Activation,
    ) -> int:
        """Append hidden += the weighted sum of experts."""
        space, half = self.workspace, op.named("gate/up")
        expert_gate_up(half, experts, space.gained, space.act, norm, activation)
        return expert_down(op.named("down"), experts, space.act, leaves)

    def _shared(self, layer: FeedForwardWeights) -> tuple[ExpertBlock, TensorRef] | None:
        """Return the expert that every token uses, and the tensor between its halves.

        Its weight, if it has one, is behind those of the others.
        """
        space = self.workspace
        if layer.shared is None:
            return None
        assert space.shared_act is not None, self.spec.name
        rank = space.routing_log.n_used if layer.shared_gate else None
        shape, span = layer.shared.shape, layer.shared.span
        block = ExpertBlock(shape, space.routing, span=span, weight_rank=rank)
        return block, space.shared_act
