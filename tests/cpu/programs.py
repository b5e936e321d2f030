"""Programs for the CPU device: memory for weights, and dispatches by name."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.quants import TYPES
from vkmoe.quants.types import Bytes

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

PLAIN = {
    **dict.fromkeys(("bias", "output_offset", "x_offset", "x_stride"), 0),
    **dict.fromkeys(("n_partials", "partials_pitch"), 0),
    **dict.fromkeys(("inverse_width", "eps"), 0.0),
}


class Rig:
    """A recording whose weights lie in memory that it knows."""

    def __init__(self, native: ModuleType, n_threads: int = 2) -> None:
        self.native, self.pool = native, native.Pool(n_threads)
        self.regions = native.Regions()
        self.recording = native.Recording(self.regions, native.Scratch())
        self._kept: list[NDArray[Any]] = []

    def place(self, values: NDArray[Any]) -> int:
        """The address of a copy that programs may read."""
        kept = np.ascontiguousarray(values).copy()
        self._kept.append(kept)
        self.regions.add(kept.ctypes.data, kept.nbytes)
        return kept.ctypes.data

    def run(self) -> None:
        self.recording.run(self.pool)

    def matvec(self, name: str, stack: list[Bytes], x: Floats, y: Floats, **numbers: Any) -> None:
        """Append a matvec of up to three matrices; x and y are [n_vectors, pitch]."""
        n_columns = stack[0].shape[1] // TYPES[name].block_bytes * TYPES[name].block_weights
        ends = np.cumsum([len(each) for each in stack]).tolist()
        asked: dict[str, Any] = {
            **PLAIN,
            **{f"weights{i}": self.place(stack[min(i, len(stack) - 1)]) for i in range(3)},
            "rows_end0": ends[0],
            "rows_end1": ends[min(1, len(ends) - 1)],
            "n_rows": ends[-1],
            "row_bytes": stack[0].shape[1],
            "n_blocks": n_columns // max(32, TYPES[name].block_weights),
            "x_pitch": x.shape[-1] // 4,
            "y_pitch": y.shape[-1],
            "columns": 1,
            "rows": 16,
            **numbers,
        }
        groups = (-(-ends[-1] // 16), 1, len(x) // asked["columns"])
        partials = asked.pop("norm_partials", np.zeros(1, np.float32))
        self.recording.dispatch(
            "matvec",
            f"matvec.{name.lower()}+blocks",
            asked,
            {"x": words(x), "y": words(y), "norm_partials": words(partials)},
            asked.pop("groups", groups),
        )

    def matmul(self, name: str, rows: Bytes, x: Floats, y: Floats) -> None:
        """Append the products of a matrix and the vectors of a prompt; x and y are [n, pitch]."""
        params = np.zeros(8 + 4 * len(x), np.uint32)
        params[3] = len(x)
        kind = TYPES[name]
        n_columns = rows.shape[1] // kind.block_bytes * kind.block_weights
        asked = {
            **{f"weights{i}": self.place(rows) for i in range(3)},
            **dict.fromkeys(("rows_end0", "rows_end1", "n_rows"), len(rows)),
            **dict.fromkeys(("bias", "x_offset", "x_head_stride", "y_offset"), 0),
            "row_bytes": rows.shape[1],
            "n_blocks": n_columns // max(32, kind.block_weights),
            "x_stride": x.shape[1] // 4,
            "y_stride": y.shape[1],
            "lane_dots": 16,
            "lane_columns": 16,
        }
        tensors = {"x": words(x), "y": words(y), "params": params}
        groups = (-(-len(x) // 256), 1, 1)
        self.recording.dispatch("matmul", f"matmul.{name.lower()}", asked, tensors, groups)


def words(values: NDArray[Any]) -> Words:
    """The same memory as words."""
    return values.reshape(-1).view(np.uint32)
