"""Appends the feed-forward block of a layer to a program: routed experts, a shared one beside them,
or one block alone.

Router, the shared expert's gate/up, top-k, gate/up, down, the shared expert's down. Where misses
are gathered, that comes before gate/up.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import ON_DEVICE, ExpertMode, ModelSpec
from vkmoe.gpu.program import Program
from vkmoe.models.weights import Block, FeedForwardWeights, ModelWeights
from vkmoe.models.workspace import Workspace, router_shape
from vkmoe.ops.experts import expert_down, expert_gate_up
from vkmoe.ops.gather import LandingMemory, gather
from vkmoe.ops.matvec import Matrix, matvec
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.router import Landing, filled_words, router_topk
from vkmoe.ops.tuning import Tuning

__all__ = ["FeedForwardBlock"]


@dataclass(frozen=True)
class FeedForwardBlock:
    """Appends the feed-forward of layers; `mode` says what becomes of missed experts."""

    spec: ModelSpec
    tuning: Tuning
    space: Workspace
    weights: ModelWeights
    mode: ExpertMode = ON_DEVICE

    def append(self, program: Program, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """hidden += the block of layer `index`. Returns the number of partials it leaves."""
        space, label = self.space, f"layer {index}"
        layer, experts = self.weights.layers[index].feed_forward, self.spec.experts
        activation = self.spec.layers[index].feed_forward.activation
        n_slots, keep = 1, None
        if layer.router is not None and experts is not None:
            n_slots = experts.n_used
            keep = self._route(program, index, layer, layer.router, norm)
        expert_gate_up(
            program,
            self.tuning,
            layer.block.shape,
            space.gained,
            space.routing,
            space.act,
            n_slots,
            norm,
            layer.block.ranges,
            f"{label} gate/up",
            layer.block.span,
            keep,
            activation,
        )
        n_partials = expert_down(
            program,
            self.tuning,
            layer.block.shape,
            space.act,
            space.routing,
            n_slots,
            leaves,
            layer.block.ranges,
            f"{label} down",
            layer.block.span,
            keep,
        )
        if layer.shared is None:
            return n_partials
        return self._shared_down(program, label, layer.shared, leaves)

    def _route(
        self,
        program: Program,
        index: int,
        layer: FeedForwardWeights,
        router: Matrix,
        norm: NormInput,
    ) -> LandingMemory | None:
        """Choose experts and find them, and gather them if misses are served so.

        Returns where those that are read at home are stored; None for nowhere.
        """
        space, label, shape = self.space, f"layer {index}", router_shape(self.spec)
        moe_layers, mode = self.weights.moe_layers, self.mode
        moe_layer = moe_layers.index(index)
        self._logits(program, label, layer, router, norm)
        if layer.shared is not None:
            self._shared_gate_up(program, label, layer.shared, norm)
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
            landing=Landing(len(moe_layers), self.weights.n_landing * mode.lands, mode.gathers),
            selection_bias=layer.selection_bias,
        )
        if not mode.lands:
            return None
        filled = filled_words(space.log, moe_layer, shape.n_used)
        landing = LandingMemory(layer.block.landing_ranges, space.log, filled)
        if not mode.gathers:
            return landing
        gather(
            program,
            space.routing,
            landing,
            layer.block.shape.span_bytes,
            layer.block.ranges,
            f"{label} gather",
        )
        return None

    def _logits(
        self,
        program: Program,
        label: str,
        layer: FeedForwardWeights,
        router: Matrix,
        norm: NormInput,
    ) -> None:
        """Append the logits of the routed experts, and of the shared one's weight if it has any."""
        space, gate = self.space, layer.shared_gate
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

    def _shared_gate_up(self, program: Program, label: str, shared: Block, norm: NormInput) -> None:
        """Append gate and up of the shared expert, which wait for nothing the router does."""
        space, experts = self.space, self.spec.experts
        assert space.shared_act is not None and experts is not None, label
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
            activation=experts.activation,
        )

    def _shared_down(self, program: Program, label: str, shared: Block, leaves: NormOutput) -> int:
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
            weight_slot=experts.n_used if experts.shared_gate else None,
        )
