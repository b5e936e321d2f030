"""Counts what a CPU reads where the file is mapped, as it is there, and what is copied after all.

Copied are matrices that are turned or cut, and vectors whose floats are not 32 bits wide. An expert
is reached by the addresses of its parts, which lie apart in a file;
its span is the few bytes that these addresses take. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vkmoe.facts import SpanInFile, WeightBytes
from vkmoe.gpu.arena import round_up
from vkmoe.kernels.experts.operations import DESCRIPTOR_BYTES, ExpertShape, SpanBiases, SpanMatrix
from vkmoe.models.tensors import FeedForwardTensors, ModelTensors, TrunkTensor
from vkmoe.models.trunk_tensors import Columns, FileMatrix, FileVector, HeadMatrices
from vkmoe.quants import TYPES


def mapped_shape(block: FeedForwardTensors) -> ExpertShape:
    """Say how CPUs find the parts of an expert: by the addresses that are its span."""
    parts = (*block.matrices, *block.biases)
    offsets = range(0, DESCRIPTOR_BYTES, 8)
    gate, up, down = (
        SpanMatrix(kind, offset, part.n_rows, part.n_columns, TYPES[kind].row_bytes(part.n_columns))
        for offset, part, kind in (
            (offset, part, part.type) for offset, part in zip(offsets, block.matrices, strict=False)
        )
    )
    biases = SpanBiases(*offsets[3:6]) if len(parts) > 3 else None
    return ExpertShape(gate, up, down, DESCRIPTOR_BYTES, biases)


def mapped_bytes(tensors: ModelTensors) -> WeightBytes:
    """Count the bytes that stay in the file, those that are copied, and the spans of experts."""
    blocks, ahead = list(tensors.expert_layers), tensors.ahead
    tables = [tensors.inputs.table] if tensors.inputs else []
    trunk, experts = list(_parts(tensors.trunk)), list(_parts(tensors.expert_layers))
    n_experts = sum(block.n_experts for block in blocks)
    return WeightBytes(
        pieces=tuple(
            n_bytes
            for tensor in tensors.trunk
            if isinstance(tensor, FeedForwardTensors)
            for n_bytes in _addresses(tensor)
        ),
        experts=n_experts * round_up(DESCRIPTOR_BYTES),
        spans=(DESCRIPTOR_BYTES,) * len(blocks),
        mapped=sum(n_bytes for n_bytes, stays in (*trunk, *experts) if stays),
        mapped_experts=sum(n_bytes for n_bytes, stays in experts if stays),
        copied=sum(n_bytes for n_bytes, stays in (*trunk, *experts) if not stays),
        ahead=sum(n_bytes for n_bytes, _ in _parts(ahead.trunk if ahead else ())),
        table=sum(n_bytes for n_bytes, stays in _parts(tables) if stays),
        ahead_experts=sum(n_bytes for n_bytes, _ in _parts(ahead.experts if ahead else ())),
    )


def _addresses(block: FeedForwardTensors) -> list[int]:
    """Count the bytes of addresses: of the parts of each expert, and of what leads to these."""
    of_parts = [round_up(DESCRIPTOR_BYTES)] * block.n_experts
    return [*of_parts, round_up(block.table_bytes)] if block.table_bytes else of_parts


def spans_in_file(tensors: ModelTensors) -> tuple[SpanInFile, ...]:
    """Count the bytes of the experts of each MoE layer: those that stay in the file, and copies."""
    layers = [list(_parts([block])) for block in tensors.expert_layers]
    return tuple(
        SpanInFile(
            sum(n_bytes for n_bytes, stays in parts if stays),
            sum(n_bytes for n_bytes, stays in parts if not stays),
        )
        for parts in layers
    )


def _parts(tensors: Iterable[TrunkTensor]) -> Iterator[tuple[int, bool]]:
    """Yield the bytes of each tensor as it is used, and whether that is in the file."""
    for tensor in tensors:
        if isinstance(tensor, FileVector):
            yield tensor.n_bytes, tensor.is_in_file
        elif isinstance(tensor, FileMatrix):
            stays = not isinstance(tensor, HeadMatrices | Columns)
            yield tensor.n_rows * TYPES[tensor.type].row_bytes(tensor.n_columns), stays
        else:
            for matrix in tensor.matrices:
                n_rows = matrix.n_experts * matrix.n_rows
                yield n_rows * TYPES[matrix.type].row_bytes(matrix.n_columns), True
            for bias in tensor.biases:
                yield 4 * bias.n_experts * bias.n_columns, bias.type == "F32"
