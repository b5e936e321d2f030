"""Appends the feed-forward block of a layer to a program: routed experts, a shared one beside them,
or one block alone.

Router, the shared expert's gate/up, top-k, gate/up, down, the shared expert's down. Where misses
are gathered, that comes before gate/up.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.choices import MissWay
from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import Program
from vkmoe.models.weights import LayerWeights, ModelWeights, SharedExpert
from vkmoe.models.workspace import Workspace, router_shape
from vkmoe.ops.experts import expert_down, expert_gate_up
from vkmoe.ops.gather import LandingMemory, gather
from vkmoe.ops.matvec import Matrix, matvec
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.router import Landing, filled_words, router_topk
from vkmoe.ops.tuning import Tuning

__all__ = ["FeedForwardBlock", "MissService"]


@dataclass(frozen=True)
class MissService:
    """How experts that are at home are served.

    read: kernels read them there; with `keep` they also store them in landing places meanwhile.
    gather: they are copied into landing places first and read there; the host keeps them.
    """

    way: MissWay = "read"
    keep: bool = False


@dataclass(frozen=True)
class FeedForwardBlock:
    """Appends the feed-forward of layers. `misses` is None where no expert ever moves."""

    spec: ModelSpec
    tuning: Tuning
    space: Workspace
    weights: ModelWeights
    misses: MissService | None = None

    def append(self, program: Program, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """hidden += the block of layer `index`. Returns the number of partials it leaves."""
        space, label = self.space, f"layer {index}"
        layer, experts = self.weights.layers[index], self.spec.experts
        n_slots, keep = 1, None
        if layer.router is not None and experts is not None:
            n_slots = experts.n_used
            keep = self._route(program, index, layer, layer.router, norm)
        else:
            program.mark("dense", index)
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
            self.spec.activation,
        )
        n_partials = expert_down(
            program,
            self.tuning,
            layer.expert_shape,
            space.act,
            space.routing,
            n_slots,
            leaves,
            layer.expert_ranges,
            f"{label} down",
            layer.dense_span,
            keep,
        )
        if layer.shared is None:
            return n_partials
        program.mark("shared", index)
        return self._shared_down(program, label, layer.shared, leaves)

    def _route(
        self, program: Program, index: int, layer: LayerWeights, router: Matrix, norm: NormInput
    ) -> LandingMemory | None:
        """Choose experts and find them, and gather them if misses are served so.

        Returns where those that are read at home are stored; None for nowhere.
        """
        space, label, shape = self.space, f"layer {index}", router_shape(self.spec)
        moe_layers, misses = self.weights.moe_layers, self.misses or MissService()
        moe_layer, gathers = moe_layers.index(index), misses.way == "gather"
        lands = gathers or misses.keep
        program.mark("router", index)
        self._logits(program, label, layer, router, norm)
        if layer.shared is not None:
            program.mark("shared", index)
            self._shared_gate_up(program, label, layer.shared, norm)
        program.mark("choice", index)
        router_topk(
            program,
            self.tuning,
            shape,
            moe_layer,
            space.router_logits,
            space.params,
            self.weights.expert_table,
            space.routing,
            space.log,
            f"{label} top-k",
            landing=Landing(len(moe_layers), self.weights.n_landing * lands, gathers),
            selection_bias=layer.selection_bias,
        )
        program.mark("routed", index)
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
            layer.expert_shape.span_bytes,
            layer.expert_ranges,
            f"{label} gather",
        )
        return None

    def _logits(
        self, program: Program, label: str, layer: LayerWeights, router: Matrix, norm: NormInput
    ) -> None:
        """Append the logits of the routed experts, and of the shared one's weight if it has any."""
        space, gate = self.space, layer.shared.gate if layer.shared else None
        assert gate is None or not layer.router_bias, "biases are for the routed experts alone"
        matvec(
            program,
            self.tuning,
            (router, gate) if gate else (router,),
            space.gained,
            space.router_logits,
            f"{label} router",
            norm,
            bias=layer.router_bias,
        )

    def _shared_gate_up(
        self, program: Program, label: str, shared: SharedExpert, norm: NormInput
    ) -> None:
        """Append gate and up of the shared expert, which wait for nothing the router does."""
        space = self.space
        assert space.shared_act is not None, label
        expert_gate_up(
            program,
            self.tuning,
            shared.shape,
            space.gained,
            space.routing,
            space.shared_act,
            1,
            norm,
            (),
            f"{label} shared gate/up",
            shared.span,
            activation=self.spec.activation,
        )

    def _shared_down(
        self, program: Program, label: str, shared: SharedExpert, leaves: NormOutput
    ) -> int:
        space, experts = self.space, self.spec.experts
        assert space.shared_act is not None and experts is not None, label
        return expert_down(
            program,
            self.tuning,
            shared.shape,
            space.shared_act,
            space.routing,
            1,
            leaves,
            (),
            f"{label} shared down",
            shared.span,
            weight_slot=experts.n_used if shared.gate else None,
        )
