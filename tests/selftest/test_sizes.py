"""What the self-test measures is memory: more weights than a GPU caches, few on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.invented import DEVICES
from vkmoe.facts import DeviceInfo
from vkmoe.kernels import inputs
from vkmoe.kernels.family import Setting
from vkmoe.kernels.inputs import WEIGHT_TYPES, random_rows
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.quants import device_row_bytes


def measured_bytes(info: DeviceInfo, kind: str, n_matrices: int) -> int:
    """Bytes that a measured dispatch reads."""
    setting = Setting(kind, choose_tuning(info), info)
    return n_matrices * setting.rows_of(2048, n_matrices) * device_row_bytes(kind, 2048)


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_gpus_read_more_than_their_caches_hold(kind: str) -> None:
    gpu = replace(next(iter(DEVICES)), type="discrete")
    for n_matrices in (1, 8):
        assert 0.99 * (256 << 20) < measured_bytes(gpu, kind, n_matrices) <= 256 << 20
        assert measured_bytes(replace(gpu, type="cpu"), kind, n_matrices) <= 2 << 20


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_large_matrices_repeat_their_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = random_rows(kind, 3, 256, np.random.default_rng(1))
    monkeypatch.setattr(inputs, "DISTINCT_BYTES", 3 * few.shape[1])
    many = random_rows(kind, 8, 256, np.random.default_rng(1))
    np.testing.assert_array_equal(many, np.concatenate([few, few, few])[:8])
