"""RMSNorm of a part of a tensor: for what no producer leaves partial sums of.

Shader: rms_norm.comp. Twin: vkmoe/reference/rms_norm.py. Norms of hidden are fused: see norms.py.
"""

from __future__ import annotations

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.ops.tuning import Tuning

__all__ = ["rms_norm"]

RMS_NORM = kernel(
    "rms_norm", "r:x w:y", "address:gain u32:x_offset u32:width f32:eps", "workgroup_size"
)


def rms_norm(
    program: Program,
    tuning: Tuning,
    x: TensorRef,
    y: TensorRef,
    width: int,
    gain: int,
    eps: float,
    label: str,
    *,
    x_offset: int = 0,
) -> None:
    """y[:width] = v / sqrt(mean(v^2) + eps) * gain, v being `width` words of x from `x_offset` on.

    `gain` is the address of f32 [width].
    """
    program.append(
        RMS_NORM.dispatch(
            f"rms_norm{tuning.reduce_suffix}",
            {"workgroup_size": tuning.workgroup_size},
            {"x": x, "y": y},
            {"gain": gain, "x_offset": x_offset, "width": width, "eps": eps},
            (1, 1, 1),
            label,
            ranges={"x": x.words(x_offset, width), "y": y.words(0, width)},
            memory_reads=(memory_range(gain, 4 * width),),
        )
    )
