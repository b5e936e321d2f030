"""rms_norm against its twin: a part of a tensor, the rest of which is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.norms import rms_norm
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.rms_norm import rms_norm as twin
from vkmoe.selftest.comparison import Checks

__all__ = ["RmsNormCase"]


@dataclass(frozen=True)
class RmsNormCase:
    """`width` values from word `x_offset` on, of size `size`, normalised with `eps`."""

    tuning: Tuning
    width: int
    x_offset: int = 0
    size: float = 1.0
    eps: float = 1e-6

    def run(self, runner: Runner) -> Checks:
        rng = np.random.default_rng(self.width)
        x = np.full(self.x_offset + self.width + 3, np.nan, np.float32)
        part = x[self.x_offset : self.x_offset + self.width]
        part[:] = self.size * rng.standard_normal(self.width)
        gain = rng.uniform(-2.0, 2.0, self.width).astype(np.float32)
        x_ref, y_ref = TensorRef("x", x.size), TensorRef("y", self.width + 2)
        program = Program("rms_norm")
        rms_norm(
            program,
            self.tuning,
            x_ref,
            y_ref,
            self.width,
            runner.place(gain),
            self.eps,
            "norm",
            x_offset=self.x_offset,
        )
        (words,) = runner.run(program, {x_ref: x}, y_ref)
        wanted, checks = twin(part, gain, self.eps), Checks()
        checks.close("y", words[: self.width].view(np.float32), wanted, np.abs(wanted))
        checks.equal("the words behind y", words[self.width :], np.full(2, SENTINEL, np.uint32))
        return checks
