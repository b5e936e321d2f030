"""Compares rms_norm with its twin; makes inputs and outputs of kernels that take part in a norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.context import OpContext
from vkmoe.ops.norms import NormInput, NormOutput, rms_norm
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.matvec import HiddenState
from vkmoe.reference.rms_norm import rms_norm as twin
from vkmoe.selftest.comparison import Checks

__all__ = ["LeftState", "NormedInput", "RmsNormCase"]


@dataclass(frozen=True)
class RmsNormCase:
    """Checks `width` values from word `x_offset` on, of size `size`, normalised with `eps`."""

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
            OpContext(program, self.tuning, "norm"),
            x_ref,
            y_ref,
            self.width,
            runner.place(gain),
            self.eps,
            x_offset=self.x_offset,
        )
        (words,) = runner.run(program, {x_ref: x}, y_ref)
        wanted, checks = twin(part, gain, self.eps), Checks()
        checks.close("y", words[: self.width].view(np.float32), wanted, np.abs(wanted))
        checks.equal("the words behind y", words[self.width :], np.full(2, SENTINEL, np.uint32))
        return checks


class NormedInput:
    """Draws activations x [width]; with partials the RMSNorm of some other vector scales them.

    Its mean square is about 20 * width, so that products with weights of size 1 come out below 1,
    where SiLU bends; eps is large enough to be missed if it were forgotten.
    """

    def __init__(self, width: int, n_partials: int, rng: np.random.Generator) -> None:
        self.x = rng.standard_normal(width).astype(np.float32)
        total = 16.0 * width * width
        self.partials = (rng.uniform(0.5, 2.0, n_partials) * total / max(1, n_partials)).astype(
            np.float32
        )
        self.x_ref = TensorRef("x", width)
        self.partials_ref = TensorRef("norm_partials", n_partials + 1)
        self.norm = NormInput(self.partials_ref, n_partials, width, 5.0 * width)

    @property
    def scale(self) -> float:
        """Compute the factor that the kernel multiplies its sums by."""
        if not self.partials.size:
            return 1.0
        mean = float(np.sum(self.partials.astype(np.float64))) / self.x.size
        return float(1.0 / np.sqrt(mean + self.norm.eps))

    @property
    def inputs(self) -> dict[TensorRef, NDArray[np.generic]]:
        return {self.x_ref: self.x, self.partials_ref: self.partials}


class LeftState:
    """Holds the outputs of a producer of hidden, and compares them with a twin's."""

    def __init__(
        self,
        runner: Runner,
        width: int,
        n_groups: int,
        rng: np.random.Generator,
    ) -> None:
        self.width, self.n_groups = width, n_groups
        self.before = rng.standard_normal(width).astype(np.float32)
        self.gain = rng.uniform(0.5, 1.5, width).astype(np.float32)
        self.refs = NormOutput(
            TensorRef("hidden", width + 1),
            TensorRef("gained", width + 1),
            TensorRef("partials", n_groups + 1),
            runner.place(self.gain),
        )

    @property
    def outputs(self) -> tuple[TensorRef, TensorRef, TensorRef]:
        return self.refs.hidden, self.refs.gained, self.refs.partials

    def compare(
        self,
        checks: Checks,
        words: Sequence[NDArray[np.uint32]],
        wanted: HiddenState,
        magnitude: NDArray[np.float64],
        group_width: int,
    ) -> None:
        """Compare with the twin's; `magnitude` [width] is the sum of |terms| of each hidden value.

        Values that are not finite in the twin are left out, and so are sums they take part in.
        """
        for name, found in zip(("hidden", "gained", "partials"), words, strict=True):
            checks.equal(f"the word behind {name}", found[-1:], np.array([SENTINEL], np.uint32))
        hidden, gained, partials = (found[:-1].view(np.float32) for found in words)
        sound = np.isfinite(wanted.hidden)
        checks.n_left_out = int(np.count_nonzero(~sound))
        checks.close("hidden", hidden[sound], wanted.hidden[sound], magnitude[sound])
        checks.close(
            "gained", gained[sound], wanted.gained[sound], (magnitude * np.abs(self.gain))[sound]
        )
        starts = np.arange(0, self.width, group_width)
        squares = np.add.reduceat(wanted.hidden**2, starts)
        bounds = np.add.reduceat(2 * np.abs(wanted.hidden) * magnitude + wanted.hidden**2, starts)
        whole = np.isfinite(squares)
        checks.close("partial sums", partials[whole], squares[whole], bounds[whole])
