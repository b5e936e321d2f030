"""embed against its twin: types, workgroup sizes, and token ids beyond the vocabulary."""

from __future__ import annotations

import pytest

from tests.ops.tunings import SIZES
from vkmoe.gpu.runner import Runner
from vkmoe.ops.tuning import Tuning
from vkmoe.quants.types import TYPES
from vkmoe.selftest.inputs import WEIGHT_TYPES
from vkmoe.selftest.matvec import EmbedCase

TOKENS = (0, 5, 6, 7, 1 << 20, 0xFFFFFFFF)  # of 7: the last three are clamped


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_rows_and_clamped_tokens(runner: Runner, kind: str) -> None:
    """The workgroup sizes take turns; the last workgroup is not full."""
    i = WEIGHT_TYPES.index(kind)
    tuning = Tuning("lanes", SIZES[i % len(SIZES)], 4, False)
    columns = 256 * (3 + i) if TYPES[kind].block_weights == 256 else 32 * (7 + 2 * i)
    EmbedCase(tuning, kind, 7, columns, TOKENS, seed=i).run(runner).verify()


@pytest.mark.parametrize("workgroup_size", SIZES)
def test_workgroup_sizes(runner: Runner, workgroup_size: int) -> None:
    tuning = Tuning("blocks", workgroup_size, 8, False)
    EmbedCase(tuning, "Q6_K", 3, 1536, (2,)).run(runner).verify()


def test_a_vocabulary_of_one(runner: Runner) -> None:
    EmbedCase(Tuning("blocks", 8, 8, False), "F32", 1, 32, (0, 1)).run(runner).verify()
