"""What is converted while a model loads: which tensors, and how many bytes they take then.

Pure. Which types become which, and how, is the subject of quants/convert.py; how long that takes,
that of conversion_time.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vkmoe.facts import Conversion
from vkmoe.models.latent_matrices import latent_matrices
from vkmoe.models.tensors import LatentTensors, ModelTensors
from vkmoe.placement.words import in_mib
from vkmoe.quants import TYPES, device_row_bytes, loaded_type

__all__ = ["CONVERTING_BYTES", "conversions", "growth_words", "joined"]

# What converting takes besides the weights: of each thread the rows it works on, as float32 and
# in what decoding makes of them, and converted rows on their way to memory that is not mapped.
CONVERTING_BYTES = 24 << 20


class _Part(NamedTuple):
    """A tensor, or a part of one: its type in the file and on the device, rows and columns."""

    file_type: str
    loaded_type: str
    of_experts: bool
    n_tensors: int
    n_rows: int
    n_columns: int


def conversions(tensors: ModelTensors) -> tuple[Conversion, ...]:
    """All that will change their type, those of one kind together, in order of the names."""
    kinds: dict[tuple[str, str, bool], list[_Part]] = {}
    for part in _parts(tensors):
        if part.loaded_type != part.file_type:
            kinds.setdefault(part[:3], []).append(part)
    return tuple(_summed(kinds[key]) for key in sorted(kinds))


def growth_words(found: Sequence[Conversion]) -> str:
    """Why weights take more than their file, for plans and errors; empty where they do not."""
    growth = sum(item.loaded_bytes - item.file_bytes for item in found)
    if growth <= 0:
        return ""
    before = joined(sorted({item.file_type for item in found}))
    after = joined(sorted({item.loaded_type for item in found}))
    return f"{in_mib(growth)} more than in the file, as {after} instead of {before}"


def joined(words: list[str]) -> str:
    """As a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# ----- what there is -----


def _parts(tensors: ModelTensors) -> Iterator[_Part]:
    """All matrices of a model."""
    outer = [tensors.embeddings]
    outer += [] if tensors.output is tensors.embeddings else [tensors.output]
    for layer in tensors.layers:
        outer += [*layer.attention.matrices]
        outer += [x for x in (layer.router, layer.shared_gate) if x is not None]
        blocks = [(layer.feed_forward, layer.router is not None)]
        blocks += [(layer.shared, False)] if layer.shared is not None else []
        for block, routed in blocks:
            for matrix in block.matrices:
                n_rows, n_tensors = matrix.n_experts * matrix.n_rows, len(matrix.parts)
                kinds = matrix.type, loaded_type(matrix.type)
                yield _Part(*kinds, routed, n_tensors, n_rows, matrix.n_columns)
        if isinstance(layer.attention, LatentTensors):
            for heads in latent_matrices(layer.attention):
                kinds = heads.tensor.type, heads.type
                yield _Part(*kinds, False, 1, heads.n_rows, heads.n_columns)
    for tensor in outer:
        n_columns = tensor.shape[-1]
        kinds = tensor.type, loaded_type(tensor.type)
        yield _Part(*kinds, False, 1, tensor.n_weights // n_columns, n_columns)


def _summed(parts: list[_Part]) -> Conversion:
    """Parts of one kind."""
    first = parts[0]
    block = TYPES[first.file_type]
    weights = [part.n_rows * part.n_columns for part in parts]
    return Conversion(
        *first[:3],
        n_tensors=sum(part.n_tensors for part in parts),
        n_weights=sum(weights),
        file_bytes=sum(n // block.block_weights * block.block_bytes for n in weights),
        loaded_bytes=sum(
            part.n_rows * device_row_bytes(part.loaded_type, part.n_columns) for part in parts
        ),
    )
