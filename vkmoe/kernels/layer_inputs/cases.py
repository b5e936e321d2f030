"""Compares gate_inputs with its twin, which is that of experts' gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.twins import activated
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.layer_inputs.operations import gate_inputs
from vkmoe.kernels.rows import N_DRAWN, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning


@dataclass(frozen=True)
class GateInputsCase(RowCase):
    """Checks `width` gates of many sizes, for inputs that begin at word `offset` of longer rows."""

    tuning: Tuning
    width: int
    offset: int = 5

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng, end = np.random.default_rng(self.width), self.offset + self.width
        shape = N_DRAWN, self.width
        sizes = 10 ** rng.uniform(-4, 1.5, shape)
        gates = (sizes * rng.standard_normal(shape)).astype(np.float32)
        inputs = np.full((N_DRAWN, end + 3), np.nan, np.float32)
        inputs[:, self.offset : end] = rng.standard_normal(shape)
        refs = batch.tensor("gates", self.width + 2), batch.tensor("inputs", end + 3)
        gate_inputs(op, *refs, self.offset, self.width)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            gate, factor = (
                values.astype(np.float64) for values in (gates[row], inputs[row, self.offset : end])
            )
            wanted, found = activated(gate, factor, "geglu"), words[0][: self.width]
            # Far below zero gelu is a small difference of two terms.
            checks.close("gates", found.view(np.float32), wanted, np.abs(gate * factor))
            checks.untouched("the words behind", words[0][self.width :])

        return Rowed({refs[0]: gates, refs[1]: inputs}, (refs[0],), compare)


def _gate_inputs(setting: Setting) -> Iterator[Trial]:
    case = GateInputsCase(setting.tuning, 96)
    yield trial(case, GateInputsCase(setting.tuning, 777, 0), RowsCase(case))


def _gate_inputs_works(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    yield Work(f"{width} gated inputs", 12 * width, GateInputsCase(setup.tuning, width).run)


def _gate_inputs_probe(used: Used) -> GateInputsCase:
    return GateInputsCase(used.tuning, used.numbers["width"])


FAMILIES = {"gate_inputs": Family(_gate_inputs, _gate_inputs_works, probe=_gate_inputs_probe)}
