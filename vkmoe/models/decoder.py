"""The forward pass of one token as a program: what all architectures share.

Per layer: q/k/v, attention, its join, output projection, router, top-k, gate/up, down; where misses
are gathered, that comes before gate/up. The norms are fused: a producer of `hidden` leaves `gained`
= hidden * gain of the next norm and partial sums of squares, and its consumer multiplies its dot
products by the norm's scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import Program
from vkmoe.models.weights import AttentionWeights, LayerWeights, ModelWeights
from vkmoe.models.workspace import Workspace, router_shape
from vkmoe.ops.attention import AttentionShape, AttentionSplit, KvCache, attention
from vkmoe.ops.candidates import candidates
from vkmoe.ops.embed import embed
from vkmoe.ops.experts import expert_down, expert_gate_up
from vkmoe.ops.finish import finish
from vkmoe.ops.gather import LandingMemory, gather
from vkmoe.ops.matvec import Matrix, matvec, matvec_residual
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.router import Landing, filled_words, router_topk
from vkmoe.ops.tuning import Tuning

__all__ = ["Decoder", "KvAddresses", "MissService"]


@dataclass(frozen=True)
class KvAddresses:
    """Addresses of one layer's K and V caches."""

    keys: int
    values: int


@dataclass(frozen=True)
class MissService:
    """How experts that are at home are served.

    read: where they are; with `keep` they are also stored in landing places while they are read.
    gather: from a landing place, into which they are copied first; it is the host that keeps them.
    """

    way: Literal["read", "gather"] = "read"
    keep: bool = False


@dataclass(frozen=True)
class Decoder:
    """Builds the programs of a model. `misses` is None where no expert ever moves."""

    spec: ModelSpec
    tuning: Tuning
    weights: ModelWeights
    workspace: Workspace
    attention_shape: AttentionShape
    attention_split: AttentionSplit
    caches: tuple[KvAddresses, ...]
    misses: MissService | None = None

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
        norm, weights = self._norm(n_partials), layer.attention
        assert isinstance(weights, AttentionWeights), label
        matvec(
            program,
            self.tuning,
            (weights.q, weights.k, weights.v),
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
            KvCache(
                cache.keys, cache.values, self.weights.rope_table, weights.q_gain, weights.k_gain
            ),
            space.qkv,
            space.params,
            space.attention_partials,
            space.attended,
            f"{label} attention",
        )
        n_partials = matvec_residual(
            program,
            self.tuning,
            weights.output,
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
        n_slots, keep = 1, None
        if layer.router is not None:
            n_slots = router_shape(self.spec).n_used
            keep = self._route(program, index, layer, layer.router, norm)
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
            keep,
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
            keep,
        )

    def _route(
        self, program: Program, index: int, layer: LayerWeights, router: Matrix, norm: NormInput
    ) -> LandingMemory | None:
        """Choose experts and find them, and gather them if that is the way.

        Returns where those that are read at home are kept; None for nowhere.
        """
        space, label, shape = self.workspace, f"layer {index}", router_shape(self.spec)
        moe_layers, misses = self.weights.moe_layers, self.misses or MissService()
        moe_layer, gathers = moe_layers.index(index), misses.way == "gather"
        lands = gathers or misses.keep
        n_places = self.weights.n_landing if lands else 0
        logits = space.router_logits
        matvec(program, self.tuning, (router,), space.gained, logits, f"{label} router", norm)
        router_topk(
            program,
            self.tuning,
            shape,
            moe_layer,
            logits,
            space.params,
            self.weights.expert_table,
            space.routing,
            space.log,
            f"{label} top-k",
            landing=Landing(len(moe_layers), n_places, gathers),
        )
        if not lands:
            return None
        filled = filled_words(space.log, moe_layer, shape.n_used)
        landing = LandingMemory(layer.landing_ranges, space.log, filled)
        if not gathers:
            return landing
        gather(
            program,
            space.routing,
            landing,
            shape.n_used,
            layer.expert_shape.span_bytes,
            layer.expert_ranges,
            f"{label} gather",
        )
        return None

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
