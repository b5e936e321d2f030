"""What a token's computation works on besides weights: the workspace, the shapes that follow from a
model's description, and the memory of the KV cache.

Owns the cache's memory; the workspace only describes tensors. What lies where in a cache is the
subject of ops/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.closing import Closing
from vkmoe.facts import ExpertSpec, LatentSpec, ModelSpec
from vkmoe.gpu.arena import Arena
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.gpu.program import TensorRef
from vkmoe.gpu.token_io import PARAM_WORDS
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape
from vkmoe.ops.candidates import CANDIDATE_WORDS, list_words
from vkmoe.ops.router import RouterShape, RoutingLog, routing_words
from vkmoe.ops.tuning import Tuning

__all__ = [
    "KvAddresses",
    "KvCaches",
    "LatentWorkspace",
    "Workspace",
    "attention_shape",
    "router_shape",
]


class LatentWorkspace:
    """The tensors that latent attention needs besides: for its heads and for compressed queries.

    `qkv` of the workspace has q_down or the heads' q in front, then the compressed keys and values.
    """

    def __init__(self, n_heads: int, latent: LatentSpec) -> None:
        self.absorbed = TensorRef("absorbed", n_heads * latent.kv_rank)
        self.mixed = TensorRef("mixed", n_heads * latent.kv_rank)
        self.q_normed = self.q = None
        if latent.q_rank:
            self.q_normed = TensorRef("q_normed", latent.q_rank)
            self.q = TensorRef("q", n_heads * latent.query_dim)

    @property
    def tensors(self) -> list[TensorRef]:
        return [value for value in vars(self).values() if isinstance(value, TensorRef)]


class Workspace:
    """The descriptor-bound tensors of a model, reused by every layer and program."""

    def __init__(
        self,
        spec: ModelSpec,
        tuning: Tuning,
        split: AttentionSplit,
        shape: AttentionShape | LatentShape,
    ) -> None:
        experts = spec.experts
        router = router_shape(spec) if experts else None
        n_used = experts.n_used if experts else 1
        # One partial per workgroup of whichever producer has most.
        n_partials = max(
            -(-spec.width // tuning.rows), -(-spec.width // (32 * tuning.workgroup_size))
        )
        n_log_layers = spec.n_layers - spec.n_dense_layers if experts else 0
        self.params = TensorRef("params", PARAM_WORDS)
        self.hidden = TensorRef("hidden", spec.width)
        self.gained = TensorRef("gained", spec.width)
        self.norm_partials = TensorRef("norm_partials", n_partials)
        self.qkv = TensorRef("qkv", _qkv_words(spec))
        self.latent = LatentWorkspace(spec.n_heads, spec.latent) if spec.latent else None
        self.attention_partials = TensorRef("attention_partials", split.partials_words(shape))
        self.attended = TensorRef("attended", spec.attention_width)
        self.router_logits = TensorRef("router_logits", router.n_logits if router else 1)
        self.routing = TensorRef("routing", routing_words(router) if router else 4)
        self.act = TensorRef("act", _act_words(spec))
        self.shared_act = _shared_act(experts)
        self.logits = TensorRef("logits", spec.n_vocab)
        self.candidate_lists = TensorRef("candidate_lists", list_words(tuning, spec.n_vocab))
        self.candidates = TensorRef("candidates", CANDIDATE_WORDS)
        self.routing_log = RoutingLog(n_log_layers, n_used)
        self.log = self.routing_log.tensor

    @property
    def tensors(self) -> list[TensorRef]:
        own = [value for value in vars(self).values() if isinstance(value, TensorRef)]
        return own + (self.latent.tensors if self.latent else [])

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


def _qkv_words(spec: ModelSpec) -> int:
    latent = spec.latent
    if latent is None:
        return spec.qkv_width
    return (latent.q_rank or spec.n_heads * latent.query_dim) + latent.row


def _act_words(spec: ModelSpec) -> int:
    """Words of `act`: those of the used experts, or of a layer without any if that has more."""
    experts = spec.experts
    if experts is None:
        return spec.feed_forward_width
    dense = spec.feed_forward_width if spec.n_dense_layers else 0
    return max(experts.n_used * experts.width, dense)


def _shared_act(experts: ExpertSpec | None) -> TensorRef | None:
    if experts is None or not experts.shared_width:
        return None
    return TensorRef("shared_act", experts.shared_width)


def attention_shape(spec: ModelSpec, ctx_size: int, kv_type: str) -> AttentionShape | LatentShape:
    """Describe a layer's attention with `ctx_size` places in its cache; `kv_type` is f16 or f32.

    Without a window: layers that have one differ in nothing else.
    """
    scale = spec.attention_scale or spec.head_dim**-0.5
    cache_type: Literal["F16", "F32"] = "F16" if kv_type == "f16" else "F32"
    if (latent := spec.latent) is not None:
        return LatentShape(
            n_heads=spec.n_heads,
            kv_rank=latent.kv_rank,
            rope_dim=latent.rope_dim,
            nope_dim=latent.nope_dim,
            context=ctx_size,
            eps=spec.norm_eps,
            scale=scale,
            kv_type=cache_type,
            rope_style=spec.rope.style,
        )
    return AttentionShape(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rope.dim,
        context=ctx_size,
        rope_style=spec.rope.style,
        norm=spec.qk_norm,
        eps=spec.norm_eps,
        scale=scale,
        kv_type=cache_type,
        sinks=spec.sinks,
    )


def router_shape(spec: ModelSpec) -> RouterShape:
    """Describe how the layers of a model with experts route."""
    experts = spec.experts
    assert experts is not None, spec.name
    return RouterShape(
        experts.n_experts,
        experts.n_used,
        experts.gating,
        experts.renormalise,
        experts.scale,
        shared_gate=experts.shared_gate,
        n_groups=experts.n_groups,
        n_groups_used=experts.n_groups_used,
    )


@dataclass(frozen=True)
class KvAddresses:
    """Addresses of one layer's K and V caches; if latent, of the compressed rows alone."""

    keys: int
    values: int = 0


class KvCaches(Closing):
    """The caches of every layer, cleared. Raises OutOfMemoryError with nothing left allocated."""

    def __init__(self, device: Device, n_layers: int, cache_bytes: int, n_caches: int = 2) -> None:
        """Allocate for each layer `n_caches` of `cache_bytes`: keys and values, or one of both."""
        n_places = n_caches * n_layers
        self._arena = Arena(device, "device", "KV cache", n_places * cache_bytes)
        try:
            places = [self._arena.place(cache_bytes) for _ in range(n_places)]
            with translate_errors("clearing the KV cache"):
                recorder = device.native.recorder()
                for place in places:
                    recorder.fill(place.buffer, place.offset, cache_bytes, 0)
                device.native.submit(recorder.finish()).wait()
        except BaseException:
            self.close()
            raise
        found = [place.address for place in places]
        values = found[1::2] if n_caches == 2 else [0] * n_layers
        pairs = zip(found[::n_caches], values, strict=True)
        self.addresses = tuple(KvAddresses(*pair) for pair in pairs)

    def close(self) -> None:
        self._arena.close()
