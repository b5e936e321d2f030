"""How many bytes a model's weights take in device layout, and how an expert's span is laid out.

Pure: from shapes and types alone, so that a plan can be made without a device. A trace of the
routing states the sizes of experts: its header is made here too.
"""

from __future__ import annotations

from vkmoe.experts.study.trace import TraceHeader
from vkmoe.facts import ModelSpec, WeightBytes
from vkmoe.gguf_file import TensorInfo
from vkmoe.gpu.arena import round_up
from vkmoe.models.latent_matrices import latent_matrices
from vkmoe.models.tensors import (
    AttentionTensors,
    ExpertMatrix,
    FeedForwardTensors,
    LatentTensors,
    LayerTensors,
    ModelTensors,
)
from vkmoe.ops.expert_spans import ExpertShape, SpanBiases, SpanMatrix
from vkmoe.placement.conversions import conversions
from vkmoe.quants import device_row_bytes, loaded_type

__all__ = ["expert_shape", "span_parts", "trace_header", "weight_bytes"]


def weight_bytes(tensors: ModelTensors) -> WeightBytes:
    """Count the bytes the weights take in device layout, rounded as they are placed."""
    pieces = [_matrix_bytes(tensors.embeddings)]
    spans: list[int] = []
    expert_bytes = 0
    for layer in tensors.layers:
        span_bytes = expert_shape(layer.feed_forward).span_bytes
        if layer.router is None:
            pieces.append(span_bytes)
        else:
            spans.append(span_bytes)
            expert_bytes += layer.feed_forward.n_experts * span_bytes
        pieces += _layer_pieces(layer)
    pieces.append(_vector_bytes(tensors.output_gain))
    if tensors.output is not tensors.embeddings:
        pieces.append(_matrix_bytes(tensors.output))
    trunk = sum(pieces)
    return WeightBytes(trunk, expert_bytes, tuple(spans), tuple(pieces), conversions(tensors))


def expert_shape(block: FeedForwardTensors) -> ExpertShape:
    """Lay out the span of one expert: gate, up, down and their biases, each rounded up."""
    matrices: list[SpanMatrix] = []
    end = 0
    for source in (*block.matrices, *block.biases):
        matrices.append(_span_matrix(source, end, is_bias=source in block.biases))
        end += round_up(matrices[-1].n_bytes)
    gate, up, down, *biases = matrices
    offsets = SpanBiases(*(bias.offset for bias in biases)) if biases else None
    return ExpertShape(gate, up, down, end, offsets)


def span_parts(block: FeedForwardTensors) -> list[tuple[ExpertMatrix, SpanMatrix]]:
    """List what fills a span: every matrix and vector of biases, and where in the span it goes."""
    shape = expert_shape(block)
    parts = list(zip(block.matrices, (shape.gate, shape.up, shape.down), strict=True))
    for source, offset in zip(block.biases, shape.biases or (), strict=True):
        parts.append((source, _span_matrix(source, offset, is_bias=True)))
    return parts


def _layer_pieces(layer: LayerTensors) -> list[int]:
    """Count the bytes of what every token reads, in the order in which the loader places it.

    A dense feed-forward is not included.
    """
    pieces = [_vector_bytes(layer.attention_gain)]
    if isinstance(layer.attention, LatentTensors):
        pieces += _latent_pieces(layer.attention)
    else:
        pieces += _attention_pieces(layer.attention)
    pieces.append(_vector_bytes(layer.feed_forward_gain))
    if layer.router is not None:
        pieces.append(_matrix_bytes(layer.router))
    pieces += [_vector_bytes(x) for x in (layer.router_bias, layer.selection_bias) if x]
    if layer.shared is not None:
        pieces.append(expert_shape(layer.shared).span_bytes)
    if layer.shared_gate is not None:
        pieces.append(_matrix_bytes(layer.shared_gate))
    return pieces


def _attention_pieces(tensors: AttentionTensors) -> list[int]:
    pieces = [_matrix_bytes(x) for x in (tensors.q, tensors.k, tensors.v, tensors.output)]
    pieces += [_vector_bytes(x) for x in (tensors.q_gain, tensors.k_gain) if x]
    if tensors.qkv_bias:
        pieces.append(_vector_bytes(*tensors.qkv_bias))
    return pieces + [_vector_bytes(x) for x in (tensors.output_bias, tensors.sinks) if x]


def _latent_pieces(tensors: LatentTensors) -> list[int]:
    pieces = [_matrix_bytes(x) for x in (tensors.q_down, tensors.q, tensors.kv) if x]
    pieces += [
        round_up(m.n_rows * device_row_bytes(m.type, m.n_columns)) for m in latent_matrices(tensors)
    ]
    pieces.append(_matrix_bytes(tensors.output))
    return pieces + [_vector_bytes(x) for x in (tensors.q_gain, tensors.kv_gain) if x]


def _span_matrix(source: ExpertMatrix, offset: int, is_bias: bool) -> SpanMatrix:
    """Place one matrix in a span. Biases are used as float32, whatever the file has."""
    kind = "F32" if is_bias else loaded_type(source.type)
    row_bytes = device_row_bytes(kind, source.n_columns)
    return SpanMatrix(kind, offset, source.n_rows, source.n_columns, row_bytes)


def _matrix_bytes(tensor: TensorInfo) -> int:
    n_columns, kind = tensor.shape[-1], loaded_type(tensor.type)
    return round_up(tensor.n_weights // n_columns * device_row_bytes(kind, n_columns))


def _vector_bytes(*tensors: TensorInfo) -> int:
    """Count gains or biases, stored as float32, whatever the file has; several as one."""
    return round_up(4 * sum(tensor.n_weights for tensor in tensors))


def trace_header(spec: ModelSpec, tensors: ModelTensors, n_prompt_tokens: int = 0) -> TraceHeader:
    """Make the header of a trace. Must hold: the model has experts."""
    assert spec.experts is not None, spec.name
    layers = [index for index, layer in enumerate(tensors.layers) if layer.router is not None]
    return TraceHeader(
        spec.name,
        spec.architecture,
        tuple(layers),
        spec.experts.n_experts,
        spec.experts.n_used,
        weight_bytes(tensors).spans,
        n_prompt_tokens,
    )
