"""The RMSNorm fused into kernels: what a producer of hidden leaves, and its consumer takes.

A producer leaves hidden, hidden * gain and partial sums of hidden^2; a consumer multiplies its dot
products by 1 / sqrt(mean + eps) (include/rms.glsl). Owns no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.program import TensorRef

__all__ = ["NormInput", "NormOutput"]


@dataclass(frozen=True)
class NormInput:
    """The fused RMSNorm of an input: its producer left `n_partials` partial sums of h^2."""

    partials: TensorRef
    n_partials: int
    width: int
    eps: float


@dataclass(frozen=True)
class NormOutput:
    """What a producer of hidden leaves for the next norm. `gain` is f32 [width] by address."""

    hidden: TensorRef
    gained: TensorRef
    partials: TensorRef
    gain: int

    def n_partials(self, n_workgroups: int) -> int:
        assert n_workgroups <= self.partials.n_words, (n_workgroups, self.partials)
        return n_workgroups
