"""Appends the feed-forward of a layer: routed experts, a shared one beside them, or one block.

What a router chose is looked up, and with it where each expert lies; experts that are not on the
device are read where they are, kept where they land, or gathered first (facts.ExpertMode).
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import ON_DEVICE, Activation, ExpertMode, ModelSpec
from vkmoe.gpu.program import TensorRef
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

    A layer with experts has three parts: its routing (`_score`, `_choose`), the routed experts
    (`_gather`, `_experts`), and the shared one, whose first half waits for none of these.
    """

    spec: ModelSpec
    space: Workspace
    weights: ModelWeights
    mode: ExpertMode = ON_DEVICE

    def append(self, op: OpContext, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """Append hidden += the block of layer `index`. Returns the number of partials it leaves."""
        space, layer = self.space, self.weights.layers[index].feed_forward
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
        space, gate, bias = self.space, layer.shared_gate, layer.router_bias
        assert gate is None or not bias, "biases are for the routed experts alone"
        assert layer.router is not None, op.label
        matrices = (layer.router, gate) if gate else (layer.router,)
        op.mark("router")
        matvec(op.named("router"), matrices, space.gained, space.router_logits, norm, bias=bias)

    def _choose(self, op: OpContext, layer: FeedForwardWeights, moe_layer: int) -> None:
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

    def _gather(self, op: OpContext, block: Block, moe_layer: int) -> ExpertBlock:
        """Return the chosen experts as they are read, gathered first if misses are served so."""
        space, mode, log = self.space, self.mode, self.space.routing_log
        landing = LandingMemory(block.landing_ranges, log, moe_layer)
        if mode.gathers:
            bringing, n_bytes = op.named("gather"), block.shape.span_bytes
            gather(bringing, space.routing, space.params, landing, n_bytes, block.ranges)
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
        space, half = self.space, op.named("gate/up")
        expert_gate_up(half, experts, space.gained, space.act, norm, activation)
        return expert_down(op.named("down"), experts, space.act, leaves)

    def _shared(self, layer: FeedForwardWeights) -> tuple[ExpertBlock, TensorRef] | None:
        """Return the expert that every token uses, and the tensor between its halves.

        Its weight, if it has one, is behind those of the others.
        """
        space = self.space
        if layer.shared is None:
            return None
        assert space.shared_act is not None, self.spec.name
        rank = space.routing_log.n_used if layer.shared_gate else None
        shape, span = layer.shared.shape, layer.shared.span
        block = ExpertBlock(shape, space.routing, span=span, weight_rank=rank)
        return block, space.shared_act
