"""How attention is spread over a device: splits of the positions, teams of lanes, heads at once.

Must be kept in sync with attention_state.glsl.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vkmoe.ops.attention_shapes import UNIT_DIMS, AttentionShape, LatentShape
from vkmoe.ops.tuning import Tuning

__all__ = ["AttentionSplit", "choose_split"]

MAX_SPLITS = 128  # attention_combine.comp
SHARED_BYTES = 16384
CPU_WORKGROUPS, GPU_WORKGROUPS = 4, 128  # enough to fill the device
CPU_HEADS = 4  # at most in a workgroup
# Units of queries and of sums in the registers of one lane. Latent rows are wide and shared by all
# heads: GPUs give them more registers, and CPU drivers take long enough to compile fewer.
UNITS, LATENT_UNITS, CPU_LATENT_UNITS = 16, 20, 36
MOST_TEAM_UNITS = 4  # value units per lane beyond which a subgroup is too narrow for a team


@dataclass(frozen=True)
class AttentionSplit:
    """How attention is spread over the device: `n_splits` workgroups along the positions, a team of
    `team_lanes` lanes per position, `workgroup_heads` query heads per workgroup."""

    workgroup_size: int
    n_splits: int
    team_lanes: int
    step_positions: int
    workgroup_heads: int
    subgroup: bool

    def partials_words(self, shape: AttentionShape | LatentShape) -> int:
        """Words of the partials tensor [n_heads][n_splits][value_dim + 2]."""
        return shape.n_heads * self.n_splits * (shape.value_dim + 2)

    def shared_bytes(self, shape: AttentionShape | LatentShape) -> int:
        """Shared memory of one workgroup, see attention_state.glsl."""
        n_teams = self.workgroup_size // self.team_lanes
        heads = self.workgroup_heads
        is_latent = isinstance(shape, LatentShape)
        n_input_rows = heads if is_latent else heads + 1
        values = max(self.step_positions * heads, n_input_rows)
        words = max(n_teams * shape.value_dim, n_input_rows * shape.row_dim)
        words += values * (self.workgroup_size + n_teams + 1) + values * n_teams + heads * n_teams
        own_row_bytes = shape.row_dim * (2 if shape.kv_type == "F16" else 4)
        return 4 * words + own_row_bytes * (1 if is_latent else 2)

    def check(self, shape: AttentionShape | LatentShape) -> None:
        """What the kernels assume of a split; choose_split keeps to it."""
        assert self.n_splits <= MAX_SPLITS and self.shared_bytes(shape) <= SHARED_BYTES, self
        assert (shape.value_dim // UNIT_DIMS) % self.team_lanes == 0, (self, shape)
        assert shape.group % self.workgroup_heads == 0, (self, shape)


def choose_split(
    shape: AttentionShape | LatentShape,
    tuning: Tuning,
    workgroup_size: int = 0,
    n_splits: int = 0,
) -> AttentionSplit:
    """A split for a device; 0 = the tuning's workgroup size, and enough splits to fill the device.

    Teams are as wide as subgroups where those divide a value, so that sums stay in registers; else
    as wide as a value has units, so that GPU lanes coalesce. The code unrolls over a workgroup's
    heads and its positions per step: CPU drivers take seconds to compile more, GPUs run out of
    registers. Neither context nor window have a say in it, so that they cannot change a bit, and
    layers can share pipelines; unused splits return early.
    """
    on_cpu = tuning.mapping != "lanes"
    size = workgroup_size or tuning.workgroup_size
    for lanes, subgroup in _teams(shape, tuning, size):
        most = _most_heads(shape, lanes, on_cpu)
        for heads in (n for n in reversed(_divisors(shape.group)) if n <= most):
            wanted = CPU_WORKGROUPS if on_cpu else GPU_WORKGROUPS
            splits = n_splits or min(-(-wanted // (shape.n_heads // heads)), MAX_SPLITS)
            few_loads = on_cpu or isinstance(shape, LatentShape)
            for step_positions in (2, 1) if few_loads else (4, 2, 1):
                split = AttentionSplit(size, splits, lanes, step_positions, heads, subgroup)
                if split.shared_bytes(shape) <= SHARED_BYTES:
                    return split
    raise AssertionError(f"no split of {shape} fits in {SHARED_BYTES} bytes of shared memory")


def _teams(
    shape: AttentionShape | LatentShape, tuning: Tuning, size: int
) -> Iterator[tuple[int, bool]]:
    """Lanes of a team and whether it is a subgroup, the best first."""
    units, subgroup_size = shape.value_dim // UNIT_DIMS, tuning.subgroup_size
    is_wide = tuning.mapping != "lanes" or units <= MOST_TEAM_UNITS * subgroup_size
    if 0 < subgroup_size <= size and units % subgroup_size == 0 and is_wide:
        yield subgroup_size, True
    yield max(n for n in _divisors(units) if n <= size), False


def _most_heads(shape: AttentionShape | LatentShape, lanes: int, on_cpu: bool) -> int:
    """Query heads that a workgroup has room for."""
    lane_units = sum(-(-dim // UNIT_DIMS // lanes) for dim in (shape.row_dim, shape.value_dim))
    if isinstance(shape, LatentShape):
        most = (CPU_LATENT_UNITS if on_cpu else LATENT_UNITS) // lane_units
        return max(1, min(most, CPU_HEADS) if on_cpu else most)
    return CPU_HEADS if on_cpu else max(1, UNITS // lane_units)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
