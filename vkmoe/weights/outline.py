"""Describes the weights of a model before any memory is there for them: by addresses that stand for
places. Programs over these have the commands of the model's own, but for the addresses.
"""

from __future__ import annotations

from vkmoe.gpu.arena import ALIGNMENT, Arena, Placement, round_up
from vkmoe.gpu.program import Range, memory_range
from vkmoe.kernels.matvec.operations import Matrix
from vkmoe.models.tensors import FeedForwardTensors, LayerTensors, ModelTensors
from vkmoe.models.trunk_tensors import FileMatrix, FileVector
from vkmoe.models.weights import AheadWeights, BlockWeights, LayerWeights, ModelWeights, TokenInputs
from vkmoe.quants import device_row_bytes
from vkmoe.quants.types import Bytes
from vkmoe.weights.loader import place_ahead, place_layer
from vkmoe.weights.placer import WeightPlaces

_FIRST = 1 << 32  # more than any offset


class Outline(WeightPlaces):
    """Gives each tensor an address that no other has."""

    def __init__(self) -> None:
        self._next = _FIRST

    def take(self, n_bytes: int) -> int:
        """Return the address of bytes that nothing else has."""
        address, self._next = self._next, self._next + round_up(max(n_bytes, ALIGNMENT))
        return address

    def range(self, n_bytes: int) -> Range:
        """Return memory that nothing else has."""
        return memory_range(self.take(n_bytes), n_bytes)

    def matrix(self, tensor: FileMatrix) -> Matrix:
        row_bytes = device_row_bytes(tensor.type, tensor.n_columns)
        address = self.take(tensor.n_bytes)
        return Matrix(tensor.type, address, tensor.n_rows, tensor.n_columns, row_bytes)

    def vector(self, tensor: FileVector) -> int:
        return self.take(tensor.n_bytes)

    def place(self, data: Bytes) -> int:
        return self.take(data.size)

    def spans(self, block: FeedForwardTensors, arena: Arena | None = None) -> list[Placement]:
        n_bytes = self.shape(block).span_bytes
        addresses = (self.take(n_bytes) for _ in range(block.n_experts))
        return [Placement(None, 0, address) for address in addresses]  # type: ignore[arg-type]

    def model(
        self, tensors: ModelTensors, table: Range, n_cpu_layers: int = 0
    ) -> tuple[ModelWeights, AheadWeights | None]:
        """Describe all weights of a model, and those of what guesses tokens, if anything does.

        The CPU computes the experts of the first layers that have any.
        """
        embeddings, rows = self.matrix(tensors.embeddings), tensors.inputs
        tied = tensors.output is tensors.embeddings
        layers, n_left = list[LayerWeights](), n_cpu_layers
        for layer in tensors.layers:
            on_cpu = layer.has_experts and n_left > 0
            n_left -= on_cpu
            layers.append(place_layer(self, layer, self._block(layer, on_cpu)))
        inputs = None
        if rows is not None:
            places = self.matrix(rows.table), self.matrix(rows.projection), self.vector(rows.gain)
            inputs = TokenInputs(*places)
        gain = self.vector(tensors.output_gain)
        output = embeddings if tied else self.matrix(tensors.output)
        weights = ModelWeights(embeddings, gain, output, tuple(layers), table, inputs=inputs)
        ahead = place_ahead(self, tensors.ahead, weights) if tensors.ahead is not None else None
        return weights, ahead

    def _block(self, layer: LayerTensors, on_cpu: bool) -> BlockWeights:
        shape = self.shape(layer.block)
        if not layer.has_experts:
            return self.block(layer.block)
        if on_cpu:
            return BlockWeights(shape, on_cpu=True)
        return BlockWeights(shape, ranges=(self.range(layer.block.n_experts * shape.span_bytes),))
