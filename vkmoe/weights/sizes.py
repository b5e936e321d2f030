"""Counts the bytes of a model's weights in device layout, lays out an expert's span, and says what
is converted while a model loads.

All is from shapes and types alone, so that a plan can be made without a device. A trace of the
routing states the sizes of experts: its header is made here too. Which types become which, and how,
is the subject of quants/convert.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from vkmoe.experts.records.trace import TraceHeader
from vkmoe.facts import Conversion, ModelSpec, WeightBytes
from vkmoe.gpu.arena import round_up
from vkmoe.kernels.experts.operations import ExpertShape, SpanBiases, SpanMatrix
from vkmoe.models.tensors import ExpertMatrix, FeedForwardTensors, ModelTensors, TrunkTensor
from vkmoe.models.trunk_tensors import FileMatrix
from vkmoe.option_fields import in_mib
from vkmoe.quants import TYPES, device_row_bytes, loaded_type

N_THREADS = 4  # that lay out, convert or read rows while a model loads
# What converting takes besides the weights: of each thread the rows it works on, as float32 and
# in what decoding makes of them, and converted rows on their way to memory that is not mapped.
CONVERTING_BYTES = 24 << 20

# ----- in device layout -----


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
        conversions=conversions(tensors),
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
        kind = "F32" if is_bias else loaded_type(source.type)
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


# ----- what is converted -----


def conversions(tensors: ModelTensors) -> tuple[Conversion, ...]:
    """Find all tensors that will change their type, added up by kind and sorted by it."""
    found: defaultdict[tuple[str, str, bool], Counter[str]] = defaultdict(Counter)
    for kind, n_tensors, n_rows, n_columns in _matrices(tensors):
        file_type, loaded, _ = kind
        block, n_weights = TYPES[file_type], n_rows * n_columns
        if loaded != file_type:
            found[kind].update(
                n_tensors=n_tensors,
                n_weights=n_weights,
                file_bytes=n_weights // block.block_weights * block.block_bytes,
                loaded_bytes=n_rows * device_row_bytes(loaded, n_columns),
            )
    return tuple(
        Conversion(before, after, of_experts, **counts)
        for (before, after, of_experts), counts in sorted(found.items())
    )


def _matrices(tensors: ModelTensors) -> Iterator[tuple[tuple[str, str, bool], int, int, int]]:
    """Yield each matrix of a model: type in the file and loaded, whether it is of routed experts;
    tensors, rows, columns."""
    blocks = [(block, True) for block in tensors.expert_layers]
    for tensor in tensors.trunk:
        if isinstance(tensor, FeedForwardTensors):
            blocks.append((tensor, False))
        elif isinstance(tensor, FileMatrix):
            yield (tensor.tensor.type, tensor.type, False), 1, tensor.n_rows, tensor.n_columns
    for block, of_experts in blocks:
        for matrix in block.matrices:
            kind = matrix.type, loaded_type(matrix.type), of_experts
            n_rows = matrix.n_experts * matrix.n_rows
            yield kind, len(matrix.parts), n_rows, matrix.n_columns


def growth_words(found: Sequence[Conversion]) -> str:
    """Say why weights take more than their file, for plans and errors; empty where they do not."""
    growth = sum(item.loaded_bytes - item.file_bytes for item in found)
    if growth <= 0:
        return ""
    before = _joined(sorted({item.file_type for item in found}))
    after = _joined(sorted({item.loaded_type for item in found}))
    return f"{in_mib(growth)} more than in the file, as {after} instead of {before}"


def _joined(words: list[str]) -> str:
    """Join words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def conversion_line(found: Sequence[Conversion], few_homes: bool) -> str:
    """Say in a line what is converted to what, and how many bytes that gives; empty for nothing.

    With `few_homes` experts are read from the file more than once.
    """
    if not found:
        return ""
    n_tensors: Counter[tuple[str, str]] = Counter()
    for item in found:
        n_tensors[item.file_type, item.loaded_type] += item.n_tensors
    counts = [f"{n:,} of {before} to {after}" for (before, after), n in n_tensors.items()]
    word = "tensor" if next(iter(n_tensors.values())) == 1 else "tensors"
    counts[0] = counts[0].replace(" of", f" {word} of", 1)  # once is enough
    file_bytes = sum(item.file_bytes for item in found)
    loaded_bytes = sum(item.loaded_bytes for item in found)
    again = few_homes and any(item.of_experts for item in found)
    return (
        f"converting {_joined(counts)}: {in_mib(file_bytes)} -> {in_mib(loaded_bytes)}"
        + "; experts again each time they are read from the file" * again
    )
