"""tools/integer_dots/matrices.py: what the study compiles computes what it is compared for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.tunings import chosen_device
from tests.tools.test_integer_dots import ROUNDING, rounded
from tools.integer_dots.kernels import QUANTISE, compile_into, compile_tile
from tools.integer_dots.matrices import KINDS
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.inputs import place_matrix
from vkmoe.kernels.matmul.cases import Batch
from vkmoe.kernels.matmul.operations import RowParts, matmul
from vkmoe.kernels.tuning import Tuning, matrix_tile

N_ROWS, N_COLUMNS, N_TOKENS = 45, 768, 19  # tiles that are not full


@pytest.fixture
def runner() -> Iterator[Runner]:
    with Device(os.environ.get("VKMOE_DEVICE")) as device, Runner(device) as made:
        yield made


def _has_units() -> bool:
    device = chosen_device()
    return matrix_tile(device) is not None and any(
        shape[3:] == ("s8", "s32") for shape in device.matrix_shapes
    )


@pytest.mark.skipif(not _has_units(), reason="needs matrix units")  # as in tests/lavapipe
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_activations(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    info = runner.device.info
    depth = next(s.depth for s in info.matrix_shapes if s[3:] == ("s8", "s32"))
    tile = matrix_tile(info)
    assert tile is not None
    defines = {"HALF_SLICES": "1"} if depth < 16 else {}
    made = {"quantise": compile_into(tmp_path)("quantise")}
    made[f"matmul.{kind.lower()}+matrix"] = compile_tile(kind, tmp_path, defines)
    monkeypatch.setattr(gpu_device, "spirv_words", made.__getitem__)
    rng = np.random.default_rng(KINDS.index(kind))
    placed = place_matrix(runner, kind, N_ROWS, N_COLUMNS, rng)
    drawn = rng.standard_normal((N_TOKENS, N_COLUMNS)) * np.exp(rng.standard_normal(N_COLUMNS))
    values, exact_x = placed.values.astype(np.float64), drawn.astype(np.float32)

    batch, row_words = Batch(tuple(range(N_TOKENS)), 0), N_COLUMNS // 32 * 12
    x = TensorRef("x", N_TOKENS * N_COLUMNS)
    room = N_TOKENS * row_words + N_COLUMNS  # the last row is bound as if it were of float32
    words, y = TensorRef("words", room), TensorRef("y", N_TOKENS * N_ROWS)
    tuning = Tuning("lanes", 64, 4, False, matrix_tile=tile._replace(matrix_depth=depth))
    op = batch.op(Program(kind), tuning)
    numbers = {"n_blocks": N_TOKENS * N_COLUMNS // 32, "workgroup_size": 64}
    groups = (-(-N_TOKENS * N_COLUMNS // 256), 1, 1)
    op.append(QUANTISE.dispatch("quantise", numbers, {"x": x, "words": words}, groups, kind))
    matmul(op, (placed.matrix,), RowParts(words, row_words), RowParts(y, N_ROWS), batch.params)
    inputs = {x: exact_x, batch.params: batch.params_words()}
    found = runner.run(op.program, inputs, y)[0].view(np.float32)[: y.n_words]

    found = found.reshape(N_TOKENS, N_ROWS)
    eight_bits = np.array([rounded(row) for row in exact_x])
    terms = np.abs(exact_x) @ np.abs(values).T
    assert (np.abs(found - eight_bits @ values.T) < 1e-6 * terms).all()
    exact = exact_x @ values.T
    error = np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))
    assert 1e-3 < error < ROUNDING
