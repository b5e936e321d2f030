"""Appends the feed-forward block of a layer to a program: routed experts, a shared one beside them,
or one block alone.

Router, the shared expert's gate/up, top-k, gate/up, down, the shared expert's down. Where misses
are gathered, that comes before gate/up.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import ON_DEVICE, Activation, ExpertMode, ModelSpec
from vkmoe.models.weights import Block, FeedForwardWeights, ModelWeights
from vkmoe.models.workspace import Workspace, router_shape
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import ExpertBlock, LandingMemory, expert_down, expert_gate_up, gather
from vkmoe.ops.matvec import matvec
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.router import Landing, RouterTensors, router_topk

__all__ = ["FeedForwardBlock"]


@dataclass(frozen=True)
class FeedForwardBlock:
    """Appends the feed-forward of layers; `mode` says what becomes of missed experts.

    A layer with experts has three parts: its routing (`score`, `choose`), the routed experts
    (`gather`, `run`), and the shared one (`begin_shared`, `end_shared`), which waits for none.
    """

    spec: ModelSpec
    space: Workspace
    weights: ModelWeights
    mode: ExpertMode = ON_DEVICE

    def append(self, op: OpContext, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """Append hidden += the block of layer `index`. Returns the number of partials it leaves."""
        layer = self.weights.layers[index].feed_forward
        activation = self.spec.layers[index].feed_forward.activation
        if layer.router is None:
            op.mark("dense")
            dense = ExpertBlock(layer.block.shape, self.space.routing, span=layer.block.span)
            return self.run(op, dense, norm, leaves, activation)
        moe_layer = self.weights.moe_layers.index(index)
        self.score(op, layer, norm)
        if layer.shared is not None:
            self.begin_shared(op, self._shared(layer), norm, activation)
        self.choose(op, layer, moe_layer)
        op.mark("routed")
        experts = self.gather(op, layer.block, moe_layer)
        n_partials = self.run(op, experts, norm, leaves, activation)
        if layer.shared is not None:
            n_partials = self.end_shared(op, self._shared(layer), leaves)
        return n_partials

    # ----- the routing -----

    def score(self, op: OpContext, layer: FeedForwardWeights, norm: NormInput) -> None:
        """Append the logits of the routed experts, and of the shared one's weight if it has any."""
        space, gate = self.space, layer.shared_gate
        assert gate is None or not layer.router_bias, "biases are for the routed experts alone"
        assert layer.router is not None, op.label
        matrices = (layer.router, gate) if gate else (layer.router,)
        op.mark("router")
        matvec(
            op.named("router"),
            matrices,
            space.gained,
            space.router_logits,
            norm,
            bias=layer.router_bias,
        )

    def choose(self, op: OpContext, layer: FeedForwardWeights, moe_layer: int) -> None:
        """Append the choice of experts by their logits, and the look-up of where they are."""
        space, mode = self.space, self.mode
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

    # ----- the routed experts -----

    def gather(self, op: OpContext, block: Block, moe_layer: int) -> ExpertBlock:
        """Return the chosen experts as they are read, gathered first if misses are served so."""
        space, mode = self.space, self.mode
        n_used = router_shape(self.spec).n_used
        landing = None
        if mode.lands:
            filled = space.routing_log.filled(moe_layer)
            landing = LandingMemory(block.landing_ranges, space.log, filled)
        if landing and mode.gathers:
            label = f"{op.label} gather"
            gather(op.program, space.routing, landing, block.shape.span_bytes, block.ranges, label)
        kept = landing if mode.keeps else None
        return ExpertBlock(block.shape, space.routing, n_used, block.ranges, kept)

    def run(
        self,
        op: OpContext,
        experts: ExpertBlock,
        norm: NormInput,
        leaves: NormOutput,
        activation: Activation,
    ) -> int:
        """Append hidden += the weighted sum of experts. Returns the number of its partials."""
        space = self.space
        gate_up = op.named("gate/up")
        expert_gate_up(gate_up, experts, space.gained, space.act, norm, activation)
        return expert_down(op.named("down"), experts, space.act, leaves)

    # ----- the shared expert -----

    def begin_shared(
        self, op: OpContext, shared: ExpertBlock, norm: NormInput, activation: Activation
    ) -> None:
        """Append gate and up of the shared expert, which wait for nothing the router does."""
        space = self.space
        assert space.shared_act is not None, op.label
        op.mark("shared")
        gate_up = op.named("shared gate/up")
        expert_gate_up(gate_up, shared, space.gained, space.shared_act, norm, activation)

    def end_shared(self, op: OpContext, shared: ExpertBlock, leaves: NormOutput) -> int:
        """Append hidden += the shared expert. Returns the number of partials it leaves."""
        assert self.space.shared_act is not None, op.label
        op.mark("shared")
        return expert_down(op.named("shared down"), shared, self.space.shared_act, leaves)

    def _shared(self, layer: FeedForwardWeights) -> ExpertBlock:
        assert layer.shared is not None
        rank = router_shape(self.spec).n_used if layer.shared_gate else None
        shape, span = layer.shared.shape, layer.shared.span
        return ExpertBlock(shape, self.space.routing, span=span, weight_rank=rank)
