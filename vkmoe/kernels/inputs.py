"""Makes what kernels are given in a self-test: random weights, activations, parameters of a token.

Also what several kernels leave: the hidden state, with what the next norm takes of it.
Weights are harsher than what a model holds: every block has its own scales, of both signs, and its
minima have nothing to do with its scales, so that a kernel that takes a neighbour's is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.cpu.device import CpuDevice, input_form
from vkmoe.gpu.program import TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.comparison import Checks, Inputs, Words
from vkmoe.kernels.matvec.operations import Matrix
from vkmoe.kernels.matvec.twins import HiddenState
from vkmoe.kernels.norms.operations import NormInput, NormOutput
from vkmoe.kernels.rounding import rounded
from vkmoe.kernels.rows import N_DRAWN, RowBatch
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants import decode, to_device
from vkmoe.quants.layouts import HAS_ROW_SCALE
from vkmoe.quants.types import HAS_KERNEL, TYPES, Bytes

WEIGHT_TYPES = tuple(name for name in TYPES if name in HAS_KERNEL)
# With these ggml rounds sums of activations to float16, which no bound on single terms allows:
# cases leave them out on CPUs, where tests/cpu has a twin.
ROUNDED_SUMS = ("Q4_1", "Q5_1")


class Scales(NamedTuple):
    """Says where a block holds its float16 scales, and about how large they are drawn."""

    places: tuple[int, ...]
    size: float = 2e-3


_SCALES = {
    "Q4_K": Scales((0, 2)),
    "Q5_K": Scales((0, 2)),
    "Q6_K": Scales((208,)),
    "Q8_0": Scales((0,)),
    "Q2_K": Scales((80, 82), 2e-2),
    "Q3_K": Scales((108,), 4e-3),
    "Q4_0": Scales((0,), 4e-2),
    "IQ4_NL": Scales((0,)),
    "IQ4_XS": Scales((0,), 2e-4),
    "Q4_1": Scales((0, 2), 4e-2),
    "Q5_0": Scales((0,), 2e-2),
    "Q5_1": Scales((0, 2), 2e-2),
    "IQ3_XXS": Scales((0,), 1e-3),
    "IQ3_S": Scales((0,), 1e-3),
    "IQ2_XXS": Scales((0,)),
    "IQ2_XS": Scales((0,)),
    "IQ2_S": Scales((0,)),
    "IQ1_S": Scales((0,), 2e-2),
    "IQ1_M": Scales((), 2e-2),
    "TQ1_0": Scales((52,), 0.2),
    "TQ2_0": Scales((64,), 0.2),
    "Q1_0": Scales((0,), 0.2),
    "Q2_0": Scales((0,), 0.2),
    "NVFP4": Scales(()),
    "MXFP4": Scales(()),
}
# Scales of other forms. MXFP4's exponents: 2^-9 to 2^-4, times values up to 12.
_EXPONENTS = range(119, 125)
_UE4M3 = range(0, 40)  # of NVFP4: 0 to 2^-3, subnormal ones too

EPS = 0.3  # of norms of values of size 1: large enough to be missed if it were forgotten

# Larger matrices repeat their rows: they are for measurements, and drawing takes long.
DISTINCT_BYTES = 8 << 20


@dataclass
class Placed:
    """Holds a matrix on the device and the file rows it was made from; large ones repeat these."""

    matrix: Matrix
    rows: Bytes  # [n_distinct, row_bytes]
    scale: float = 1.0  # of all weights

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Decode the distinct rows: float32 [n_distinct, n_columns]."""
        values = decode_rows(self.matrix.type, self.rows, self.matrix.n_columns)
        return values * np.float32(self.scale)


