"""Speed of reading single experts from the model file, beside plain reads of it.

python -m bench.file_reads

What a host pool smaller than the model lives on: each expert's three matrices, at random, by
position, laid out for the device, their pages dropped behind. Rivals read as many bytes in a row,
and in pieces of 1 MiB at random. The page cache is emptied of the file before each; what the disk
itself keeps is not.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.arms import take_turns
from bench.command import command_line, finish, run_main
from bench.models import add_model_options, chosen_model
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.models import read_spec
from vkmoe.models.tensors import ModelTensors, read_tensors
from vkmoe.quants import lay_out
from vkmoe.weights.sizes import expert_shape, span_parts
from vkmoe.weights.span_reader import SpanReader

PIECE_BYTES = 1 << 20
EXPERTS = "experts at random, one by one"
ROW, PIECES = "as many bytes in a row", "pieces of 1 MiB at random"


def main() -> None:
    """Compare an expert with the mapping, then take turns."""
    parser = command_line(__doc__)
    add_model_options(parser)
    parser.add_argument("--experts", type=int, default=24, help="per repeat, default: 24")
    options = parser.parse_args()
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    model = chosen_model(options)
    print(f"model {model.name}, {model.stat().st_size / 1e6:.0f} MB\n")
    with open_gguf(model) as file:
        tensors = read_tensors(file, read_spec(file))
        with SpanReader(file, tensors) as reader:
            _check(file, tensors, reader)
            results = _results(model, reader, options.experts, options.repeats, card)
    finish("file_reads", card, {"model": model.name, **results}, options.record)


def _check(file: GgufFile, tensors: ModelTensors, reader: SpanReader) -> None:
    """The first expert, starting from a sentinel, is what the mapping holds."""
    block = next(tensors.expert_layers)
    span = np.full(expert_shape(block).span_bytes, 0xFF, np.uint8)
    reader.read(0, span)

    for source, matrix in span_parts(block):
        tensor = source.parts[0]
        rows = file.data(tensor.name).reshape(tensor.n_weights // source.n_columns, -1)
        laid_out = lay_out(tensor.type, matrix.type, rows[: matrix.n_rows], matrix.n_columns)
        found = span[matrix.offset : matrix.offset + matrix.n_bytes]
        assert (found == laid_out.reshape(-1)).all(), f"{tensor.name} was read wrongly"
        file.drop_pages(tensor.name)


def _results(
    model: Path, reader: SpanReader, n_experts: int, repeats: int, card: dict[str, Any]
) -> dict[str, Any]:
    rng = random.Random(0)
    size, span_bytes = model.stat().st_size, max(reader.span_bytes)
    spans = [np.empty(n, np.uint8) for n in reader.span_bytes]
    per_layer = reader.n_experts
    n_bytes = min(n_experts * span_bytes, size)

    def timed(descriptor: int, read: Callable[[], int]) -> float:
        """GB/s."""
        reader.drop_pages()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        n_read = read()
        return n_read / (time.perf_counter() - started) / 1e9

    def experts() -> int:
        keys = [rng.randrange(per_layer * len(spans)) for _ in range(n_experts)]
        for key in keys:
            reader.read(key, spans[key // per_layer])
        return sum(spans[key // per_layer].size for key in keys)

    def pieces(offsets: list[int]) -> int:
        return sum(os.preadv(descriptor, [piece], offset) for offset in offsets)

    descriptor, piece = os.open(model, os.O_RDONLY), bytearray(min(PIECE_BYTES, size))
    n_pieces = max(1, n_bytes // len(piece))
    try:
        arms = take_turns(
            {
                EXPERTS: lambda: timed(descriptor, experts),
                ROW: lambda: timed(
                    descriptor, lambda: pieces([i * len(piece) for i in range(n_pieces)])
                ),
                PIECES: lambda: timed(
                    descriptor,
                    lambda: pieces([rng.randrange(size - len(piece) + 1) for _ in range(n_pieces)]),
                ),
            },
            repeats,
            "GB/s",
        )
    finally:
        os.close(descriptor)
    rows = [Row(name, arms.summary(name), "GB/s", "host_wall") for name in arms.names]
    for row in rows:
        print(row)
    results: dict[str, Any] = {"span_bytes": span_bytes, "rows": rows}
    if repeats >= MIN_REPEATS:
        for rival in (ROW, PIECES):
            results[f"share of {rival}"] = arms.ratio(EXPERTS, rival, card)
            print(f"{results[f'share of {rival}']} of: {rival}")
    return results


if __name__ == "__main__":
    run_main(main)
