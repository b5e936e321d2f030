"""The forward pass of one token as a program: what all architectures share.

Per layer: q/k/v, attention, its join, output projection, router, top-k, gate/up, down. The norms
are
fused: a producer of `hidden` leaves `gained` = hidden * gain of the next norm and partial sums of
squares, and its consumer multiplies its dot products by the norm's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.token_io import PARAM_WORDS
from vkmoe.models.weights import LayerWeights, ModelWeights
from vkmoe.ops.attention import AttentionShape, AttentionSplit, KvCache, attention
from vkmoe.ops.candidates import CANDIDATE_WORDS, candidates, list_words
from vkmoe.ops.embed import embed
from vkmoe.ops.experts import expert_down, expert_gate_up
from vkmoe.ops.finish import finish
from vkmoe.ops.matvec import matvec, matvec_residual
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.router import RouterShape, log_words, router_topk, routing_words
from vkmoe.ops.tuning import Tuning

__all__ = ["Decoder", "KvAddresses", "Workspace", "attention_shape", "router_shape"]


@dataclass(frozen=True)
class KvAddresses:
    """Addresses of one layer's K and V caches."""

    keys: int
    values: int


class Workspace:
    """The descriptor-bound tensors of a model, reused by every layer and program."""

    def __init__(
        self, spec: ModelSpec, tuning: Tuning, split: AttentionSplit, shape: AttentionShape
    ) -> None:
        experts = spec.experts
        n_slots = experts.n_used if experts else 1
        inner = experts.width if experts else spec.feed_forward_width
        n_logits = experts.n_experts if experts else 1
        # One partial per workgroup of whichever producer has most.
        n_partials = max(
            -(-spec.width // tuning.rows), -(-spec.width // (32 * tuning.workgroup_size))
        )
        n_log_layers = spec.n_layers if experts else 0
        self.params = TensorRef("params", PARAM_WORDS)
        self.hidden = TensorRef("hidden", spec.width)
        self.gained = TensorRef("gained", spec.width)
        self.norm_partials = TensorRef("norm_partials", n_partials)
        self.qkv = TensorRef("qkv", spec.qkv_width)
        self.attention_partials = TensorRef("attention_partials", split.partials_words(shape))
        self.attended = TensorRef("attended", spec.attention_width)
        self.router_logits = TensorRef("router_logits", n_logits)
        self.routing = TensorRef("routing", routing_words(router_shape(spec)) if experts else 4)
        self.act = TensorRef("act", n_slots * inner)
        self.logits = TensorRef("logits", spec.n_vocab)
        self.candidate_lists = TensorRef("candidate_lists", list_words(tuning, spec.n_vocab))
        self.candidates = TensorRef("candidates", CANDIDATE_WORDS)
        self.log = TensorRef("log", log_words(n_log_layers, n_slots))

    @property
    def tensors(self) -> list[TensorRef]:
        return [value for value in vars(self).values() if isinstance(value, TensorRef)]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


def attention_shape(spec: ModelSpec, ctx_size: int, kv_type: str) -> AttentionShape:
    """One layer's attention with `ctx_size` places in its cache; `kv_type` is f16 or f32."""
    return AttentionShape(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rope.dim,
        context=ctx_size,
        rope_style=spec.rope.style,
        norm=spec.qk_norm,
        eps=spec.norm_eps,
        scale=spec.head_dim**-0.5,
        kv_type="F16" if kv_type == "f16" else "F32",
    )


def router_shape(spec: ModelSpec) -> RouterShape:
    """How the layers of a model with experts route."""
    experts = spec.experts
    assert experts is not None, spec.name
    return RouterShape(
        experts.n_experts, experts.n_used, experts.gating, experts.renormalise, experts.scale
    )


@dataclass(frozen=True)
class Decoder:
    """Builds the programs of a model."""

    spec: ModelSpec
    tuning: Tuning
    weights: ModelWeights
    workspace: Workspace
    attention_shape: AttentionShape
    attention_split: AttentionSplit
    caches: tuple[KvAddresses, ...]

    def token_program(self, with_logits: bool) -> Program:
        """One token through all layers; with logits also the output head and the candidates.

        Reads `params`, leaves `log` (and `logits`, `candidates`). Copies in and out are the
        engine's.
        """
        program = Program("decode" if with_logits else "prompt")
        space, first = self.workspace, self.weights.layers[0]
        n_partials = embed(
            program,
            self.tuning,
            self.weights.embeddings,
            space.params,
            self._leaves(first.attention_gain),
            "embed",
        )
        for index in range(self.spec.n_layers):
            n_partials = self._layer(program, index, n_partials)
        if with_logits:
            self._head(program, n_partials)
        return program

    def close_program(self, program: Program) -> None:
        """Append the dispatch that tells the host that everything before it ran."""
        finish(program, self.workspace.params, self.workspace.log)

    def _layer(self, program: Program, index: int, n_partials: int) -> int:
        space, layer, label = self.workspace, self.weights.layers[index], f"layer {index}"
        norm = self._norm(n_partials)
        matvec(
            program,
            self.tuning,
            (layer.q, layer.k, layer.v),
            space.gained,
            space.qkv,
            f"{label} qkv",
            norm,
        )
        cache = self.caches[index]
        attention(
            program,
            self.attention_shape,
            self.attention_split,
            KvCache(cache.keys, cache.values, self.weights.rope_table, layer.q_gain, layer.k_gain),
            space.qkv,
            space.params,
            space.attention_partials,
            space.attended,
            f"{label} attention",
        )
        n_partials = matvec_residual(
            program,
            self.tuning,
            layer.output,
            space.attended,
            self._leaves(layer.feed_forward_gain),
            f"{label} output",
        )
        last = index + 1 == self.spec.n_layers
        gain = self.weights.output_gain if last else self.weights.layers[index + 1].attention_gain
        return self._feed_forward(program, index, layer, self._norm(n_partials), gain)

    def _feed_forward(
        self, program: Program, index: int, layer: LayerWeights, norm: NormInput, gain: int
    ) -> int:
        space, label = self.workspace, f"layer {index}"
        n_slots = 1
        if layer.router is not None:
            shape = router_shape(self.spec)
            n_slots = shape.n_slots
            matvec(
                program,
                self.tuning,
                (layer.router,),
                space.gained,
                space.router_logits,
                f"{label} router",
                norm,
            )
            router_topk(
                program,
                self.tuning,
                shape,
                sum(before.router is not None for before in self.weights.layers[:index]),
                space.router_logits,
                space.params,
                self.weights.expert_table,
                space.routing,
                space.log,
                f"{label} top-k",
            )
        expert_gate_up(
            program,
            self.tuning,
            layer.expert_shape,
            space.gained,
            space.routing,
            space.act,
            n_slots,
            norm,
            layer.expert_ranges,
            f"{label} gate/up",
            layer.dense_span,
        )
        return expert_down(
            program,
            self.tuning,
            layer.expert_shape,
            space.act,
            space.routing,
            n_slots,
            self._leaves(gain),
            layer.expert_ranges,
            f"{label} down",
            layer.dense_span,
        )

    def _head(self, program: Program, n_partials: int) -> None:
        space = self.workspace
        matvec(
            program,
            self.tuning,
            (self.weights.output,),
            space.gained,
            space.logits,
            "logits",
            self._norm(n_partials),
        )
        candidates(
            program,
            self.tuning,
            space.logits,
            self.spec.n_vocab,
            space.candidate_lists,
            space.candidates,
            "candidates",
        )

    def _norm(self, n_partials: int) -> NormInput:
        return NormInput(
            self.workspace.norm_partials, n_partials, self.spec.width, self.spec.norm_eps
        )

    def _leaves(self, gain: int) -> NormOutput:
        space = self.workspace
        return NormOutput(space.hidden, space.gained, space.norm_partials, gain)
