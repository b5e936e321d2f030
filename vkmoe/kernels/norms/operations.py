"""This module has RMSNorm: what is exchanged where kernels fuse it, and kernels where none does.

Fused, a producer leaves hidden, hidden * gain and partial sums of hidden^2; a consumer multiplies
its dot products by 1 / sqrt(mean + eps) (include/rms.glsl). One kernel is for what no producer
leaves partial sums of, another for norms behind blocks, whose results it adds to hidden. Shaders:
rms_norm.comp, norm_residual.comp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import MAX_GROUPS, Bound, TensorRef, memory_range
from vkmoe.kernels.context import OpContext


@dataclass(frozen=True)
class NormInput:
    """Describes an input's fused RMSNorm: its producer left `n_partials` partial sums of h^2."""

    partials: TensorRef
    n_partials: int
    width: int
    eps: float

    @property
    def numbers(self) -> dict[str, float]:
        """Return what consumers need, as their kernels name it."""
        return {
            "n_partials": self.n_partials,
            "partials_pitch": self.partials.row_words,
            "inverse_width": 1.0 / self.width,
            "eps": self.eps,
        }

    def tensor(self, n_rows: int) -> Bound:
        """Bind the tensor that consumers of `n_rows` rows read."""
        return self.partials.rows(n_rows, 0, self.n_partials)


# What consumers need whose input is not normed.
NOT_NORMED: Mapping[str, float] = MappingProxyType(
    {"n_partials": 0, "partials_pitch": 0, "inverse_width": 0.0, "eps": 0.0}
)


@dataclass(frozen=True)
class NormOutput:
    """Holds what a producer of hidden leaves the next norm. `gain` is f32 [width] by address.

    The rows of hidden and gained are of one length. Without `adds` a producer writes hidden = its
    result, in place of hidden += that, and reads nothing that hidden held; one that always does
    so, such as `embed`, takes no notice.
    """

    hidden: TensorRef
    gained: TensorRef
    partials: TensorRef
    gain: int
    adds: bool = True

    @classmethod
    def alone(cls, hidden: TensorRef) -> NormOutput:
        """Say that hidden alone is written, as no norm follows; the rest is not used."""
        return cls(hidden, hidden, hidden, gain=0)

    @property
    def numbers(self) -> dict[str, int]:
        """Return what producers need, as their kernels name it."""
        rows = self.hidden.n_rows, self.gained.n_rows
        assert rows == (1, 1) or self.hidden.row_words == self.gained.row_words, self
        return {
            "gain": self.gain,
            "adds": int(self.adds),
            "hidden_pitch": self.hidden.row_words,
            "partials_pitch": self.partials.row_words,
        }

    def tensors(self, n_rows: int) -> dict[str, Bound]:
        """Bind the tensors that producers of `n_rows` rows write, as their kernels name them."""
        tensors = {"hidden": self.hidden, "gained": self.gained, "partials": self.partials}
        return {name: tensor.rows(n_rows) for name, tensor in tensors.items()}

    def n_partials(self, n_workgroups: int) -> int:
        assert n_workgroups <= self.partials.row_words, (n_workgroups, self.partials)
        return n_workgroups


RMS_NORM = kernel(
    "rms_norm",
    "r:x w:y",
    "address:gain u32:x_offset u32:width u32:x_pitch u32:y_pitch f32:eps",
    "workgroup_size",
)

NORM_RESIDUAL = kernel(
    "norm_residual",
    "r:a r:b rw:hidden w:gained w:partials",
    "address:a_gain address:b_gain address:norm_gain address:scale address:gain "
    "u32:row_vec4s u32:a_pitch u32:b_pitch u32:hidden_pitch u32:partials_pitch f32:eps",
    "workgroup_size n_parts",
)
ROW_LANES = 128  # of a GPU, for one row: every device takes as many


def rms_norm(
    op: OpContext,
    x: TensorRef,
    y: TensorRef,
    width: int,
    gain: int,
    eps: float,
) -> None:
    """Append y[:width] = v / sqrt(mean(v^2) + eps) * gain, where v is x[:width].

    x and y are of each row of the batch. `gain` is the address of f32 [width].
    """
    op.append(
        RMS_NORM.dispatch(
            f"rms_norm{op.tuning.reduce_suffix}",
            {
                **vars(op.tuning),
                **{"gain": gain, "x_offset": 0, "width": width, "eps": eps},
                **{"x_pitch": x.row_words, "y_pitch": y.row_words},
            },
            {"x": x.rows(op.n_rows, 0, width), "y": y.rows(op.n_rows, 0, width)},
            (1, 1, op.n_rows),
            op.label,
            reads=(memory_range(gain, 4 * width),),
        )
    )


class NormedPart(NamedTuple):
    """Holds what a part of a block gave, f32 [width] a row, and what the norm of its own has."""

    tensor: TensorRef
    gain: int = 0  # address of f32 [width]; 0: it has no norm

    @property
    def pitch(self) -> int:
        """Count the vec4s from row to row."""
        assert self.tensor.n_rows == 1 or self.tensor.row_words % 4 == 0, self
        return self.tensor.row_words // 4


def norm_residual(
    op: OpContext,
    parts: Sequence[NormedPart],
    gain: int,
    output: NormOutput,
    width: int,
    eps: float,
    scale: int = 0,
) -> int:
    """Append hidden = scale * (hidden + rms(y) * gain), y being the sum of one part or two.

    Of each row of the batch. rms(v) = v / sqrt(mean(v^2) + eps); a part that has a gain is normed
    before, too. `gain` is the address of f32 [width], `scale` that of one f32, or 0: 1. No part may
    be hidden or gained. Returns the number of partials of a row; 0 where the output has no gain.
    """
    assert 1 <= len(parts) <= 2 and width % 4 == 0 and output.adds, (parts, width)
    first, second = parts[0], parts[-1]
    on_gpu, n_rows, lines = op.tuning.mapping == "lanes", op.n_rows, _lines_of(op.n_rows)
    read = [(one, width) for one in (gain, output.gain, first.gain, second.gain)] + [(scale, 1)]
    op.append(
        NORM_RESIDUAL.dispatch(
            f"norm_residual{op.tuning.reduce_suffix}",
            {
                **output.numbers,
                "workgroup_size": ROW_LANES if on_gpu else op.tuning.workgroup_size,
                **{"n_parts": len(parts), "row_vec4s": width // 4, "eps": eps, "scale": scale},
                **{"a_gain": first.gain, "b_gain": second.gain, "norm_gain": gain},
                **{"a_pitch": first.pitch, "b_pitch": second.pitch},
            },
            {
                "a": first.tensor.rows(n_rows, 0, width),
                "b": second.tensor.rows(n_rows, 0, width),  # the first again, unread, if it is one
                **output.tensors(n_rows),
            },
            (1, lines, n_rows // lines),
            op.label,
            reads=tuple(memory_range(start, 4 * n) for start, n in dict.fromkeys(read) if start),
        )
    )
    return output.n_partials(1) if output.gain else 0


def _lines_of(n_rows: int) -> int:
    """Count the lines of workgroups, of equal length, that take all rows: as few as can be.

    Parts of rows that are normed alone may be more than a line takes.
    """
    return next(n for n in range(-(-n_rows // MAX_GROUPS), n_rows + 1) if n_rows % n == 0)