def random_rows(type_name: str, n_rows: int, n_columns: int, rng: np.random.Generator) -> Bytes:
    """Draw rows uint8 [n_rows, row_bytes] as in a file, finite."""
    kind = TYPES[type_name]
    row_bytes = kind.row_bytes(n_columns)
    n_distinct = _most_distinct(type_name, n_columns)
    if n_rows > n_distinct:
        return np.resize(random_rows(type_name, n_distinct, n_columns, rng), (n_rows, row_bytes))
    if type_name in ("F32", "F16", "BF16"):
        return _floats(type_name, n_rows * n_columns, rng).reshape(n_rows, row_bytes)
    n_blocks = n_rows * row_bytes // kind.block_bytes
    blocks = rng.integers(0, 256, (n_blocks, kind.block_bytes), np.uint8)
    places, size = _SCALES[type_name]
    for at in places:
        blocks[:, at : at + 2] = _drawn_halves(size, n_blocks, rng)[:, None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(_EXPONENTS.start, _EXPONENTS.stop, n_blocks)
    elif type_name == "NVFP4":
        blocks[:, :4] = rng.integers(_UE4M3.start, _UE4M3.stop, (n_blocks, 4))
    elif type_name == "IQ1_M":
        halves = _drawn_halves(size, n_blocks, rng)
        for i, scales in enumerate(blocks[:, 48:].view(np.uint16).T):  # each has four bits of it
            scales &= np.uint16(0x0FFF)
            scales |= (halves >> np.uint16(4 * i)) << np.uint16(12)
    return blocks.reshape(n_rows, row_bytes)


def _drawn_halves(size: float, n: int, rng: np.random.Generator) -> NDArray[np.uint16]:
    """Draw the bits of float16 values of about `size`, of either sign."""
    drawn = size * rng.uniform(0.5, 1.5, n) * rng.choice([-1.0, 1.0], n)
    bits: NDArray[np.uint16] = drawn.astype("<f2").view(np.uint16)
    return bits


def _floats(type_name: str, n_weights: int, rng: np.random.Generator) -> Bytes:
    values = rng.standard_normal(n_weights, np.float32)
    if type_name == "F16":
        return values.astype("<f2").view(np.uint8)
    if type_name == "BF16":
        return np.ascontiguousarray(values.view("<u2")[1::2]).view(np.uint8)
    return values.view(np.uint8)


def place_matrix(
    runner: Runner,
    type_name: str,
    n_rows: int,
    n_columns: int,
    rng: np.random.Generator,
    rows: Bytes | None = None,
) -> Placed:
    """Place a random matrix, or the given file `rows`, on the device."""
    if rows is None:
        n_distinct = min(n_rows, _most_distinct(type_name, n_columns))
        rows = random_rows(type_name, n_distinct, n_columns, rng)
    scale, layout = drawn_scales(type_name, 1, rng).item(), runner.device.info.layout
    laid_out = to_device(type_name, rows, n_columns, layout=layout, scale=scale)
    address = runner.place(np.resize(laid_out, (n_rows, laid_out.shape[1])))
    if isinstance(runner.device, CpuDevice):
        runner.device.scale(address, scale)
    return Placed(Matrix(type_name, address, n_rows, n_columns, laid_out.shape[1]), rows, scale)


def drawn_scales(type_name: str, n: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw what the weights of `n` matrices are multiplied by: 1 for types without such scales."""
    if type_name not in HAS_ROW_SCALE:
        return np.ones(n, np.float32)
    return rng.uniform(0.5, 2.0, n).astype(np.float32)


def _most_distinct(type_name: str, n_columns: int) -> int:
    return max(1, DISTINCT_BYTES // TYPES[type_name].row_bytes(n_columns))


def multiplied(tuning: Tuning, type_name: str, x: NDArray[np.float32]) -> NDArray[np.floating]:
    """Return vectors x, of any shape, as kernels multiply them by weights of a type.

    CPUs round them first (kernels/rounding.py).
    """
    if tuning.layout == "planes":
        return x
    return rounded(np.ascontiguousarray(x).reshape(-1), input_form(type_name)).reshape(x.shape)


def decode_rows(type_name: str, rows: Bytes, n_columns: int) -> NDArray[np.float32]:
    """Return the values float32 [n_rows, n_columns] of file rows."""
    return decode(type_name, rows, len(rows) * n_columns).reshape(len(rows), n_columns)


PARAMS = TensorRef("params", param_words(8))


def params_words(position: int = 0, serial: int = 0, table: int = 0, token: int = 0) -> Words:
    """Make the words of PARAMS, of one row; `table` is the expert table's address."""
    words = np.zeros(PARAMS.n_words, np.uint32)
    pack_params(words.data, TokenBatch.one(token, position), table, serial)
    return words


def routing_of(
    ids: NDArray[np.uint32],
    weights: NDArray[np.float32],
    addresses: NDArray[np.uint64],
    partners: NDArray[np.uint64],
) -> Words:
    """Make the words that router_topk leaves; all four are [n_used]."""
    return np.concatenate([part.view(np.uint32) for part in (ids, weights, addresses, partners)])


def normal(size: float, count: int, seed: int) -> NDArray[np.float32]:
    """Draw float32 [count] of a size."""
    return np.random.default_rng(seed).normal(0, size, count).astype(np.float32)


class NormedInput:
    """Draws activations x [width] of rows; with partials the RMSNorm of some other vector scales
    them.

    Its mean square is about 20 * width, so that products with weights of size 1 come out below 1,
    where SiLU bends; eps is large enough to be missed if it were forgotten.
    """

    def __init__(
        self, batch: RowBatch, width: int, n_partials: int, rng: np.random.Generator
    ) -> None:
        self.x = rng.standard_normal((N_DRAWN, width)).astype(np.float32)
        total = 16.0 * width * width
        partials = rng.uniform(0.5, 2.0, (N_DRAWN, n_partials)) * total / max(1, n_partials)
        self.partials = partials.astype(np.float32)
        self.x_ref = batch.tensor("x", width)
        self.partials_ref = batch.tensor("norm_partials", n_partials + 1)
        self.norm = NormInput(self.partials_ref, n_partials, width, 5.0 * width)

    def scale(self, row: int) -> float:
        """Compute the factor that the kernel multiplies the sums of a row by."""
        if not self.partials.size:
            return 1.0
        mean = float(np.sum(self.partials[row].astype(np.float64))) / self.x.shape[1]
        return float(1.0 / np.sqrt(mean + self.norm.eps))

    @property
    def inputs(self) -> Inputs:
        return {self.x_ref: self.x, self.partials_ref: self.partials}


class LeftState:
    """Holds the outputs of a producer of hidden, and compares those of a row with a twin's."""

    def __init__(
        self,
        runner: Runner,
        batch: RowBatch,
        width: int,
        group_width: int,
        rng: np.random.Generator,
        adds: bool = True,
    ) -> None:
        """Draw what was there; a workgroup makes `group_width` values and one partial sum.

        Where the producer does not add, NaN was there, and `before` is 0.
        """
        self._group_width, n_groups = group_width, -(-width // group_width)
        self._width, row_words = width, -(-width // 4) * 4 + 4  # rows begin at whole vec4s
        self.before = adds * rng.standard_normal((N_DRAWN, width)).astype(np.float32)
        self.gain = rng.uniform(0.5, 1.5, width).astype(np.float32)
        self.refs = NormOutput(
            batch.tensor("hidden", row_words),
            batch.tensor("gained", row_words),
            batch.tensor("partials", n_groups + 1),
            runner.place(self.gain),
            adds,
        )

    @property
    def outputs(self) -> tuple[TensorRef, TensorRef, TensorRef]:
        return self.refs.hidden, self.refs.gained, self.refs.partials

    @property
    def inputs(self) -> Inputs:
        before = self.before if self.refs.adds else np.full_like(self.before, np.nan)
        return {self.refs.hidden: before}

    def compare(
        self,
        checks: Checks,
        words: Sequence[Words],
        wanted: HiddenState,
        magnitude: NDArray[np.float64],
    ) -> None:
        """Compare a row with the twin's; `magnitude` [width] sums |terms| of each hidden value.

        Values that are not finite in the twin are left out, and so are sums they take part in.
        """
        starts = np.arange(0, self._width, self._group_width)
        ends = {"hidden": self._width, "gained": self._width, "partials": len(starts)}
        found = []
        for (name, end), left in zip(ends.items(), words, strict=True):
            checks.untouched(f"the words behind {name}", left[end:])
            found.append(left[:end].view(np.float32))
        hidden, gained, partials = found
        checks.close_where_finite("hidden", hidden, wanted.hidden, magnitude)
        checks.close_where_finite("gained", gained, wanted.gained, magnitude * np.abs(self.gain))
        squares = np.add.reduceat(wanted.hidden**2, starts)
        bounds = np.add.reduceat(2 * np.abs(wanted.hidden) * magnitude + wanted.hidden**2, starts)
        checks.close_where_finite("partial sums", partials, squares, bounds)

    def compare_hidden(
        self,
        checks: Checks,
        words: Sequence[Words],
        wanted: HiddenState,
        magnitude: NDArray[np.floating],
    ) -> None:
        """Compare a row with the twin's where nothing is left for a norm."""
        hidden, *others = words
        left = hidden[: self._width].view(np.float32)
        checks.close("hidden", left, wanted.hidden, magnitude)
        for ref, found in zip(self.outputs[1:], others, strict=True):
            checks.untouched(ref.name, found)
