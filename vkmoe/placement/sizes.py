"""How many bytes a model's weights take in device layout, and how an expert's span is laid out.

Pure: from shapes and types alone, so that a plan can be made without a device.
"""

from __future__ import annotations

import math

from vkmoe.facts import WeightBytes
from vkmoe.gguf_file import TensorInfo
from vkmoe.gpu.arena import round_up
from vkmoe.models.tensors import LayerTensors, ModelTensors
from vkmoe.ops.experts import ExpertShape, SpanMatrix
from vkmoe.quants import device_row_bytes

__all__ = ["expert_shape", "weight_bytes"]


def weight_bytes(tensors: ModelTensors) -> WeightBytes:
    """Bytes the weights will take in device layout, rounded as they are placed."""
    pieces = [_device_bytes(tensors.embeddings)]
    spans: list[int] = []
    expert_bytes = 0
    for layer in tensors.layers:
        span_bytes = expert_shape(layer).span_bytes
        if layer.router is None:
            pieces.append(span_bytes)
        else:
            spans.append(span_bytes)
            expert_bytes += layer.router.shape[0] * span_bytes
        pieces += [_device_bytes(tensor) for tensor in _every_token(layer)]
    pieces.append(_device_bytes(tensors.output_gain))
    if tensors.output is not tensors.embeddings:
        pieces.append(_device_bytes(tensors.output))
    return WeightBytes(sum(pieces), expert_bytes, tuple(spans), tuple(pieces))


def expert_shape(layer: LayerTensors) -> ExpertShape:
    """The span of one expert (or of the dense feed-forward): gate, up, down, each rounded up."""
    gate = _span_matrix(layer.gate, 0)
    up = _span_matrix(layer.up, round_up(gate.n_bytes))
    down = _span_matrix(layer.down, up.offset + round_up(up.n_bytes))
    return ExpertShape(gate, up, down, down.offset + round_up(down.n_bytes))


def _every_token(layer: LayerTensors) -> list[TensorInfo]:
    """A layer's tensors that every token reads, as the loader places them, without a dense
    feed-forward.
    """
    tensors = [layer.attention_gain, layer.q, layer.k, layer.v, layer.output]
    tensors += [layer.q_gain, layer.k_gain, layer.feed_forward_gain]
    return tensors if layer.router is None else [*tensors, layer.router]


def _span_matrix(tensor: TensorInfo, offset: int) -> SpanMatrix:
    n_rows, n_columns = tensor.shape[-2:]
    return SpanMatrix(
        tensor.type, offset, n_rows, n_columns, device_row_bytes(tensor.type, n_columns)
    )


def _device_bytes(tensor: TensorInfo) -> int:
    """Rounded; gains are stored as float32, whatever the file has."""
    if len(tensor.shape) == 1:
        return round_up(4 * tensor.shape[0])
    row_bytes = device_row_bytes(tensor.type, tensor.shape[-1])
    return round_up(math.prod(tensor.shape[:-1]) * row_bytes)
