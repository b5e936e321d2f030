"""Kernels that multiply prompts on matrix units beside llama.cpp's, as real compilers make them."""

from __future__ import annotations

from subprocess import CalledProcessError

import pytest

from tests.needs import missing
from tools.compare_shaders import MATRICES, OURS, TYPES, compared_on, ratios
from tools.debian import ArchiveError
from tools.llama_cpp_matmul import compiler, sources

MOST = 1.1  # times the cycles of llama.cpp's, by the estimate of tools/assembly/cost.py


@pytest.mark.usefixtures("drivers")
@pytest.mark.full
@pytest.mark.parametrize("gpu", ["navi31", "gfx1150", "anv-bmg"])
def test_ours_cost_at_most_a_tenth_more_cycles_and_spill_nothing(gpu: str) -> None:
    try:
        sources(), compiler()
    except (ArchiveError, CalledProcessError) as reason:
        missing(f"llama.cpp's shaders, or their compiler, cannot be had: {reason}")
    rows = compared_on(gpu).rows
    ours = [row for row in rows if row.side == OURS]
    assert len(ours) == len(TYPES) * len(MATRICES) and not any(row.spilled for row in ours)
    taken: dict[tuple[str, str, str], float] = {}
    for row, ratio in ratios(rows):
        if ratio is not None:  # the first of a kind is the one that llama.cpp takes
            taken.setdefault((gpu, row.type, row.matrices), ratio)
    assert len(taken) == len(ours)
    assert {key: ratio for key, ratio in taken.items() if ratio > MOST} == {}


@pytest.mark.usefixtures("drivers")
@pytest.mark.full
def test_where_llama_cpp_multiplies_none_ours_spill_nothing_either() -> None:
    found = compared_on("anv-dg2")
    assert len(found.rows) == len(TYPES) * len(MATRICES) and found.notes
    assert not any(row.spilled or row.side != OURS for row in found.rows)
