"""tools/integer_dots: what the study compiles computes what it is compared for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.needs import missing
from tools.integer_dots.kernels import KINDS, QUANTISE, compile_into
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.inputs import place_matrix
from vkmoe.kernels.matvec.operations import matvec
from vkmoe.kernels.tuning import Tuning, adds_over_subgroups

N_ROWS, N_COLUMNS = 37, 2304  # a last workgroup with one row; a last step for some lanes
ROUNDING = 0.03  # of the products' root mean square; without rounding it were 1e-7


@pytest.fixture(scope="module")
def read_kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    return compile_into(tmp_path_factory.mktemp("spirv"))


@pytest.fixture
def runner() -> Iterator[Runner]:
    with Device(os.environ.get("VKMOE_DEVICE")) as device, Runner(device) as made:
        if not (device.info.is_vulkan and adds_over_subgroups(device.info)):
            missing("the device has no subgroups that add, or no 64-bit addresses")
        yield made


def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to 8-bit numbers times a scale, in blocks of 32."""
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(1, keepdims=True)
    numbers = np.rint(blocks * (np.float32(127) / largest))
    found: NDArray[np.float32] = (numbers * (largest / np.float32(127))).ravel()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_activations(
    runner: Runner,
    read_kernel: Callable[[str], bytes],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(gpu_device, "spirv_words", read_kernel)
    rng = np.random.default_rng(KINDS.index(kind))
    placed = place_matrix(runner, kind, N_ROWS, N_COLUMNS, rng)
    drawn = rng.standard_normal(N_COLUMNS) * np.exp(rng.standard_normal(N_COLUMNS))
    values, exact_x = placed.values.astype(np.float64), drawn.astype(np.float32)
    x, words, y = (TensorRef(n, N_COLUMNS) for n in ("x", "words", "y"))
    op = OpContext(Program(kind), Tuning("lanes", 64, 4, True))
    numbers = {"n_blocks": N_COLUMNS // 32, "workgroup_size": 64}
    tensors = {"x": x, "words": words}
    op.append(QUANTISE.dispatch("quantise", numbers, tensors, (N_COLUMNS // 256, 1, 1), kind))
    matvec(op, (placed.matrix,), words, y)
    found = runner.run(op.program, {x: exact_x}, y)[0].view(np.float32)[:N_ROWS]
    terms = np.abs(values) @ np.abs(exact_x)
    assert (np.abs(found - values @ rounded(exact_x)) < 1e-6 * terms).all()
    exact = values @ exact_x
    error = np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))
    assert 1e-3 < error < ROUNDING
