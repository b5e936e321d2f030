"""This module maps kernels onto a device: lane mapping, workgroup size, rows per workgroup.

One tuning is fixed when a model is loaded; results are bit-identical only under the same tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from vkmoe.choices import Layout
from vkmoe.facts import DeviceInfo, MatrixShape
from vkmoe.kernels.launches import (
    KEEPING,
    UNITS_SHARED_BYTES,
    KernelClass,
    Launch,
    Tile,
    TileNumbers,
)

# Rows of a batch that a workgroup takes at once. With more, Intel's GPUs spill registers.
_COLUMNS, _INTEL_COLUMNS = 8, 2

# Of GPUs. The statistics of ACO, NAK and Intel's compiler favour no other size of workgroup. Their
# registers allow 8 rows of some types, but fewer workgroups then hide each other's waiting.
_WORKGROUP_SIZE, _ROWS, _ROWS_OF_FEW = 64, 4, 1
# Of CPU threads: rows of weights that one takes at a time, by as many vectors of a prompt.
_THREAD_ROWS = 64
_THREAD_TILE = Tile(8, _THREAD_ROWS, 16, 16)
_MAX_WORKGROUP_SIZE = 256  # what reduce.glsl has room for
_MAX_ROWS = 8  # beyond it compilers take seconds, or spill
_MAX_LANE_ROWS = 512  # lanes times rows: what fits in 16 KiB of shared memory with all types


@dataclass(frozen=True)
class Tuning:
    """Says how kernels are mapped onto a device.

    `lanes`: eight lanes share a superblock, coalesced (GPUs). `blocks`: a lane takes whole blocks
    (CPU drivers). `threads`: no shader runs, but ggml's kernels, on threads of the CPU.
    """

    mapping: Literal["lanes", "blocks", "threads"]
    workgroup_size: int
    rows: int  # weight rows a workgroup works on at once
    subgroup: bool  # use the variants with subgroup arithmetic
    load_64bit: bool = False  # blocks: 64-bit loads (needs shaderInt64); one subgroup a workgroup
    subgroup_size: int = 0  # of this device, for teams that may coincide with subgroups; 0 = none
    required_subgroup_size: int = 0  # of the experts' kernels; 0: the device has only one anyway
    loaded_words: int = 16  # lanes: words of 16 bytes that a lane loads before it unpacks the first
    rows_of_few: int = 0  # `rows` of matrices that have few; 0: no other number
    most_columns: int = 8  # rows of a batch that are multiplied with a chunk of weights at once
    launches: tuple[tuple[KernelClass, Launch], ...] = ()  # measured, in place of all these
    own_tile: Tile | None = None  # of kernels that multiply tiles; None: as every device can
    half_tiles: bool = False  # lanes: they multiply f16 (needs shaderFloat16), all but routers
    matrix_tile: Tile | None = None  # lanes: of those, on matrix units; None: without

    @property
    def layout(self) -> Layout:
        """Return how kernels find the rows of weights."""
        return "file" if self.mapping == "threads" else "planes"

    @property
    def dot_suffix(self) -> str:
        """Return the suffix of the SPIR-V variants of kernels with dot products."""
        if self.mapping == "blocks":
            return "+blocks64" if self.load_64bit else "+blocks"
        return self.reduce_suffix

    @property
    def tile_suffix(self) -> str:
        """Return the suffix of the variants of kernels that multiply tiles."""
        if self.mapping == "blocks":
            return self.dot_suffix
        if self.matrix_tile is not None:
            return "+matrix"
        return "+half" if self.half_tiles else ""

    @property
    def rounds_factors(self) -> bool:
        """Say whether tiles are of f16: both factors of their products are rounded."""
        return self.tile_numbers != "f32"

    @property
    def tile_numbers(self) -> TileNumbers:
        """Return what tiles multiply, but those of routers."""
        if self.matrix_tile is not None:
            return "matrix"
        return "f16" if self.half_tiles else "f32"

    def with_numbers(self, numbers: TileNumbers) -> Tuning:
        """Return the tuning whose tiles multiply these numbers, or the next of TileNumbers."""
        return replace(
            self,
            matrix_tile=self.matrix_tile if numbers == "matrix" else None,
            half_tiles=self.half_tiles and numbers != "f32",
        )

    @property
    def exact(self) -> Tuning:
        """Return the tuning without products of f16."""
        return self.with_numbers("f32")

    @property
    def reduce_suffix(self) -> str:
        """Return the suffix of the SPIR-V variants of kernels that only reduce."""
        return "+subgroup" if self.subgroup else ""

    @property
    def walk_suffix(self) -> str:
        """Return the suffix of the SPIR-V variants of what appends the rows of prompts."""
        return "+blocks64" if self.mapping == "blocks" and self.load_64bit else ""

    @property
    def attend_suffix(self) -> str:
        """Return the suffix of those of attention of prompts, where rows fit (choose_tiling)."""
        return self.walk_suffix if self.matrix_tile is None else "+matrix"

    @property
    def tile(self) -> Tile:
        """Return the shape of tiles."""
        if self.matrix_tile is not None:
            return self.matrix_tile
        if self.own_tile is not None:
            return self.own_tile
        if self.mapping == "lanes":
            return Tile(64, 64, 8, 4)
        # Without 64-bit loads lanes do not share x, and the code for it is eight times as long.
        lane_columns = 8 if self.load_64bit else 4
        return Tile(self.workgroup_size, 4 * self.workgroup_size, 4, lane_columns)

    @property
    def tiles_text(self) -> str:
        """Describe the kernels that multiply tiles, for people."""
        numbers = "f16, routers' of f32" if self.half_tiles else "f32"
        if self.matrix_tile is not None:
            shape = "x".join(map(str, self.matrix_tile[4:7]))
            numbers = f"f16 on matrix units ({shape}), routers' of f32"
        if self.mapping == "threads":
            numbers = "8-bit numbers, as while replying"
        return f"tiles of {self.tile}, products of {numbers}"

    def launch(self, kernel: KernelClass) -> Launch:
        """Return how kernels of a class are launched: as was measured, or as the table has it."""
        return dict(self.launches).get(kernel, self.table_launch(kernel))

    def table_launch(self, kernel: KernelClass) -> Launch:
        """Return how kernels of a class are launched where nothing was measured."""
        rows = self.rows_of_few if kernel.rows == "few" and self.rows_of_few else self.rows
        required = self.required_subgroup_size if kernel.family in KEEPING else 0
        return Launch(self.workgroup_size, rows, required)

    def columns(self, n_rows: int) -> int:
        """Choose how many rows of a batch a workgroup takes at once: a divisor of their number."""
        return max(n for n in range(1, self.most_columns + 1) if n_rows % n == 0)

    def decode_sizes(self, most: int) -> tuple[int, ...]:
        """Choose how many rows programs have that decode up to `most` of them.

        A program's rows without a token cost as much as others, so that each number has one of its
        own. Above the rows that a workgroup takes at once only their multiples do: the divisors of
        others are smaller, and weights would be read more often. `most` always has a program.
        """
        columns = self.most_columns
        sizes = range(1, most + 1)
        return tuple(n for n in sizes if n <= columns or n % columns == 0 or n == most)

    def walk_rows(self, launch: Launch, columns: int) -> int:
        """Choose of how many weight rows a workgroup holds the unpacked chunks, if it reuses them.

        A chunk takes 36 registers, and the shader makes four walks at most.
        """
        if columns == 1 or self.mapping == "blocks":
            return launch.rows
        return min(launch.rows, max(1, self.loaded_words // 8, -(-launch.rows // 4)))

    @property
    def fewest_rows(self) -> int:
        """Return the least rows of a workgroup in any launch, which leaves the most partials."""
        measured = (launch.rows for _, launch in self.launches)
        return min(self.rows, self.rows_of_few or self.rows, *measured)

    def allows(self, kernel: KernelClass, launch: Launch, device: DeviceInfo) -> bool:
        """Say whether the device, the shaders and the law about placement let a kernel run so."""
        size, rows, subgroup_size = launch
        one_workgroup = self.mapping == "lanes" or size == self.workgroup_size
        most = min(device.limits.max_workgroup_invocations, device.limits.max_workgroup_size[0])
        sized = 8 <= size <= min(most, _MAX_WORKGROUP_SIZE) and size % 8 == 0
        fits = 1 <= rows <= _MAX_ROWS and size * rows <= _MAX_LANE_ROWS
        if not (sized and one_workgroup and fits):
            return False
        if subgroup_size == 0:  # the pipelines of experts must agree about it
            return kernel.family not in KEEPING or self.required_subgroup_size == 0
        least, most = device.subgroup_range
        able = self.subgroup and device.takes_subgroup_size and subgroup_size.bit_count() == 1
        return able and least <= subgroup_size <= most and size % subgroup_size == 0


# What runs on any device, with other kernels than those of the other mapping.
_PLAIN_LANES = Tuning("lanes", 32, 2, False, most_columns=1)
_PLAIN_BLOCKS = Tuning("blocks", 8, 4, False, most_columns=1)


def choose_tuning(device: DeviceInfo) -> Tuning:
    """Choose the tuning for a device by its type and subgroup size.

    On CPU drivers a load costs the same whatever its address and width, so a lane takes whole
    blocks in 64-bit loads, a workgroup is one subgroup, and activations are loaded once for all
    rows. On GPUs eight lanes share a superblock of 256 weights; 64 lanes cover 2048 columns in one
    step.

    The expert kernel that runs depends on where experts lie, and the size of its subgroups decides
    the order of its sums. So subgroups add only if all pipelines have one size, or can be given it.
    """
    if device.layout == "file":
        return Tuning("threads", 8, _THREAD_ROWS, False, own_tile=_THREAD_TILE)
    subgroup_size = device.subgroup_size if device.subgroup_arithmetic else 0
    if device.is_cpu:
        load_64bit = takes_subgroup_blocks(device)
        return Tuning("blocks", 8, 8, False, load_64bit, subgroup_size)
    return Tuning(
        "lanes",
        _WORKGROUP_SIZE,
        _ROWS,
        adds_over_subgroups(device),
        subgroup_size=subgroup_size,
        required_subgroup_size=_required_subgroup_size(device),
        rows_of_few=_ROWS_OF_FEW,
        loaded_words=_loaded_words(device),
        own_tile=_tile(device),
        half_tiles=_multiplies_halves(device),
        matrix_tile=matrix_tile(device),
        most_columns=_COLUMNS if _has_many_registers(device) else _INTEL_COLUMNS,
    )


def plainer(tuning: Tuning) -> Iterator[Callable[[Tuning], Tuning]]:
    """Yield what makes kernels of a tuning plainer, for drivers that compile some wrongly.

    Each change does without something, those before others that change more kernels: measured
    launches, matrix units, products of f16, large tiles, several rows of a batch at once, subgroups
    in attention, subgroups anywhere, the mapping itself. With the mapping "blocks" what has no
    subgroups has code that CPU drivers take minutes to compile; there the other mapping comes
    before it.
    """
    without: tuple[dict[str, Any], ...] = (
        {"launches": ()},
        {"matrix_tile": None},
        {"half_tiles": False},
        {"own_tile": None},
        {"most_columns": 1},
        {"subgroup_size": 0},
    )
    yield from (partial(replace, **fields) for fields in without)
    if tuning.mapping == "lanes":
        yield lambda one: replace(one, subgroup=False, subgroup_size=0, required_subgroup_size=0)
    other = _PLAIN_LANES if tuning.mapping == "blocks" else _PLAIN_BLOCKS
    yield lambda one: other


def adds_over_subgroups(device: DeviceInfo) -> bool:
    """Say whether subgroups can add, in the same order in all pipelines that must agree.

    The variants that do so have 64-bit addresses.
    """
    one_size = device.has_one_subgroup_size or _required_subgroup_size(device) > 0
    return device.subgroup_arithmetic and one_size and "int64" in device.features


def takes_subgroup_blocks(device: DeviceInfo) -> bool:
    """Say whether the device can run the 64-bit variants of the mapping "blocks".

    They take a workgroup for one subgroup; narrow CPUs have subgroups of 4.
    """
    return adds_over_subgroups(device) and device.subgroup_shuffle and device.subgroup_size >= 8


def _loaded_words(device: DeviceInfo) -> int:
    """Choose how many words a lane may load at once: with more, Intel's compiler spills them."""
    return 16 if _has_many_registers(device) else 4


