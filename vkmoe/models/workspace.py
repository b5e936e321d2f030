"""The tensors of a token, and the shapes that follow from a model's description."""

from __future__ import annotations

from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import TensorRef
from vkmoe.gpu.token_io import PARAM_WORDS
from vkmoe.ops.attention import AttentionShape, AttentionSplit
from vkmoe.ops.candidates import CANDIDATE_WORDS, list_words
from vkmoe.ops.router import RouterShape, log_words, routing_words
from vkmoe.ops.tuning import Tuning

__all__ = ["Workspace", "attention_shape", "router_shape"]


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
