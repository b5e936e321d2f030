"""Appends the feed-forward of a layer: routed experts, a shared one beside them, or one block.

What a router chose is looked up, and with it where each expert lies; experts that are not on the
device are read where they are, kept where they land, or gathered first (modes.py). Where
the CPU computes experts, it gets what it needs behind the choice, and what it gives is joined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkmoe.facts import Activation, ModelSpec
from vkmoe.gpu.program import TensorRef
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.operations import ExpertBlock, expert_down, expert_gate_up
from vkmoe.kernels.handover.operations import (
    HandedRows,
    find_experts,
    hand_over,
    join_rows,
    take_back,
)
from vkmoe.kernels.matmul.operations import (
    ExpertTiles,
    RowParts,
    TiledExperts,
    expert_matmul_down,
    expert_matmul_gate_up,
    matmul,
    matmul_residual,
    row_parts,
)
from vkmoe.kernels.matvec.operations import Matrix, matvec
from vkmoe.kernels.memory.operations import LandingMemory, gather
from vkmoe.kernels.norms.operations import (
    NormedPart,
    NormInput,
    NormOutput,
    norm_residual,
    rms_norm,
)
from vkmoe.kernels.prompt_experts.operations import (
    Combining,
    PairTiles,
    SharedRows,
    bring_experts,
    clear_done,
    combine_rows,
    expert_tiles,
)
from vkmoe.kernels.router.operations import ExpertNumbers, Landing, RouterTensors, router_topk
from vkmoe.models.weights import BlockWeights, FeedForwardWeights, ModelWeights
from vkmoe.models.workspace import Workspace, router_shape
from vkmoe.modes import RESIDENT, ExpertMode


@dataclass(frozen=True)
class FeedForwardBlock:
    """Appends the feed-forward of layers; `mode` says what becomes of missed experts.

    A layer with experts has three parts: its routing (`_score`, `_choose`), the routed experts
    (`_gather`, `_experts`), and the shared one, whose first half waits for none of these.
    """

    spec: ModelSpec
    space: Workspace
    weights: ModelWeights
    mode: ExpertMode = RESIDENT

    def append(self, op: OpContext, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """Append hidden += the block of layer `index`. Returns the number of partials it leaves."""
        space, layer = self.space, self.weights.layers[index].feed_forward
        activation = self.spec.layers[index].feed_forward.activation
        into = self._output(layer, leaves)
        if layer.router is None:
            op.mark("dense")
            dense = ExpertBlock(layer.block.shape, space.routing, span=layer.block.span)
            n_partials = self._experts(op, dense, norm, into, activation)
        else:
            n_partials = self._append_moe(op, index, norm, into, activation)
        return self._add_normed(op, layer, leaves) if layer.post_gain else n_partials

    def _append_moe(
        self, op: OpContext, index: int, norm: NormInput, into: NormOutput, activation: Activation
    ) -> int:
        """Append `into` += the experts of layer `index`, and what is beside them.

        Returns the number of partials that leaves.
        """
        space, layer = self.space, self.weights.layers[index].feed_forward
        moe_layer, shared = self.weights.moe_layers.index(index), self._shared(layer)
        self._score(op, layer, norm)
        if layer.block.on_cpu:
            self._hand_over(op, layer, moe_layer)
        if shared is not None:
            op.mark("shared")
            block, act = shared
            half = op.named("shared gate/up")
            expert_gate_up(half, block, space.gained, act, norm, activation)
        n_partials = 0
        if not layer.block.on_cpu:
            op.mark("choice")
            self._choose(op, layer, moe_layer, self.weights.n_landing if self.mode.lands else 0)
        if layer.block.on_device:
            op.mark("routed")
            experts = self._gather(op, layer.block, moe_layer)
            n_partials = self._experts(op, experts, norm, into, activation)
            into = replace(into, adds=True)
        if shared is not None:
            op.mark("shared")
            block, act = shared
            n_partials = expert_down(op.named("shared down"), block, act, into)
            into = replace(into, adds=True)
        if layer.block.on_cpu:
            n_partials = self._join(op, into)
        if layer.beside is not None:
            self._append_beside(op, layer, layer.beside, activation)
        return n_partials

    def append_prompt(self, op: OpContext, index: int) -> None:
        """Append hidden += the block of layer `index`, for rows of prompts.

        All of them are routed. In the last layer the experts of those that want logits are
        computed alone: nothing reads what the others would become.
        """
        space, layer = self.space, self.weights.layers[index].feed_forward
        activation = self.spec.layers[index].feed_forward.activation
        norm, into = op.named("norm"), self._output(layer, self._hidden(layer))
        op.mark("router" if layer.router else "dense")
        rms_norm(norm, space.hidden, space.gained, self.spec.width, layer.gain, self.spec.norm_eps)
        if layer.router is None:
            self._append_dense(op, layer.block, activation, into)
        else:
            self._append_prompt_moe(op, index, into, activation)
        if layer.post_gain:
            self._add_normed(op, layer, self._hidden(layer))

    def _append_prompt_moe(
        self, op: OpContext, index: int, into: NormOutput, activation: Activation
    ) -> None:
        """Append the experts of layer `index`, and what is beside them, for rows of prompts."""
        space, layer, prompt = (
            self.space,
            self.weights.layers[index].feed_forward,
            self.space.prompt,
        )
        assert prompt is not None and prompt.expert_out is not None, op.label
        moe_layer, tiles = self.weights.moe_layers.index(index), prompt.routed
        assert tiles is not None, op.label
        matrices, logits, bias = _router_matrices(layer), op.named("router"), layer.router_bias
        read = row_parts(self._router_input(op, layer, space.gained))
        y = row_parts(space.router_logits)
        matmul(logits, matrices, read, y, space.params, bias=bias, exact=True)
        clear_done(op.named("clear"), tiles)  # beside the router: neither waits for the other
        on_cpu, out = layer.block.on_cpu, prompt.expert_out
        picks = self.spec.picks(moe_layer)
        if on_cpu:
            self._choose_and_hand_over(op, layer, moe_layer, space.gained)
        shared = self._shared_rows(op, layer, activation)
        if not on_cpu:
            op.mark("choice")
            self._choose(op, layer, moe_layer, n_places=0)
        if layer.block.on_device:
            op.mark("routed")
            self._append_routed(op, layer.block, tiles, moe_layer, activation)
        if layer.block.on_device or shared is not None:
            op.mark("combine")
            how = Combining(partial=on_cpu, picks=picks, adds=into.adds)
            combine_rows(op.named("combine"), tiles, out, into.hidden, how, shared)
            into = replace(into, adds=True)
        if on_cpu:
            self._join(op, into)
        if layer.beside is not None:
            self._append_beside_prompt(op, layer, layer.beside, activation)

    def _append_dense(
        self, op: OpContext, block: BlockWeights, activation: Activation, into: NormOutput
    ) -> None:
        """Append hidden += a block without experts, for rows of prompts."""
        space, x, hidden = self.space, row_parts(self.space.gained), row_parts(into.hidden)
        matrices = TiledExperts(block.shape, space.params, block.ranges, span=block.span)
        expert_matmul_gate_up(op.named("gate/up"), matrices, x, space.act, activation)
        down, bias = block.shape.down, block.down_bias
        matrix = Matrix(down.type, block.down, down.n_rows, down.n_columns, down.row_bytes)
        act, half = RowParts(space.act, down.n_columns), op.named("down")
        matmul_residual(half, matrix, act, hidden, space.params, bias=bias, adds=into.adds)

    # ----- norms behind a part, and a block beside experts -----

    def _output(self, layer: FeedForwardWeights, leaves: NormOutput) -> NormOutput:
        """Return where the part adds what it gives; where that is normed first, it is kept."""
        return self.space.block_output(layer.gain) if layer.post_gain else leaves

    def _hidden(self, layer: FeedForwardWeights) -> NormOutput:
        """Return the state of rows of prompts, from which no kernel reads what norms need."""
        space = self.space
        return NormOutput(space.hidden, space.gained, space.norm_partials, layer.gain)

    def _add_normed(self, op: OpContext, layer: FeedForwardWeights, leaves: NormOutput) -> int:
        """Append hidden = scale * (hidden + norm(what the part gives)).

        What a block beside experts gives is added to what they give, each behind a norm of its own.
        Returns the number of partials that leaves.
        """
        op.mark("combine")
        space, width, eps = self.space, self.spec.width, self.spec.norm_eps
        parts = [NormedPart(space.block_output(0).hidden, layer.experts_post_gain)]
        if space.beside_out is not None and layer.beside is not None:
            parts.insert(0, NormedPart(space.beside_out, layer.beside_post_gain))
        normed, gain, scale = op.named("post norm"), layer.post_gain, layer.scale
        return norm_residual(normed, parts, gain, leaves, width, eps, scale)

    def _router_input(
        self, op: OpContext, layer: FeedForwardWeights, usual: TensorRef
    ) -> TensorRef:
        """Return what the router reads, normed first where it has a norm of its own."""
        space = self.space
        if not layer.router_gain:
            return usual
        assert space.router_in is not None, op.label
        width, eps = self.spec.width, self.spec.norm_eps
        normed = op.named("router norm")
        rms_norm(normed, space.hidden, space.router_in, width, layer.router_gain, eps)
        return space.router_in

    def _append_beside(
        self, op: OpContext, layer: FeedForwardWeights, block: BlockWeights, activation: Activation
    ) -> None:
        """Append what the block beside experts gives, which have read `gained` before."""
        op.mark("dense")
        space, width, eps = self.space, self.spec.width, self.spec.norm_eps
        assert space.beside_out is not None and space.shared_act is not None, op.label
        gain, act = layer.beside_gain, space.shared_act
        rms_norm(op.named("beside norm"), space.hidden, space.gained, width, gain, eps)
        dense = ExpertBlock(block.shape, space.routing, span=block.span)
        half = op.named("beside gate/up")
        expert_gate_up(half, dense, space.gained, act, None, activation)
        into = NormOutput(space.beside_out, space.gained, space.norm_partials, gain, adds=False)
        expert_down(op.named("beside down"), dense, act, into)

    def _append_beside_prompt(
        self, op: OpContext, layer: FeedForwardWeights, block: BlockWeights, activation: Activation
    ) -> None:
        """Append the same for rows of prompts."""
        op.mark("dense")
        space, width, eps = self.space, self.spec.width, self.spec.norm_eps
        assert space.beside_out is not None and space.shared_act is not None, op.label
        normed, gain = op.named("beside norm"), layer.beside_gain
        rms_norm(normed, space.hidden, space.gained, width, gain, eps)
        tiled = TiledExperts(block.shape, space.params, block.ranges, span=block.span)
        half, x = op.named("beside gate/up"), row_parts(space.gained)
        expert_matmul_gate_up(half, tiled, x, space.shared_act, activation)
        expert_matmul_down(op.named("beside down"), tiled, space.shared_act, space.beside_out)

    def _hand_over(self, op: OpContext, layer: FeedForwardWeights, moe_layer: int) -> None:
        """Append the choice for rows to decode, and hand it over with their normed state."""
        space, x = self.space, self.space.exchanged
        assert x is not None, op.label
        rms_norm(op.named("norm"), space.hidden, x, self.spec.width, layer.gain, self.spec.norm_eps)
        self._choose_and_hand_over(op, layer, moe_layer, x)

    def _choose_and_hand_over(
        self, op: OpContext, layer: FeedForwardWeights, moe_layer: int, x: TensorRef
    ) -> None:
        """Append the choice, and hand it over with rows `x`."""
        op.mark("choice")
        self._choose(op, layer, moe_layer, n_places=0)
        op.mark("handed")
        hand_over(op.program, HandedRows(x, self.space.routing), op.n_rows)

    def _join(self, op: OpContext, output: NormOutput) -> int:
        """Append hidden += what the CPU computed; returns the number of partials that leaves."""
        space = self.space
        assert space.exchanged is not None, op.label
        op.mark("joined")
        take_back(op.program, space.exchanged, op.n_rows)
        width = self.spec.width
        return join_rows(op.named("join"), space.exchanged, space.params, output, width)

    def _append_routed(
        self,
        op: OpContext,
        block: BlockWeights,
        tiles: PairTiles,
        moe_layer: int,
        activation: Activation,
    ) -> None:
        """Append what the routed experts give for rows of prompts.

        Where one may have several tiles, experts that are not on the device are brought there, some
        at a time: their gate and up while those of the experts before them are multiplied, and
        their down while the others' is.
        """
        space, prompt, table = self.space, self.space.prompt, self.weights.expert_table
        assert prompt is not None and prompt.expert_out is not None
        picks = self.spec.picks(moe_layer)
        places = self.weights.brought_places if op.n_rows > tiles.columns else None
        n_rounds = places.n_rounds if places else 0
        routed, shape, x = tiles.routed.shape, block.shape, row_parts(space.gained)
        bringing = op.named("bring")
        gate_up, down = slice(0, shape.down.offset), slice(shape.down.offset, shape.span_bytes)
        expert_tiles(op.named("tiles"), tiles, moe_layer, table, places, picks)
        for index in range(1 + n_rounds):
            memory, n_experts = block.ranges, routed.n_experts
            if places and index:
                memory = (places.half(index), *block.ranges)
                n_experts = places.most_experts(index)
            lists = ExpertTiles(tiles.tiles, tiles.sorted_pairs, n_experts, routed.n_used, index)
            experts = TiledExperts(shape, space.params, memory, lists)
            if places and index < n_rounds:
                bring_experts(bringing, tiles, places, index + 1, gate_up, block.ranges)
            expert_matmul_gate_up(op.named("gate/up"), experts, x, space.act, activation)
            if places and index < n_rounds:
                bring_experts(bringing, tiles, places, index + 1, down, block.ranges)
            expert_matmul_down(op.named("down"), experts, space.act, prompt.expert_out)

    def _shared_rows(
        self, op: OpContext, layer: FeedForwardWeights, activation: Activation
    ) -> SharedRows | None:
        """Append what the shared expert gives for rows of prompts."""
        space, prompt = self.space, self.space.prompt
        if layer.shared is None:
            return None
        assert prompt is not None and prompt.shared_out is not None and space.shared_act is not None
        op.mark("shared")
        ranges, span = layer.shared.ranges, layer.shared.span
        block = TiledExperts(layer.shared.shape, space.params, ranges, span=span)
        half, x = op.named("shared gate/up"), row_parts(space.gained)
        expert_matmul_gate_up(half, block, x, space.shared_act, activation)
        expert_matmul_down(op.named("shared down"), block, space.shared_act, prompt.shared_out)
        return SharedRows(prompt.shared_out, gated=layer.shared_gate is not None)

    def _score(self, op: OpContext, layer: FeedForwardWeights, norm: NormInput) -> None:
        """Append the logits of the routed experts, and of the shared one's weight if it has any."""
        space, matrices, bias = self.space, _router_matrices(layer), layer.router_bias
        op.mark("router")
        read = self._router_input(op, layer, space.gained)
        normed = norm if read is space.gained else None
        matvec(op.named("router"), matrices, read, space.router_logits, normed, bias=bias)

    def _choose(
        self, op: OpContext, layer: FeedForwardWeights, moe_layer: int, n_places: int
    ) -> None:
        """Append the choice of experts by their logits, and the look-up of where they are."""
        space, log = self.space, self.space.routing_log(op.n_rows)
        router_topk(
            op.named("top-k"),
            router_shape(self.spec),
            moe_layer,
            RouterTensors(space.router_logits, space.params, space.routing, log),
            self.weights.expert_table,
            Landing(len(self.weights.moe_layers), n_places, self.mode.gathers),
            ExpertNumbers(layer.selection_bias, layer.output_scales),
        )

    def _gather(self, op: OpContext, block: BlockWeights, moe_layer: int) -> ExpertBlock:
        """Return the chosen experts as they are read, gathered first if misses are served so.

        Where the CPU computes some of them, the others come first.
        """
        space, mode, log = self.space, self.mode, self.space.routing_log(op.n_rows)
        if block.on_cpu:
            finding, table = op.named("find"), self.weights.expert_table
            shape = router_shape(self.spec)
            find_experts(finding, space.routing, space.params, shape, moe_layer, table)
        landing = LandingMemory(block.landing_ranges, log, moe_layer)
        if mode.gathers:
            bringing, n_bytes = op.named("gather"), block.shape.span_bytes
            gather(bringing, space.routing, space.params, landing, n_bytes, block.ranges)
        kept = landing if mode.keeps else None
        return ExpertBlock(
            block.shape, space.routing, log.n_used, block.ranges, kept, sparse=block.on_cpu
        )

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
        rank = space.routing_log(1).n_used if layer.shared_gate else None
        shape, span = layer.shared.shape, layer.shared.span
        block = ExpertBlock(shape, space.routing, span=span, weight_rank=rank)
        return block, space.shared_act


def _router_matrices(layer: FeedForwardWeights) -> tuple[Matrix, ...]:
    """Return what gives the logits of routed experts, and of the shared one's weight if any."""
    router, gate = layer.router, layer.shared_gate
    assert router is not None
    assert gate is None or not layer.router_bias, "biases are for the routed experts alone"
    return (router, gate) if gate else (router,)
