"""How many bytes of the caches attention loads: each seen row once for all heads of a workgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.test_bytes_loaded import CountingRunner, counting_spirv, n_bindings
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.device import Device
from vkmoe.kernels.attention.cases import AttentionCase, deepseek2_shape, gpt_oss_shape
from vkmoe.kernels.attention.shapes import AttentionSplit, choose_split
from vkmoe.kernels.attention.twins import split_positions
from vkmoe.kernels.comparison import Checks
from vkmoe.kernels.tuning import Tuning

POSITION = 150


@pytest.fixture
def counting(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CountingRunner]:
    """A runner whose kernels count what they load by address."""

    def counting_words(name: str) -> bytes:
        folder = tmp_path / name  # kernels are compiled side by side
        folder.mkdir(exist_ok=True)
        return counting_spirv(name, n_bindings(name), folder)

    monkeypatch.setattr(gpu_device, "spirv_words", counting_words)
    with CountingRunner(device) as runner:
        yield runner


def rows_of_steps(split: AttentionSplit, n_seen: int) -> int:
    """The rows that all splits load: what is missing from the last step is the last row again."""
    length = split_positions(n_seen - 1, split.n_splits)
    step = split.workgroup_size // split.team_lanes * split.step_positions
    return sum(-(-min(length, n_seen - start) // step) * step for start in range(0, n_seen, length))


@pytest.mark.parametrize("window", [0, 1, 50])
def test_only_seen_positions_are_loaded(counting: CountingRunner, window: int) -> None:
    """Heads beyond a workgroup's load the same rows again; the last step of a split is whole."""
    shape = gpt_oss_shape(window=window, n_heads=16)
    split = choose_split(shape, Tuning("blocks", 8, 8, False), n_splits=3)
    case, checks = AttentionCase(counting, shape, split, POSITION), Checks()
    case.step(POSITION, case.token(), checks)
    checks.verify()
    row_bytes = 2 * shape.head_dim
    n_rows = rows_of_steps(split, window or POSITION + 1)
    assert counting.counted[0] == 2 * n_rows * row_bytes * shape.n_heads // split.workgroup_heads


@pytest.mark.parametrize("mapping", ["blocks", "lanes"])
def test_a_latent_row_is_loaded_once_for_scores_and_values(
    counting: CountingRunner, mapping: str
) -> None:
    tuning = Tuning("lanes", 64, 4, False) if mapping == "lanes" else Tuning("blocks", 8, 8, False)
    shape = deepseek2_shape()
    split = choose_split(shape, tuning, n_splits=3)
    assert split.workgroup_heads > 1
    case, checks = AttentionCase(counting, shape, split, POSITION), Checks()
    case.step(POSITION, case.token(), checks)
    checks.verify()
    # A lane without a unit of the row's end loads what another one of its subgroup loads then.
    row_bytes = 2 * shape.row_dim
    n_rows = rows_of_steps(split, POSITION + 1)
    n_groups = shape.n_heads // split.workgroup_heads
    assert counting.counted[0] == n_rows * row_bytes * n_groups
