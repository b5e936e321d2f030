"""Counts the bytes of a model's weights in device layout, and lays out an expert's span.

Pure: from shapes and types alone, so that a plan can be made without a device. A trace of the
routing states the sizes of experts: its header is made here too.
"""

from __future__ import annotations

from vkmoe.experts.study.trace import TraceHeader
from vkmoe.facts import ModelSpec, WeightBytes
from vkmoe.gpu.arena import round_up
from vkmoe.models.tensors import ExpertMatrix, FeedForwardTensors, ModelTensors, TrunkTensor
from vkmoe.ops.experts import ExpertShape, SpanBiases, SpanMatrix
from vkmoe.placement.conversions import conversions
from vkmoe.quants import device_row_bytes, loaded_type

__all__ = ["expert_shape", "span_parts", "trace_header", "weight_bytes"]


def weight_bytes(tensors: ModelTensors) -> WeightBytes:
    """Count the bytes the weights take in device layout, rounded as they are placed."""
    spans = [(block.n_experts, expert_shape(block).span_bytes) for block in tensors.expert_layers]
    pieces = [_trunk_bytes(tensor) for tensor in tensors.trunk]
    return WeightBytes(
        trunk=sum(pieces),
        experts=sum(n_experts * n_bytes for n_experts, n_bytes in spans),
        spans=tuple(n_bytes for _, n_bytes in spans),
        pieces=tuple(pieces),
        conversions=conversions(tensors),
    )


def _trunk_bytes(tensor: TrunkTensor) -> int:
    """Count the bytes that something takes which every token reads, rounded up."""
    if isinstance(tensor, FeedForwardTensors):
        return expert_shape(tensor).span_bytes
    return round_up(tensor.n_bytes)


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


def _span_matrix(source: ExpertMatrix, offset: int, is_bias: bool) -> SpanMatrix:
    """Place one matrix in a span. Biases are used as float32, whatever the file has."""
    kind = "F32" if is_bias else loaded_type(source.type)
    row_bytes = device_row_bytes(kind, source.n_columns)
    return SpanMatrix(kind, offset, source.n_rows, source.n_columns, row_bytes)


def trace_header(spec: ModelSpec, tensors: ModelTensors, n_prompt_tokens: int = 0) -> TraceHeader:
    """Make the header of a trace. Must hold: the model has experts."""
    assert spec.experts is not None, spec.name
    return TraceHeader(
        spec.name,
        spec.architecture,
        spec.moe_layers,
        spec.experts.n_experts,
        spec.experts.n_used,
        weight_bytes(tensors).spans,
        n_prompt_tokens,
    )
