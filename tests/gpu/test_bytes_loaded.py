"""Byte accounting: how much a kernel loads by address for each weight it multiplies.

The kernels run as they are, but for `address.glsl`: each of its load functions also adds the bytes
of the load to a counter in one more binding. So what is counted is what all lanes really load, in
either mapping, headers and tails included. What the lanes of a subgroup load together from one
address counts once in the "lanes" mapping: hardware fetches it once, and those that share a block
each load its scales. Caches are not counted: a kernel that loads the same bytes again, in another
instruction or another subgroup, fails here even if a cache would save it.

Embedding rows are left out: one row of a matrix is read once a token, by chunks of 32 weights.
So are code books, which all matrices of a type share.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.samples import sampled
from tools.compile_shaders import read_variants
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import Dispatch, Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.experts.cases import DownCase, GateUpCase
from vkmoe.kernels.experts.spans import Use
from vkmoe.kernels.inputs import WEIGHT_TYPES
from vkmoe.kernels.matvec.cases import MatvecCase, ResidualCase
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants.types import TYPES

SHADERS = Path(__file__).resolve().parent.parent.parent / "shaders"
COUNTER = TensorRef("bytes loaded", 2)  # [by 16-byte loads, by 4-byte loads]
# Bytes loaded for each byte of the type. Words of 4 bytes count once a block, though neighbouring
# blocks have them in common; that tells where a block has few bytes.
ALLOWED = {**dict.fromkeys(("Q4_0", "IQ4_NL", "Q1_0", "Q2_0", "NVFP4"), 1.12), "MXFP4": 1.18}
# Of a block, in planes: single words loaded, and the bytes of the block that they are for. In the
# "lanes" mapping each lane of a block loads them.
SINGLE_WORDS = {"Q2_K": (1, 4), "Q3_K": (4, 14), "Q6_K": (1, 2), "IQ4_XS": (2, 8),
                "Q8_0": (1, 2), "Q4_0": (1, 2), "IQ4_NL": (1, 2), "MXFP4": (1, 1),
                "Q4_1": (1, 4), "Q5_0": (2, 6), "Q5_1": (2, 8), "Q1_0": (1, 2), "Q2_0": (1, 2),
                "IQ1_S": (1, 2), "IQ1_M": (2, 8), "IQ2_XXS": (1, 2), "IQ2_XS": (3, 10),
                "IQ2_S": (5, 18), "IQ3_XXS": (1, 2), "IQ3_S": (4, 14), "TQ1_0": (2, 6),
                "TQ2_0": (1, 2), "NVFP4": (2, 4)}  # fmt: skip
FIRST_OF_WORD = """
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_ballot : require
bool is_first_of(uvec2 address) {  // of the lanes that load from there together
#ifdef BLOCK_PER_LANE
    return true;  // lanes have blocks of their own, if of one expert that several slots use
#endif
    bool is_first = false, is_done = false;
    while (!is_done) {
        if (subgroupBroadcastFirst(address) == address) {
            is_first = subgroupElect();
            is_done = true;
        }
    }
    return is_first;
}
"""
LANES, BLOCKS = Tuning("lanes", 32, 2, False), Tuning("blocks", 8, 2, False)


UNCOUNTED = """uint load_book_word(uvec2 address) { return Word(address).word; }
#ifdef INT64
uint load_book_word(uint64_t address) { return Word(address).word; }
#endif
"""


def write_counting_files(binding: int, folder: Path) -> None:
    """All include files, with loads that count, but of code books."""
    shutil.copytree(SHADERS / "include", folder, dirs_exist_ok=True)
    (folder / "address.glsl").write_text(counting_address_file(binding) + UNCOUNTED)
    book = folder / "types" / "code_book.glsl"
    uncounted, found = re.subn(r"\bload_word\(", "load_book_word(", book.read_text())
    assert found, "code books are loaded otherwise"
    book.write_text(uncounted)


def counting_address_file(binding: int) -> str:
    """address.glsl, with counters in its three load functions."""
    text = (SHADERS / "include" / "address.glsl").read_text()
    buffer = f"layout(set = 0, binding = {binding}) buffer Counter {{ uint bytes_loaded[2]; }};\n"
    wide, word = (
        "if (is_first_of({})) atomicAdd(bytes_loaded[0], 16u);",
        "atomicAdd(bytes_loaded[1], 4u);",
    )
    for function, count in (
        ("uvec4 load_words4", wide),
        ("uint load_word", word),
        ("float load_float", word),
    ):
        for kind, as_words in (("uvec2", "address"), ("Address", "unpackUint2x32(address)")):
            head = rf"{function}\({kind} address\) {{"
            text, found = re.subn(head, rf"\g<0> {count.format(as_words)}", text)
            assert found >= 1 or (kind == "Address" and "float" in function), function
    text = re.sub(r"(?=^// base \+ bytes with carry)", FIRST_OF_WORD, text, flags=re.MULTILINE)
    return buffer.join(re.split(r"(?=^// base \+ bytes with carry)", text, flags=re.MULTILINE))


def counting_spirv(name: str, binding: int, folder: Path) -> bytes:
    """The SPIR-V of a variant that counts; the includes with counters come first."""
    write_counting_files(binding, folder)
    variant = next(variant for variant in read_variants(SHADERS) if variant.name == name)
    out = folder / "out.spv"
    variant.compile(SHADERS, out, [folder])
    return out.read_bytes()


class CountingRunner(Runner):
    """Runs programs of one dispatch with the counter bound behind their tensors."""

    counted: tuple[int, int]

    def run(self, program: Program, inputs: Mapping[TensorRef, NDArray[np.generic]],
            *outputs: TensorRef) -> tuple[NDArray[np.uint32], ...]:  # fmt: skip
        made = Program(program.name)
        for command in program.commands:
            assert isinstance(command, Dispatch)
            made.append(replace(command, tensors=(*command.tensors, COUNTER)))
        zero = np.zeros(COUNTER.n_words, np.uint32)
        *found, counts = super().run(made, {**inputs, COUNTER: zero}, *outputs, COUNTER)
        self.counted = int(counts[0]), int(counts[1])
        return tuple(found)


@pytest.fixture
def counting(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CountingRunner]:
    """A runner whose kernels count what they load."""

    def counting_words(name: str) -> bytes:
        return counting_spirv(name, n_bindings(name), tmp_path)

    monkeypatch.setattr(gpu_device, "spirv_words", counting_words)
    with CountingRunner(device) as runner:
        yield runner


def n_bindings(name: str) -> int:
    """Bindings of the shipped kernel; the counter takes the next."""
    assert spirv_words(name), "a variant that is not shipped"
    return len(KERNELS[name.partition("+")[0].partition(".")[0]].bindings)


def check(
    runner: CountingRunner, tuning: Tuning, kind: str, n_weights: int, n_gains: int = 0
) -> None:
    """All bytes within the limit; single words only for gains and, in planes, for scales."""
    wide, words = runner.counted[0], runner.counted[1] - 4 * n_gains
    if tuning.mapping == "lanes":
        words //= max(1, TYPES[kind].block_weights // 32)
    n_blocks = n_weights // TYPES[kind].block_weights
    type_bytes = n_blocks * TYPES[kind].block_bytes
    assert wide + words <= ALLOWED.get(kind, 1.1) * type_bytes, (wide, words, type_bytes)
    n_words, their_bytes = SINGLE_WORDS.get(kind, (0, 0))
    assert words == 4 * n_words * n_blocks
    assert wide >= type_bytes - their_bytes * n_blocks, "fewer bytes than the weights have"


@pytest.mark.parametrize("tuning", [LANES, BLOCKS], ids=["lanes", "blocks"])
@pytest.mark.parametrize("kind", sampled(WEIGHT_TYPES, ("Q4_K", "Q6_K", "MXFP4").__contains__))
def test_matvec(counting: CountingRunner, tuning: Tuning, kind: str) -> None:
    """One superblock of columns: the shortest rows, where headers weigh most."""
    MatvecCase(tuning, ((kind, 6), (kind, 2)), 256).run(counting).verify()
    check(counting, tuning, kind, 8 * 256)


@pytest.mark.parametrize("kind", sampled(["Q4_K", "Q6_K", "Q8_0"], "Q6_K".__eq__))
@pytest.mark.parametrize(
    "tuning",
    [
        Tuning("lanes", 64, 4, True),
        Tuning("lanes", 8, 1, False),
        Tuning("lanes", 128, 2, False),
        Tuning("blocks", 8, 8, False, load_64bit=True),
    ],
    ids=str,
)
def test_other_tunings(counting: CountingRunner, tuning: Tuning, kind: str) -> None:
    """Several tiles a row, and rows shorter than a tile; 1792 columns are seven superblocks."""
    MatvecCase(tuning, ((kind, 8),), 1792).run(counting).verify()
    check(counting, tuning, kind, 8 * 1792)


@pytest.mark.parametrize("tuning", [LANES, BLOCKS], ids=["lanes", "blocks"])
@pytest.mark.parametrize("kind", sampled(["Q4_K", "Q6_K", "Q8_0", "BF16"], "Q4_K".__eq__))
def test_residual(counting: CountingRunner, tuning: Tuning, kind: str) -> None:
    ResidualCase(tuning, kind, 6, 512).run(counting).verify()
    check(counting, tuning, kind, 6 * 512, n_gains=3 * tuning.workgroup_size)


@pytest.mark.parametrize("tuning", [LANES, BLOCKS], ids=["lanes", "blocks"])
@pytest.mark.parametrize("kind", sampled(["Q4_K", "Q6_K", "Q8_0", "BF16"], "Q4_K".__eq__))
def test_gate_and_up(counting: CountingRunner, tuning: Tuning, kind: str) -> None:
    """An expert's bytes are read once for each slot that uses it."""
    GateUpCase(tuning, (kind, kind), Use(4, 3), 4, 256).run(counting).verify()
    check(counting, tuning, kind, 2 * 3 * 4 * 256)


@pytest.mark.parametrize("tuning", [LANES, BLOCKS], ids=["lanes", "blocks"])
@pytest.mark.parametrize("kind", sampled(["Q4_K", "Q6_K", "Q8_0", "BF16"], "Q4_K".__eq__))
def test_down(counting: CountingRunner, tuning: Tuning, kind: str) -> None:
    DownCase(tuning, kind, Use(4, 3), 6, 768).run(counting).verify()
    check(counting, tuning, kind, 3 * 6 * 768, n_gains=3 * tuning.workgroup_size)


def test_a_load_too_many_is_noticed(counting: CountingRunner) -> None:
    """An odd number of rows makes the last workgroup read its last row twice."""
    MatvecCase(LANES, (("Q4_K", 3),), 256).run(counting).verify()
    with pytest.raises(AssertionError):
        check(counting, LANES, "Q4_K", 3 * 256)
