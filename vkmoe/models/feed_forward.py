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
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import ExpertBlock, expert_down, expert_gate_up
from vkmoe.ops.gather import LandingMemory, gather
from vkmoe.ops.matvec import matvec
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.router import Landing, RouterTensors, router_topk
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

    @property
    def gathers(self) -> bool:
        return self.way == "gather"

    @property
    def keeps(self) -> bool:
        """Whether the kernels that read experts store them too."""
        return self.keep and not self.gathers

    @property
    def lands(self) -> bool:
        """Whether experts are given a place to land in."""
        return self.gathers or self.keeps


@dataclass(frozen=True)
class FeedForwardBlock:
    """Appends the feed-forward of layers. `misses` is None where no expert ever moves.

    A layer with experts has three parts: its routing (`score`, `choose`), the routed experts
    (`gather`, `run`), and the shared one (`begin_shared`, `end_shared`), which waits for none.
    """

    spec: ModelSpec
    tuning: Tuning
    space: Workspace
    weights: ModelWeights
    misses: MissService | None = None

    def append(self, program: Program, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """hidden += the block of layer `index`. Returns the number of partials it leaves."""
        op = OpContext(program, self.tuning).of_layer(index)
        layer = self.weights.layers[index]
        if layer.router is None:
            op.mark("dense")
            dense = ExpertBlock(layer.expert_shape, self.space.routing, span=layer.dense_span)
            return self.run(op, dense, norm, leaves)
        moe_layer = self.weights.moe_layers.index(index)
        self.score(op, layer, norm)
        if layer.shared is not None:
            self.begin_shared(op, layer.shared, norm)
        self.choose(op, layer, moe_layer)
        op.mark("routed")
        n_partials = self.run(op, self.gather(op, layer, moe_layer), norm, leaves)
        if layer.shared is not None:
            n_partials = self.end_shared(op, layer.shared, leaves)
        return n_partials

    # ----- the routing -----

    def score(self, op: OpContext, layer: LayerWeights, norm: NormInput) -> None:
        """Append the logits of the routed experts, and of the shared one's weight if it has any."""
        space, gate = self.space, layer.shared.gate if layer.shared else None
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

    def choose(self, op: OpContext, layer: LayerWeights, moe_layer: int) -> None:
        """Append the choice of experts by their logits, and the look-up of where they are."""
        space, misses = self.space, self.misses or MissService()
        n_places = self.weights.n_landing if misses.lands else 0
        op.mark("choice")
        router_topk(
            op.named("top-k"),
            router_shape(self.spec),
            moe_layer,
            RouterTensors(space.router_logits, space.params, space.routing, space.routing_log),
            self.weights.expert_table,
            Landing(len(self.weights.moe_layers), n_places, misses.gathers),
            selection_bias=layer.selection_bias,
        )

    # ----- the routed experts -----

    def gather(self, op: OpContext, layer: LayerWeights, moe_layer: int) -> ExpertBlock:
        """Return the chosen experts as they are read, gathered first if misses are served so."""
        space, misses = self.space, self.misses or MissService()
        n_used = router_shape(self.spec).n_used
        landing = None
        if misses.lands:
            filled = space.routing_log.filled(moe_layer)
            landing = LandingMemory(layer.landing_ranges, space.log, filled)
        if landing and misses.gathers:
            span_bytes, ranges = layer.expert_shape.span_bytes, layer.expert_ranges
            label = f"{op.label} gather"
            gather(op.program, space.routing, landing, span_bytes, ranges, label)
        kept = landing if misses.keeps else None
        return ExpertBlock(layer.expert_shape, space.routing, n_used, layer.expert_ranges, kept)

    def run(self, op: OpContext, experts: ExpertBlock, norm: NormInput, leaves: NormOutput) -> int:
        """hidden += the weighted sum of experts. Returns the number of partials it leaves."""
        space, activation = self.space, self.spec.activation
        gate_up = op.named("gate/up")
        expert_gate_up(gate_up, experts, space.gained, space.act, norm, activation)
        return expert_down(op.named("down"), experts, space.act, leaves)

    # ----- the shared expert -----

    def begin_shared(self, op: OpContext, shared: SharedExpert, norm: NormInput) -> None:
        """Append gate and up of the shared expert, which wait for nothing the router does."""
        space, activation, block = self.space, self.spec.activation, self._shared(shared)
        assert space.shared_act is not None, op.label
        op.mark("shared")
        gate_up = op.named("shared gate/up")
        expert_gate_up(gate_up, block, space.gained, space.shared_act, norm, activation)

    def end_shared(self, op: OpContext, shared: SharedExpert, leaves: NormOutput) -> int:
        """hidden += the shared expert. Returns the number of partials it leaves."""
        assert self.space.shared_act is not None, op.label
        op.mark("shared")
        down = op.named("shared down")
        return expert_down(down, self._shared(shared), self.space.shared_act, leaves)

    def _shared(self, shared: SharedExpert) -> ExpertBlock:
        weight_slot = router_shape(self.spec).n_used if shared.gate else None
        routing = self.space.routing
        return ExpertBlock(shared.shape, routing, span=shared.span, weight_slot=weight_slot)
