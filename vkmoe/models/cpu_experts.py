"""Builds the programs by which a CPU computes experts of rows that a GPU hands over.

A program is of one layer. It takes the rows from host memory, computes those of their experts that
its table has, and leaves there what these add to each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vkmoe.batch import BatchKind
from vkmoe.facts import Activation, ModelSpec
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.operations import ExpertBlock, expert_down, expert_gate_up
from vkmoe.kernels.handover.operations import HandedRows, find_experts, give_back, take_over
from vkmoe.kernels.matmul.operations import (
    ExpertTiles,
    TiledExperts,
    expert_matmul_down,
    expert_matmul_gate_up,
    row_parts,
)
from vkmoe.kernels.norms.operations import NormInput, NormOutput
from vkmoe.kernels.prompt_experts.operations import (
    Combining,
    PairTiles,
    RoutedRows,
    clear_done,
    combine_rows,
    expert_tiles,
)
from vkmoe.kernels.tuning import Tuning
from vkmoe.models.weights import CpuWeights
from vkmoe.models.workspace import Workspace, router_shape


@dataclass(frozen=True)
class CpuTensors:
    """Describes what a CPU works on: rows as in the `space` of the GPU, and what they become."""

    spec: ModelSpec
    tuning: Tuning  # of the CPU
    space: Workspace

    @property
    def handed(self) -> HandedRows:
        """Describe the rows that are handed over."""
        assert self.space.exchanged is not None, self.spec.name
        return HandedRows(self.space.exchanged, self.space.routing)

    @cached_property
    def sums(self) -> TensorRef:
        """Describe what is added to each row."""
        return self._rows("sums")

    @cached_property
    def zeros(self) -> TensorRef:
        """Describe what the sums begin with."""
        return self._rows("zeros")

    @cached_property
    def unused(self) -> NormOutput:
        """Describe what the kernels leave for a norm that is not here."""
        rows = self.tuning.fewest_rows
        n_words = -(-self.spec.width // rows) * self.sums.n_rows
        partials = TensorRef("unused partials", n_words, self.sums.n_rows)
        return NormOutput(self.sums, self._rows("unused"), partials, gain=0)

    @property
    def no_norm(self) -> NormInput:
        """Describe the norm of rows that are normed already."""
        return NormInput(TensorRef("no partials", self.sums.n_rows, self.sums.n_rows), 0, 1, 0.0)

    @cached_property
    def tiles(self) -> PairTiles:
        """Describe the tiles of a prompt's experts."""
        routing, shape = self.space.routing, router_shape(self.spec)
        routed = RoutedRows(routing, routing.row_words, shape, self.space.params)
        return PairTiles(routed, self.tuning.tile.columns)

    @cached_property
    def expert_out(self) -> TensorRef:
        """Describe what each expert of each row gives."""
        n_used = self.tiles.routed.shape.n_used
        return TensorRef("expert_out", self.sums.n_words * n_used, self.sums.n_rows)

    @property
    def n_bytes(self) -> int:
        """Count the bytes of all tensors."""
        tiles, unused = self.tiles, self.unused
        tensors = [*self.handed, self.space.act, self.space.params, self.sums, self.zeros]
        tensors += [unused.gained, unused.partials, tiles.tiles, tiles.sorted_pairs, tiles.done]
        tensors += [tiles.brought, self.expert_out]
        return sum(tensor.n_bytes for tensor in tensors)

    def _rows(self, name: str) -> TensorRef:
        x = self.handed.x
        return TensorRef(name, x.n_words, x.n_rows)


@dataclass(frozen=True)
class CpuExperts:
    """Builds the programs; `ones` is the address of f32 [width], a gain that changes nothing."""

    tensors: CpuTensors
    weights: CpuWeights
    ones: int

    def program(self, kind: BatchKind, moe_layer: int) -> Program:
        """Build the program of a MoE layer for a kind of batches.

        Reads `params`, of which the address of the table and the rows count.
        """
        tensors, program = self.tensors, Program(f"{kind.phase}, CPU {moe_layer}")
        op = OpContext(program, tensors.tuning, f"CPU {moe_layer}", n_rows=kind.n_rows)
        take_over(program, tensors.handed, op.n_rows)
        zeros, sums = (ref.rows(op.n_rows).range for ref in (tensors.zeros, tensors.sums))
        program.copy(zeros, sums, "sums cleared")
        append = self._append_prompt if kind.phase == "prompt" else self._append
        append(op, moe_layer)
        give_back(program, tensors.sums, op.n_rows)
        return program

    def _append(self, op: OpContext, moe_layer: int) -> None:
        """Append the sums for rows to decode."""
        tensors, block = self.tensors, self.weights.blocks[moe_layer]
        x, routing = tensors.handed
        shape, params, act = tensors.tiles.routed.shape, tensors.space.params, tensors.space.act
        find_experts(op.named("find"), routing, params, shape, moe_layer, self.weights.table.range)
        experts = ExpertBlock(block.shape, routing, shape.n_used, block.ranges)
        activation = self._activation(moe_layer)
        expert_gate_up(op.named("gate/up"), experts, x, act, tensors.no_norm, activation)
        unused = tensors.unused
        leaves = NormOutput(tensors.sums, unused.gained, unused.partials, self.ones)
        expert_down(op.named("down"), experts, act, leaves)

    def _append_prompt(self, op: OpContext, moe_layer: int) -> None:
        """Append the sums for rows of prompts."""
        tensors, block, tiles = self.tensors, self.weights.blocks[moe_layer], self.tensors.tiles
        picks = tensors.spec.picks(moe_layer)
        routed, params, act = tiles.routed.shape, tensors.space.params, tensors.space.act
        clear_done(op.named("clear"), tiles)
        expert_tiles(op.named("tiles"), tiles, moe_layer, self.weights.table.range, picks=picks)
        lists = ExpertTiles(tiles.tiles, tiles.sorted_pairs, routed.n_experts, routed.n_used, 0)
        experts = TiledExperts(block.shape, params, block.ranges, lists)
        x, activation = row_parts(tensors.handed.x), self._activation(moe_layer)
        expert_matmul_gate_up(op.named("gate/up"), experts, x, act, activation)
        expert_matmul_down(op.named("down"), experts, act, tensors.expert_out)
        combined, how = op.named("combine"), Combining(partial=True, picks=picks)
        combine_rows(combined, tiles, tensors.expert_out, tensors.sums, how)

    def _activation(self, moe_layer: int) -> Activation:
        spec = self.tensors.spec
        return spec.layers[spec.moe_layers[moe_layer]].feed_forward.activation