def _multiplies_halves(device: DeviceInfo) -> bool:
    """Say whether tiles are of f16: a step is then 0.7 times the instructions on AMD and NVIDIA.

    Intel's compiler takes pairs apart, and spills.
    """
    return "float16" in device.features and _has_many_registers(device)


def _has_many_registers(device: DeviceInfo) -> bool:
    """Tell Intel's GPUs, whose lanes have 128 registers, by their subgroups below 32."""
    least, _ = device.subgroup_range
    return least >= 32


def _tile(device: DeviceInfo) -> Tile:
    """Choose the shape of tiles of a GPU: 128 rows where shared memory has room for them.

    With 32 sums a lane needs 108 to 128 registers of AMD's and NVIDIA's; Intel's compiler spills.
    """
    least, _ = device.subgroup_range
    lane_dots = 4 if least < 32 else 8
    large = Tile(128, 128, lane_dots, 4)
    fits = large.shared_bytes <= device.limits.max_shared_memory
    return large if fits else Tile(64, 64, lane_dots, 4)


def matrix_tile(device: DeviceInfo) -> Tile | None:
    """Choose the shape of tiles that matrix units multiply; None where the device has none for f16.

    A subgroup of 32 has 64 rows by 32 columns; of twice as many lanes each would read factors twice
    as often. Where lanes have 128 registers (Intel) it has two matrices by two, and loads nothing
    ahead: with more its compiler spills. On CPUs, which only compare, it has one by two. Pipelines
    have the least size of subgroups, on CPUs the driver's. Intel's driver lists matrices of 8 lanes
    where it multiplies them without units, too: on integrated GPUs of that size, which are left to
    other tiles.
    """
    shape = next((s for s in device.half_shapes if _fits_chunks(s)), None)
    one_size = device.has_one_subgroup_size
    able = device.subgroup_shuffle and (one_size or device.takes_subgroup_size)
    if shape is None or not able:
        return None
    size = device.subgroup_size if device.is_cpu else device.subgroup_range[0]
    if size == 8 and device.type == "integrated":
        return None
    if device.is_cpu:
        form = 4 * size, shape.rows, 2 * shape.columns
    elif _has_many_registers(device):
        form = 256, 64, size
    else:
        form = 128, 2 * shape.rows, 2 * shape.columns
    workgroup_size, dots, columns = form
    ahead = int(device.is_cpu or _has_many_registers(device))
    tile = Tile(
        workgroup_size,
        workgroup_size,
        dots,
        columns,
        *shape[:3],
        size,
        ahead,
        0 if one_size else size,
    )
    limits = device.limits
    fits = max(tile.shared_bytes, UNITS_SHARED_BYTES) <= limits.max_shared_memory
    return tile if fits and workgroup_size <= limits.max_workgroup_invocations else None


def _fits_chunks(shape: MatrixShape) -> bool:
    """Say whether the matrices divide chunks of 32 weights, and subgroups' tiles."""
    return shape.depth in (8, 16, 32) and shape.rows in (8, 16, 32) and shape.columns in (8, 16, 32)


def _required_subgroup_size(device: DeviceInfo) -> int:
    """Choose the size to require where drivers would; 0: nothing to choose, or no way to require.

    The least where that is 8 or 16: at twice that Intel's compiler spills registers in nearly all
    of these kernels, at the least in none.
    """
    able = device.subgroup_arithmetic and device.takes_subgroup_size
    if device.has_one_subgroup_size or not able:
        return 0
    least, _ = device.subgroup_range
    size = least if least in (8, 16) else device.subgroup_size
    return size if _WORKGROUP_SIZE % size == 0 else 0
