"""Counts the bytes of a model's weights in device layout, and lays out an expert's span.

All is from shapes and types alone, so that a plan can be made without a device. A trace of the
routing states the sizes of experts: its header is made here too.
"""

from __future__ import annotations

from vkmoe.experts.records.trace import TraceHeader
from vkmoe.facts import ModelSpec, WeightBytes
from vkmoe.gpu.arena import round_up
from vkmoe.kernels.experts.operations import ExpertShape, SpanBiases, SpanMatrix
from vkmoe.models.tensors import ExpertMatrix, FeedForwardTensors, ModelTensors, TrunkTensor
from vkmoe.quants import device_row_bytes

N_THREADS = 4  # that lay out or read rows while a model loads


def weight_bytes(tensors: ModelTensors) -> WeightBytes:
    """Count the bytes the weights take in device layout, rounded as they are placed."""
    spans = [(block.n_experts, expert_shape(block).span_bytes) for block in tensors.expert_layers]
    ahead = tensors.ahead
    table = tensors.inputs.table.n_bytes if tensors.inputs else 0
    of_ahead = [piece for tensor in (ahead.trunk if ahead else ()) for piece in _pieces(tensor)]
    return WeightBytes(
        pieces=tuple(piece for tensor in tensors.trunk for piece in _pieces(tensor)),
        experts=sum(n_experts * n_bytes for n_experts, n_bytes in spans),
        spans=tuple(n_bytes for _, n_bytes in spans),
        table_pieces=int(tensors.inputs is not None),
        layer_pieces=tuple(len(layer.trunk) for layer in tensors.layers),
        ahead_pieces=len(of_ahead),
        ahead=sum(of_ahead),
        table=round_up(table),
        ahead_experts=sum(sum(_pieces(block)) for block in (ahead.experts if ahead else ())),
    )


def _pieces(tensor: TrunkTensor) -> list[int]:
    """Count the bytes of each part of a tensor that is placed on its own."""
    if not isinstance(tensor, FeedForwardTensors):
        return [round_up(tensor.n_bytes)]
    spans = [expert_shape(tensor).span_bytes] * tensor.n_experts
    return [*spans, round_up(tensor.table_bytes)] if tensor.table_bytes else spans


def expert_shape(block: FeedForwardTensors) -> ExpertShape:
    """Lay out the span of one expert."""
    gate, up, down, *biases = (matrix for _, matrix in span_parts(block))
    last = biases[-1] if biases else down
    offsets = SpanBiases(*(bias.offset for bias in biases)) if biases else None
    return ExpertShape(gate, up, down, last.offset + round_up(last.n_bytes), offsets)


def span_parts(block: FeedForwardTensors) -> list[tuple[ExpertMatrix, SpanMatrix]]:
    """List what fills a span, each rounded up, and where it goes: gate, up, down, their biases."""
    parts: list[tuple[ExpertMatrix, SpanMatrix]] = []
    end = 0
    for number, source in enumerate((*block.matrices, *block.biases)):
        is_bias = number >= len(block.matrices)  # float32 on the device, whatever the file has
        kind = "F32" if is_bias else source.type
        row_bytes = device_row_bytes(kind, source.n_columns)
        matrix = SpanMatrix(kind, end, source.n_rows, source.n_columns, row_bytes)
        parts.append((source, matrix))
        end += round_up(matrix.n_bytes)
    return parts


def trace_header(spec: ModelSpec, tensors: ModelTensors) -> TraceHeader:
    """Make the header of a trace. Must hold: the model has experts."""
    assert spec.experts is not None, spec.name
    return TraceHeader(
        spec.name,
        spec.architecture,
        spec.moe_layers,
        spec.experts.n_experts,
        spec.experts.n_used,
        weight_bytes(tensors).spans,
    )
