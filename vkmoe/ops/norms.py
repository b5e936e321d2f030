"""This module has RMSNorm: what is exchanged where kernels fuse it, and the kernel where none does.

Fused, a producer leaves hidden, hidden * gain and partial sums of hidden^2; a consumer multiplies
its dot products by 1 / sqrt(mean + eps) (include/rms.glsl). The kernel is for what no producer
leaves partial sums of. Shader: rms_norm.comp. Twin: vkmoe/reference/matvec.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import TensorRef, memory_range
from vkmoe.ops.context import OpContext

__all__ = ["NormInput", "NormOutput", "rms_norm"]


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
        return {"n_partials": self.n_partials, "inverse_width": 1.0 / self.width, "eps": self.eps}


@dataclass(frozen=True)
class NormOutput:
    """Holds what a producer of hidden leaves the next norm. `gain` is f32 [width] by address."""

    hidden: TensorRef
    gained: TensorRef
    partials: TensorRef
    gain: int

    @property
    def tensors(self) -> dict[str, TensorRef]:
        """Return the tensors that producers write, as their kernels name them."""
        return {"hidden": self.hidden, "gained": self.gained, "partials": self.partials}

    def n_partials(self, n_workgroups: int) -> int:
        assert n_workgroups <= self.partials.n_words, (n_workgroups, self.partials)
        return n_workgroups


RMS_NORM = kernel(
    "rms_norm", "r:x w:y", "address:gain u32:x_offset u32:width f32:eps", "workgroup_size"
)


def rms_norm(
    op: OpContext,
    x: TensorRef,
    y: TensorRef,
    width: int,
    gain: int,
    eps: float,
    *,
    x_offset: int = 0,
) -> None:
    """Append y[:width] = v / sqrt(mean(v^2) + eps) * gain, where v is x[x_offset:][:width].

    `gain` is the address of f32 [width].
    """
    op.append(
        RMS_NORM.dispatch(
            f"rms_norm{op.tuning.reduce_suffix}",
            {**vars(op.tuning), "gain": gain, "x_offset": x_offset, "width": width, "eps": eps},
            {"x": x.part(x_offset, width), "y": y.part(0, width)},
            (1, 1, 1),
            op.label,
            reads=(memory_range(gain, 4 * width),),
        )
    )
