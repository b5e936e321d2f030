"""tools/compare_shaders.py: what is chosen, counted and printed; it needs no driver and no network
here, and compares nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tools import compare_shaders, kernel_statistics
from tools.compare_shaders import SHAPES, Row, summaries, tables
from tools.llama_cpp_shaders import Matrix, choose
from vkmoe.ops.tuning import Tuning

ROOT = Path(__file__).resolve().parent.parent.parent
HEAD = Matrix("Q4_K", 151936, 2048)
GATE = Matrix("Q4_K", 768, 2048, n_experts=8)


@pytest.mark.parametrize(
    ("vendor", "matrix", "q8_1", "name", "constants", "columns", "is_default"),
    [
        ("amd", HEAD, False, "mul_mat_vec_q4_k_subgroup", (64, 2, 1), 1024, False),
        ("amd", HEAD, True, "mul_mat_vecq_q4_k_subgroup", (64, 1, 1), 4096, True),
        ("amd", GATE, True, "mul_mat_vecq_id_q4_k_subgroup", (64, 4, 1), 4096, True),
        ("nvidia", HEAD, False, "mul_mat_vec_q4_k_subgroup", (32, 2, 1), 512, True),
        ("nvidia", GATE, False, "mul_mat_vec_id_q4_k_hybrid", (128, 2, 1), 2048, True),
        ("intel", GATE, False, "mul_mat_vec_id_q4_k_hybrid", (64, 2, 1), 1024, False),
        ("intel", GATE, True, "mul_mat_vecq_id_q4_k_subgroup", (8, 1, 1), 512, True),
        (
            "amd",
            Matrix("F16", 768, 2048),
            False,
            "mul_mat_vec_f16_subgroup",
            (64, 2, 1),
            1024,
            True,
        ),
        (
            "amd",
            Matrix("Q6_K", 768, 2048),
            True,
            "mul_mat_vecq_q6_k_subgroup",
            (64, 1, 1),
            4096,
            False,
        ),
    ],
)
def test_shaders_are_chosen_as_llama_cpp_chooses_them(
    vendor: str,
    matrix: Matrix,
    q8_1: bool,
    name: str,
    constants: tuple[int, int, int],
    columns: int,
    is_default: bool,
) -> None:
    shader = choose(vendor, vendor == "amd", matrix, q8_1)
    assert (shader.name, shader.constants) == (name, constants)
    assert (shader.columns_a_pass, shader.is_default) == (columns, is_default)


@pytest.mark.parametrize(
    ("shape", "workgroups", "weights", "passes"),
    [
        ("head", 37984, 128, 1),
        ("output", 512, 128, 2),
        ("gate up", 384 * 8, 128, 1),
        ("down", 512, 128, 3),
    ],
)
def test_our_kernels_are_those_that_the_model_would_run(
    shape: str, workgroups: int, weights: int, passes: int
) -> None:
    tuning = Tuning("lanes", 64, 4, subgroup=True, subgroup_size=64)
    (job,) = compare_shaders._ours("navi31", tuning, shape, "Q4_K")
    assert (job.n_workgroups, job.weights_a_pass) == (workgroups, weights)
    assert job.question.main_passes == passes
    assert job.all_weights == weights * passes
    # The norm's 512 partial sums: each of 64 lanes loads its eight before any loop.
    assert set(job.question.passes.values()) == ({0} if shape in ("head", "gate up") else set())


def test_waves_that_fit_on_a_unit() -> None:
    waves = compare_shaders._waves_of_unit
    assert waves("amd", {}, 10, 1) == 20  # two SIMDs
    assert waves("nvidia", {"Number of GPRs": 90}, None, 2) == 20  # 5 a partition
    assert waves("nvidia", {"Number of GPRs": 40}, None, 1) == 16  # workgroups
    assert waves("intel", {}, None, 4) == 128


@pytest.mark.parametrize(
    ("lanes", "least_lanes", "fit"),
    [(64, 32, 10), (32, 32, 20), (64, 64, 20)],
    ids=("RDNA", "RDNA, narrow", "GCN"),
)
def test_waves_are_counted_in_their_own_size(lanes: int, least_lanes: int, fit: int) -> None:
    assert kernel_statistics.waves({"Subgroups per SIMD": 20}, lanes, least_lanes) == fit
    assert kernel_statistics.waves({"Number of GPRs": 90}, lanes, least_lanes) is None


@pytest.mark.parametrize(
    "name", ["Spilled VGPRs", "Scratch size", "SLM Size", "Fill Count", "Scratch Memory Size"]
)
def test_no_maker_hides_a_spill(name: str) -> None:
    assert kernel_statistics.spills({"VGPRs": 72, name: 4})
    assert not kernel_statistics.spills({"VGPRs": 72, name: 0})


def _row(code: str, alu: float) -> Row:
    return Row(
        *("navi31", "head", "Q4_K", code, alu, True, 15, 25, 1, 18432.0, 9216.0, 12000.0),
        *(72, False, 20, 5448, None),
    )


def test_tables_show_before_beside_now(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    others = [replace(_row("vkmoe", 5.0), shape="down"), _row("llama.cpp f32", 6.0)]
    saved.write_text(json.dumps([asdict(row) for row in (_row("vkmoe", 4.5), *others)]))
    now = [_row("vkmoe", 4.0), _row("llama.cpp f32", 5.8)]
    rows = [*compare_shaders._before(saved, now), *now]
    assert [(row.code, row.alu_per_weight) for row in rows] == [
        ("vkmoe before", 4.5),
        ("vkmoe", 4.0),
        ("llama.cpp f32", 5.8),
    ]
    title, heads, _, line, _ = tables(rows)
    assert title == "\nnavi31 (RX 7900 XTX): head, 151936 x 2048"
    assert " ".join(line.split()) == "Q4_K vkmoe 4.00 15+25 1 18.0 9.0 11.7 72 20 5448"
    assert len(line) == len(heads)
    cells = "| Q4_K | head | 4.50 | 4.00 | 5.80 | 15 | 15 | 15 | 18.0 | 18.0 | 18.0 |"
    assert list(summaries(rows))[-1] == cells


def test_rows_of_another_version_are_refused_in_a_line(tmp_path: Path) -> None:
    saved = tmp_path / "old.json"
    saved.write_text(json.dumps([asdict(_row("vkmoe", 4.5)) | {"gone": 0}]))
    program = [sys.executable, "-m", "tools.compare_shaders", "--load", str(saved)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "another version" in done.stderr and "Traceback" not in done.stderr


def test_a_target_that_is_missed_is_bold() -> None:
    slow = replace(_row("vkmoe", 6.0), rounds=16, unit_bytes=9216.0)
    line = list(summaries([slow, _row("llama.cpp f32*", 5.8)]))[-1]
    assert line == "| Q4_K | head | **6.00** | 5.80* | **16** | 15* | **9.0** | 18.0* |"


def test_a_loop_that_reads_too_little_is_marked_and_so_are_spills() -> None:
    row = replace(_row("vkmoe", 4.0), covers=False, spills=True)
    assert "4.00?" in list(tables([row]))[-1] and " 72! " in list(tables([row]))[-1]


def test_without_drivers_nothing_is_compared(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    program = [sys.executable, "-m", "tools.compare_shaders"]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (77, "") and "fetch_gpu_drivers" in done.stderr


def test_shapes_are_those_of_the_preset() -> None:
    from vkmoe.bench.shapes import SIZES

    model = SIZES["qwen3-30b-a3b"]
    assert SHAPES["head"] == (model.n_tokens, model.hidden, 0)
    assert SHAPES["gate up"] == (model.expert_size, model.hidden, model.n_experts_used)
    assert SHAPES["down"] == (model.hidden, model.expert_size, model.n_experts_used)
    heads = model.n_heads + 2 * model.n_kv_heads
    assert SHAPES["q k v"][0] == heads * model.head_size
    assert SHAPES["output"][:2] == (model.hidden, model.n_heads * model.head_size)
