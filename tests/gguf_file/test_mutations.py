"""2,000 random mutations of small files: a VkmoeError or success, little memory, nothing else."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
from functools import partial
from pathlib import Path

import numpy as np

from tests.gguf_file import samples as make
from tools.gguf_writer import describe_tensor, write_gguf
from tools.quantise import random_weights
from vkmoe.errors import VkmoeError
from vkmoe.gguf_file import open_gguf
from vkmoe.quants import HAS_KERNEL, decode

N_MUTATIONS = 2000
MOST_BYTES = 4_000_000


def small_files(folder: Path) -> list[bytes]:
    """One file of every value kind, and one model-like file of every type."""
    rng = np.random.default_rng(1)
    tensors = [describe_tensor(f"blk.0.{name}", name, (2, 256)) for name in sorted(HAS_KERNEL)]
    write_gguf(
        folder / "types.gguf",
        {"general.architecture": "qwen3moe", "general.alignment": 32, "split.count": 1,
         "tokenizer.ggml.tokens": ["a", "b", "ü"], "tokenizer.ggml.token_type": [1, 1, 3]},
        tensors,
        lambda tensor: random_weights(tensor.type, 2, 256, rng, 0.02),
    )  # fmt: skip
    codes = "BbHhIif"
    widths = {**dict(enumerate(codes)), make.U64: "Q", make.I64: "q", make.F64: "d"}
    pairs = [
        make.pair(f"k{kind}", kind, struct.pack("<" + code, 1)) for kind, code in widths.items()
    ]
    pairs += [
        make.pair("bool", make.BOOL, b"\1"),
        make.pair("bools", make.ARRAY, make.array(make.BOOL, 3, b"\0\1\0")),
        make.pair("nested", make.ARRAY,
                  make.array(make.ARRAY, 2, make.array(make.U16, 1, b"\1\0") * 2)),
        make.pair("words", make.ARRAY, make.array(make.STRING, 3, make.text("word") * 3)),
    ]  # fmt: skip
    kinds = make.file_bytes(
        pairs, [make.tensor("a", (4, 2, 1)), make.tensor("b", (8,), offset=32)], bytes(64)
    )
    return [(folder / "types.gguf").read_bytes(), kinds]


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    """Flipped bytes, a cut, a piece moved, doubled or filled, or an extreme number put in."""
    changed = bytearray(raw)
    # Most of what can go wrong is in the header, the first kilobyte or so.
    reach = int(rng.choice([64, 400, 1200, len(raw), len(raw)]))
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, max(1, min(reach, len(changed)))))
        end = at + int(rng.integers(1, 24))
        match int(rng.integers(0, 7)):
            case 0 | 1:
                changed[at : at + 1] = bytes([int(rng.integers(0, 256))])
            case 2:
                changed[at : at + 1] = bytes([(changed or b"\0")[min(at, len(changed) - 1)] ^ 0x80])
            case 3:
                del changed[at:]
            case 4:
                del changed[at:end]
            case 5:
                other = int(rng.integers(0, max(1, len(changed))))
                changed[at:at] = changed[other : other + end - at]
            case 6:
                number = int(rng.choice([0, 1, 255, 1 << 31, 1 << 40, (1 << 63) - 1]))
                changed[at : at + 8] = struct.pack("<Q", number)
    return bytes(changed)


def touch_everything(path: Path) -> None:
    with open_gguf(path) as file:
        for key in file.metadata:
            for get in (file.strings, file.numbers, partial(file.require, kind=str)):
                try:
                    get(key)
                except VkmoeError as error:
                    assert "\n" not in str(error)
        for name, tensor in file.tensors.items():
            data = file.data(name)
            assert data.nbytes == tensor.n_bytes
            if tensor.type in HAS_KERNEL:
                decode(tensor.type, data, tensor.n_weights)
            else:
                data.sum()


def test_nothing_but_our_own_errors(tmp_path: Path) -> None:
    files = small_files(tmp_path)
    rng = np.random.default_rng(20)
    path = tmp_path / "mutant.gguf"
    n_opened = 0
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for index in range(N_MUTATIONS):
                path.write_bytes(mutated(files[index % len(files)], rng))
                try:
                    touch_everything(path)
                    n_opened += 1
                except VkmoeError as error:
                    assert "\n" not in str(error) and str(path) in str(error)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    # Both ways must be well represented, or the mutations are too timid or too brutal.
    assert N_MUTATIONS / 20 < n_opened < N_MUTATIONS * 3 / 4
