"""This module has what a token's computation works on besides weights: tensors and the KV cache.

Owns the cache's memory; the workspace only describes tensors, in shapes that follow from a model's
description. What lies where in a cache is the subject of ops/attention.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Literal

from vkmoe.choices import KvType
from vkmoe.closing import Closing
from vkmoe.facts import ArenaLayout, ExpertSpec, FeedForward, LatentSpec, Mixer, ModelSpec
from vkmoe.gpu.arena import Arena
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.gpu.program import TensorRef
from vkmoe.gpu.token_io import param_words
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.ops.candidates import CANDIDATE_WORDS, list_words
from vkmoe.ops.router import RouterShape, RoutingLog, routing_words
from vkmoe.ops.tuning import Tuning

__all__ = [
    "AttentionKernels",
    "KvAddresses",
    "KvCaches",
    "LatentWorkspace",
    "Workspace",
    "attention_kernels",
    "router_shape",
]


@dataclass(frozen=True)
class AttentionKernels:
    """Says how a kind of attention runs: its shape, how that is spread, and what a layer caches."""

    shape: AttentionShape | LatentShape
    split: AttentionSplit
    state_bytes: tuple[int, ...]  # of each cache of a layer


class LatentWorkspace:
    """Describes what latent attention needs besides: for its heads and for compressed queries.

    `qkv` of the workspace has q_down or the heads' q in front, then the compressed keys and values.
    """

    def __init__(self, kinds: Sequence[LatentSpec]) -> None:
        rank = max(kind.n_heads * kind.kv_rank for kind in kinds)
        self.absorbed = TensorRef("absorbed", rank)
        self.mixed = TensorRef("mixed", rank)
        self.q_normed = self.q = None
        if compressed := [kind for kind in kinds if kind.q_rank]:
            self.q_normed = TensorRef("q_normed", max(kind.q_rank for kind in compressed))
            self.q = TensorRef("q", max(kind.n_heads * kind.query_dim for kind in compressed))

    @property
    def tensors(self) -> list[TensorRef]:
        return [value for value in vars(self).values() if isinstance(value, TensorRef)]


class Workspace:
    """Describes the descriptor-bound tensors of a model, which all layers and programs share.

    A tensor is as large as the layer needs it that needs most.
    """

    def __init__(
        self, spec: ModelSpec, tuning: Tuning, attention: Mapping[Mixer, AttentionKernels]
    ) -> None:
        experts = spec.experts
        router = router_shape(spec) if experts else None
        n_used = experts.n_used if experts else 1
        # One partial per workgroup of whichever producer has most.
        n_partials = max(
            -(-spec.width // tuning.fewest_rows), -(-spec.width // (32 * tuning.workgroup_size))
        )
        latents = [mixer for mixer in spec.mixers if isinstance(mixer, LatentSpec)]
        n_words = max(item.split.partials_words(item.shape) for item in attention.values())
        self.attention = attention
        self.params = TensorRef("params", param_words(1))
        self.hidden = TensorRef("hidden", spec.width)
        self.gained = TensorRef("gained", spec.width)
        self.norm_partials = TensorRef("norm_partials", n_partials)
        self.qkv = TensorRef("qkv", max(mixer.qkv_width for mixer in spec.mixers))
        self.latent = LatentWorkspace(latents) if latents else None
        self.attention_partials = TensorRef("attention_partials", n_words)
        self.attended = TensorRef("attended", max(mixer.attended_width for mixer in spec.mixers))
        self.router_logits = TensorRef("router_logits", router.n_logits if router else 1)
        self.routing = TensorRef("routing", routing_words(router) if router else 4)
        self.act = TensorRef("act", max(_act_words(layer.feed_forward) for layer in spec.layers))
        shared_width = experts.shared_width if experts else 0
        self.shared_act = TensorRef("shared_act", shared_width) if shared_width else None
        self.logits = TensorRef("logits", spec.n_vocab)
        self.candidate_lists = TensorRef("candidate_lists", list_words(tuning, spec.n_vocab))
        self.candidates = TensorRef("candidates", CANDIDATE_WORDS)
        self.routing_log = RoutingLog(len(spec.moe_layers), n_used)
        self.log = self.routing_log.tensor

    @property
    def tensors(self) -> list[TensorRef]:
        own = [value for value in vars(self).values() if isinstance(value, TensorRef)]
        return own + (self.latent.tensors if self.latent else [])


def _act_words(block: FeedForward) -> int:
    """Count the words of `act`: those of all used experts, or of the one block there is."""
    return block.width * (block.n_used if isinstance(block, ExpertSpec) else 1)


def attention_kernels(
    spec: ModelSpec, ctx_size: int, kv_type: KvType, tuning: Tuning
) -> dict[Mixer, AttentionKernels]:
    """Say how each kind of attention runs with `ctx_size` places in its caches."""
    kernels = {}
    for mixer in spec.mixers:
        shape = _attention_shape(mixer, ctx_size, "F16" if kv_type == "f16" else "F32", spec)
        states = mixer.state_bytes(ctx_size, kv_type)
        kernels[mixer] = AttentionKernels(shape, choose_split(shape, tuning), states)
    return kernels


def _attention_shape(
    mixer: Mixer, ctx_size: int, cache_type: Literal["F16", "F32"], spec: ModelSpec
) -> AttentionShape | LatentShape:
    scale = mixer.scale or mixer.query_dim**-0.5
    if isinstance(mixer, LatentSpec):
        return LatentShape(
            n_heads=mixer.n_heads,
            kv_rank=mixer.kv_rank,
            rope_dim=mixer.rope_dim,
            nope_dim=mixer.nope_dim,
            context=ctx_size,
            eps=spec.norm_eps,
            scale=scale,
            kv_type=cache_type,
            rope_style=mixer.rope.style,
        )
    return AttentionShape(
        n_heads=mixer.n_heads,
        n_kv_heads=mixer.n_kv_heads,
        head_dim=mixer.head_dim,
        rotary_dim=mixer.rope.dim,
        context=ctx_size,
        rope_style=mixer.rope.style,
        norm=mixer.qk_norm,
        eps=spec.norm_eps,
        scale=scale,
        kv_type=cache_type,
        window=mixer.window,
        sinks=mixer.sinks,
    )


def router_shape(spec: ModelSpec) -> RouterShape:
    """Describe how the layers of a model with experts route."""
    experts = spec.experts
    assert experts is not None, spec.name
    return RouterShape(**{item.name: getattr(experts, item.name) for item in fields(RouterShape)})


@dataclass(frozen=True)
class KvAddresses:
    """Holds the addresses of a layer's K and V caches; if latent, of the compressed rows alone."""

    keys: int
    values: int = 0


class KvCaches(Closing):
    """Owns the caches of every layer, cleared. Raises OutOfMemoryError with none left allocated."""

    def __init__(
        self, device: Device, layout: ArenaLayout, layers: Sequence[Sequence[int]]
    ) -> None:
        """Allocate for each layer caches of these bytes: keys and values, or one of both."""
        self._arena = Arena(device, "device", "KV cache", layout)
        try:
            places = [[self._arena.place(n_bytes) for n_bytes in sizes] for sizes in layers]
            with translate_errors("clearing the KV cache"):
                recorder = device.native.recorder()
                for place, n_bytes in zip(chain(*places), chain(*layers), strict=True):
                    recorder.fill(place.buffer, place.offset, n_bytes, 0)
                device.native.submit(recorder.finish()).wait()
        except BaseException:
            self.close()
            raise
        self.addresses = tuple(KvAddresses(*(place.address for place in layer)) for layer in places)

    def close(self) -> None:
        self._arena.close()
