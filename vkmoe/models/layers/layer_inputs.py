"""Appends what a token brings to every layer besides the state: Gemma 4's per-layer embeddings.

Once for all layers, from the embedding x of the token and its row of a table (both times the root
of their width), inputs = (rms(projection @ x / root(width)) * gain + row) / root(2), where the norm
is of each layer's part alone. Behind its feed-forward, layer i then adds to the state
rms(output @ (gelu(gate @ state) * inputs[i])) * gain. The formulas are those of transformers'
Gemma4TextModel and Gemma4TextDecoderLayer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkmoe.facts import ModelSpec
from vkmoe.gpu.program import TensorRef
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.layer_inputs.operations import gate_inputs
from vkmoe.kernels.matmul.operations import matmul, matmul_residual, row_parts
from vkmoe.kernels.matvec.operations import embed, matvec, matvec_residual
from vkmoe.kernels.norms.operations import NormedPart, NormInput, NormOutput, norm_residual
from vkmoe.models.weights import InputWeights, ModelWeights, TokenInputs
from vkmoe.models.workspace import InputWorkspace, Workspace


@dataclass(frozen=True)
class LayerInputs:
    """Appends what tokens bring to the layers of a model, if they bring anything."""

    spec: ModelSpec
    space: Workspace
    weights: ModelWeights

    def append_all(self, op: OpContext) -> None:
        """Append the inputs of all layers, for rows to decode whose embedding is in `hidden`."""
        if self.weights.inputs is None:
            return
        inputs, hidden = self.weights.inputs, self.space.hidden
        matvec(op.named("projected"), (inputs.projection,), hidden, self._space.projected)
        self._join(op, inputs)

    def append_all_of_prompts(self, op: OpContext) -> None:
        """Append the same for rows of prompts."""
        if self.weights.inputs is None:
            return
        matrices, space = (self.weights.inputs.projection,), self.space
        x, y = row_parts(space.hidden), row_parts(self._space.projected)
        matmul(op.named("projected"), matrices, x, y, space.params)
        self._join(op, self.weights.inputs)

    def append(self, op: OpContext, index: int, norm: NormInput, leaves: NormOutput) -> int:
        """Append hidden += what the token brings to layer `index`, and multiply by its scale.

        `norm` is of nothing: the state is read as it is. Returns the number of partials it leaves.
        """
        layer, gates, act = self._layer(index), self._space.gates, op.named("input output")
        op.mark("dense")
        matvec(op.named("input gate"), (layer.gate,), self.space.hidden, gates)
        self._gate(op, index)
        # It leaves a gained state besides, by any gain: no kernel reads that.
        matvec_residual(act, layer.output, gates, self.space.block_output(layer.post_gain))
        return self._add_normed(op, layer, leaves)

    def append_prompt(self, op: OpContext, index: int) -> None:
        """Append the same for rows of prompts."""
        layer, space, gates = self._layer(index), self.space, row_parts(self._space.gates)
        op.mark("dense")
        hidden, params = row_parts(space.hidden), space.params
        matmul(op.named("input gate"), (layer.gate,), hidden, gates, params)
        self._gate(op, index)
        into, half = row_parts(space.block_output(0).hidden), op.named("input output")
        matmul_residual(half, layer.output, gates, into, params, adds=False)
        self._add_normed(op, layer, NormOutput.alone(space.hidden))

    def _join(self, op: OpContext, inputs: TokenInputs) -> None:
        """Append inputs = scaled rows of the table + normed projections, part by part."""
        space, spec, width = self._space, self.spec, self.spec.input_width
        rows, scale = NormOutput.alone(space.inputs), (width / 2) ** 0.5
        embed(op.named("rows of layers"), inputs.table, self.space.params, rows, scale)
        n_parts = spec.n_layers
        part, sums = (_parts(one, n_parts) for one in (space.projected, space.inputs))
        # As if what is projected were divided by root(width).
        eps, whole = spec.norm_eps * spec.width, replace(op, n_rows=op.n_rows * n_parts)
        added = NormOutput.alone(sums)
        norm_residual(whole.named("inputs"), [NormedPart(part)], inputs.gain, added, width, eps)

    def _gate(self, op: OpContext, index: int) -> None:
        """Append gates = gelu(gates) * the inputs of a layer."""
        space, width = self._space, self.spec.input_width
        gate_inputs(op.named("gated inputs"), space.gates, space.inputs, index * width, width)

    def _add_normed(self, op: OpContext, layer: InputWeights, leaves: NormOutput) -> int:
        """Append hidden = scale * (hidden + norm(output)). Returns the number of partials left."""
        parts, eps = [NormedPart(self.space.block_output(0).hidden)], self.spec.norm_eps
        normed, gain, width = op.named("input post norm"), layer.post_gain, self.spec.width
        return norm_residual(normed, parts, gain, leaves, width, eps, layer.scale)

    def _layer(self, index: int) -> InputWeights:
        layer = self.weights.layers[index].input
        assert layer is not None, index
        return layer

    @property
    def _space(self) -> InputWorkspace:
        assert self.space.inputs is not None, self.spec.name
        return self.space.inputs


def _parts(tensor: TensorRef, n_parts: int) -> TensorRef:
    """View each of so many parts of a row as a row."""
    return replace(tensor, n_rows=tensor.n_rows * n_parts)
