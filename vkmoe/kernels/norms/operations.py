"""This module has RMSNorm: what is exchanged where kernels fuse it, and the kernel where none does.

Fused, a producer leaves hidden, hidden * gain and partial sums of hidden^2; a consumer multiplies
its dot products by 1 / sqrt(mean + eps) (include/rms.glsl). The kernel is for what no producer
leaves partial sums of. Shader: rms_norm.comp.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Bound, TensorRef, memory_range
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
