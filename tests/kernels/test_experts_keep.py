"""The expert kernels that keep: landing places get what homes hold, every word once.

The self-test compares every variant with its twin, and its landing places with their homes byte for
byte (tests/selftest); here are awkward shapes, and how often each word is stored.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.tunings import MAPPINGS, SAMPLE_TYPES, tuning_for
from tools.compile_shaders import read_variants
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.program import Program
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.cases import DownCase, GateUpCase
from vkmoe.kernels.experts.operations import ExpertShape, SpanMatrix, kept_bytes
from vkmoe.kernels.experts.spans import Use
from vkmoe.kernels.inputs import WEIGHT_TYPES
from vkmoe.kernels.rows import RowBatch
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants import device_row_bytes
from vkmoe.quants.types import TYPES

SHADERS = Path(__file__).resolve().parent.parent.parent / "shaders"
CPU, GPU = tuning_for(MAPPINGS[-1], 8, 4), tuning_for("", 32, 4)
both_mappings = pytest.mark.parametrize("tuning", [CPU, GPU], ids=["blocks", "lanes"])
EVERY_TYPE = [
    pytest.param(
        kind,
        tuning,
        id=f"{kind}-{tuning.mapping}",
        marks=[pytest.mark.full] * (turn or kind not in SAMPLE_TYPES),
    )
    for i, kind in enumerate(WEIGHT_TYPES)
    for turn, tuning in enumerate(((CPU, GPU)[i % 2], (GPU, CPU)[i % 2]))
]
ALL, NONE = Use(4, 4, kept=(0, 1, 2, 3)), Use(4, 3, kept=())
BIASED = Use(9, 3, kept=(1,), biased=True)
# Stands in for store.glsl: adds 1 to each word that would be stored.
COUNTING_STORES = """
layout(buffer_reference, std430, buffer_reference_align = 4) buffer StoredWord { uint word; };
void store_word(uvec2 landing, uint word) { atomicAdd(StoredWord(landing).word, 1u); }
void store_words4(uvec2 landing, uvec4 words) {
    for (uint i = 0u; i < 4u; ++i) store_word(address_add(landing, 4u * i), 0u);
}
"""


def least_columns(kind: str) -> int:
    return max(32, TYPES[kind].block_weights)


@both_mappings
@pytest.mark.parametrize("use", [ALL, NONE, BIASED], ids=["all", "none", "biased"])
@pytest.mark.sample(2)
def test_any_number_of_slots_is_kept(runner: Runner, use: Use, tuning: Tuning) -> None:
    """With biases they are kept too."""
    GateUpCase(tuning, ("Q8_0", "Q6_K"), use, 7, 768).run(runner).verify()
    with Runner(runner.device) as other:
        DownCase(tuning, "Q5_K", use, 6, 768).run(other).verify()


def counting_spirv(name: str, folder: Path) -> bytes:
    """The SPIR-V of a variant with the includes of a folder; called in several threads."""
    variant = next(variant for variant in read_variants(SHADERS) if variant.name == name)
    out = folder / f"{name}.spv"
    variant.compile(SHADERS, out, [folder / "include"])
    return out.read_bytes()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels count their stores in place of storing."""
    shutil.copytree(SHADERS / "include", tmp_path / "include")
    (tmp_path / "include" / "store.glsl").write_text(COUNTING_STORES)
    monkeypatch.setattr(gpu_device, "spirv_words", lambda name: counting_spirv(name, tmp_path))


@pytest.mark.parametrize(("kind", "tuning"), EVERY_TYPE)
def test_every_word_is_stored_once(
    runner: Runner, counting: None, kind: str, tuning: Tuning
) -> None:
    """One block a row and five of them; the last workgroup has fewer rows than it could take."""
    use = Use(3, 2, kept=(1, 0))
    cases: list[DownCase | GateUpCase] = [
        DownCase(tuning, kind, use, 5, n_blocks * least_columns(kind)) for n_blocks in (1, 5)
    ]
    if kind == "Q6_K":  # words of several chunks, and pairs of d
        cases.append(GateUpCase(tuning, (kind, kind), use, 5, 768))
    if kind == "F32":  # words of a kind of their own
        biased = replace(use, biased=True)
        cases += [
            DownCase(tuning, kind, biased, 5, 32),
            GateUpCase(tuning, (kind, "Q8_0"), biased, 5, 32),
        ]
    for case in cases:
        with Runner(runner.device) as other:
            program, batch = Program("keeping"), RowBatch((0,), 1)
            experts, rowed = case.place(other, OpContext(program, tuning), batch)
            other.run(program, rowed.given(batch))
            n_stores = experts.landed(other).view(np.uint32) + np.uint32(1)  # from 0xFFFFFFFF on
        kept = kept_bytes(experts.shape).reshape(-1, 4)
        assert (kept.all(axis=1) == kept.any(axis=1)).all(), "whole words"
        np.testing.assert_array_equal(n_stores, np.tile(kept[:, 0], (2, 1)))


def test_what_is_kept_is_all_but_padding() -> None:
    """Three blocks of Q6_K are 630 bytes of a row of 640; the last word of them is half used."""
    down_bytes = device_row_bytes("Q6_K", 768)
    gate = SpanMatrix("Q4_K", 0, 2, 256, 144)
    up, down = replace(gate, offset=512), SpanMatrix("Q6_K", 1024, 2, 768, down_bytes)
    kept = kept_bytes(ExpertShape(gate, up, down, 1024 + 2 * 640))
    assert down_bytes == 640 and len(kept) == 2304
    edges = np.flatnonzero(np.diff(kept.astype(int))) + 1
    assert edges.tolist() == [288, 512, 800, 1024, 1656, 1664, 2296]
    assert kept[0] and not kept[-1]
