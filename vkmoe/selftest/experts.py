"""expert_gate_up and expert_down against their twins, through routed addresses or a fixed span.

Of slots that are kept, what is read must also be in their landing places, byte for byte, and the
results must be those of the kernel that does not keep, bit by bit: the driver made two pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.experts import Activation, expert_down, expert_gate_up
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.experts import expert_down as down_twin
from vkmoe.reference.experts import expert_gate_up as gate_up_twin
from vkmoe.reference.experts import silu
from vkmoe.reference.matvec import matvec as matvec_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.normed import LeftState, NormedInput
from vkmoe.selftest.spans import Experts, Use

__all__ = ["DownCase", "GateUpCase"]

Wide = NDArray[np.float64]
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class GateUpCase:
    """act = f(gate @ x, up @ x); gates and ups of different types take two dispatches."""

    tuning: Tuning
    types: tuple[str, str]
    use: Use
    n_rows: int
    n_columns: int
    n_partials: int = 3
    seed: int = 0
    activation: Activation = "silu"

    def run(self, runner: Runner) -> Checks:
        """Compare; values that damaged weights decide are left out."""
        experts, source, words, log = self._run(runner)
        checks = Checks()
        if experts.landing:
            experts.compare_landing(runner, log, 0, checks)
            _compare_plain(self, runner, (words,), checks)
        wanted, magnitude = self._twin(experts, source)
        act_found = words[:-1].view(np.float32).reshape(wanted.shape)
        sound = np.isfinite(wanted)
        checks.n_left_out = int(np.count_nonzero(~sound))
        checks.close("act", act_found[sound], wanted[sound], magnitude[sound])
        checks.equal("the word behind act", words[-1:], np.array([SENTINEL], np.uint32))
        return checks

    def words(self, runner: Runner) -> tuple[Experts, tuple[Words, ...]]:
        """The bits of act, nothing compared."""
        experts, _, words, _ = self._run(runner)
        return experts, (words,)

    def _run(self, runner: Runner) -> tuple[Experts, NormedInput, Words, Words]:
        program, experts, source, act = self._make(runner)
        inputs = {**source.inputs, experts.routing_ref: experts.routing}
        words, log = runner.run(program, inputs, act, experts.log_ref)
        return experts, source, words, log

    def time(self, runner: Runner) -> float | None:
        """GB of weights per second on the device."""
        program, experts, source, _ = self._make(runner)
        runner.run(program, {**source.inputs, experts.routing_ref: experts.routing})
        runtime = runner.nanoseconds(program)
        n_bytes = experts.n_slots * (experts.shape.gate.n_bytes + experts.shape.up.n_bytes)
        return n_bytes / runtime if runtime else None

    def _make(self, runner: Runner) -> tuple[Program, Experts, NormedInput, TensorRef]:
        rng = np.random.default_rng(self.seed)
        types = (*self.types, None)
        experts = Experts(runner, types, self.use, self.n_rows, self.n_columns, rng)
        source = NormedInput(self.n_columns, self.n_partials, rng)
        act = TensorRef("act", experts.n_slots * self.n_rows + 1)
        program = Program("expert_gate_up")
        expert_gate_up(
            program,
            self.tuning,
            experts.shape,
            source.x_ref,
            experts.routing_ref,
            act,
            experts.n_slots,
            source.norm,
            experts.homes,
            "gate/up",
            experts.span,
            experts.landing,
            self.activation,
        )
        return program, experts, source, act

    def _twin(self, experts: Experts, source: NormedInput) -> tuple[Wide, Wide]:
        """The wanted values, and how far each may be off.

        |d silu(g) / dg| <= 1.1 carries what gate's sum is off, |silu(g)| what up's is. The clamped
        kind adds 1 to up, and its slopes are no larger.
        """
        gate, up, scale = experts.of_slots(0), experts.of_slots(1), source.scale
        biases = experts.biases_of_slots(0), experts.biases_of_slots(1)
        parts, sizes = [], []
        for matrix, bias in zip((gate, up), biases, strict=True):
            added = np.zeros(1) if bias is None else bias.astype(np.float64)
            parts.append(matvec_twin(matrix, source.x, scale) + added)
            sizes.append(matvec_twin(np.abs(matrix), np.abs(source.x), scale) + np.abs(added))
        shift = 0.0 if self.activation == "silu" else 1.0
        of_gate = 1.1 * sizes[0] * (np.abs(parts[1]) + shift)
        of_up = (np.abs(parts[0]) if shift else np.abs(silu(parts[0]))) * (sizes[1] + shift)
        wanted = gate_up_twin(gate, up, source.x, scale, biases, self.activation)
        return wanted, of_gate + of_up


@dataclass(frozen=True)
class DownCase:
    """hidden += weighted sum over the slots of down @ act."""

    tuning: Tuning
    type: str
    use: Use
    n_rows: int
    n_columns: int
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        experts, left, act, (*words, log) = self._run(runner)
        down = experts.of_slots(2)
        biases = experts.biases_of_slots(2)
        wanted = down_twin(down, act, experts.weights, left.before, left.gain, biases)
        terms = np.einsum("src,sc->sr", np.abs(down).astype(np.float64), np.abs(act))
        if biases is not None:
            terms += np.abs(biases)
        magnitude = np.abs(left.before) + np.abs(experts.weights).astype(np.float64) @ terms
        checks = Checks()
        if experts.landing:
            experts.compare_landing(runner, log, 1, checks)
            _compare_plain(self, runner, words, checks)
        left.compare(checks, words, wanted, magnitude, self.tuning.rows)
        return checks

    def words(self, runner: Runner) -> tuple[Experts, tuple[Words, ...]]:
        """The bits of hidden, gained and the partial sums, nothing compared."""
        experts, _, _, words = self._run(runner)
        return experts, words[:-1]

    def _run(
        self, runner: Runner
    ) -> tuple[Experts, LeftState, NDArray[np.float32], tuple[Words, ...]]:
        program, experts, left, act, act_ref = self._make(runner)
        inputs = {act_ref: act, experts.routing_ref: experts.routing}
        inputs |= {left.refs.hidden: left.before}
        words = runner.run(program, inputs, *left.outputs, experts.log_ref)
        return experts, left, act, words

    def time(self, runner: Runner) -> float | None:
        """GB of weights per second on the device."""
        program, experts, _, act, act_ref = self._make(runner)
        runner.run(program, {act_ref: act, experts.routing_ref: experts.routing})
        runtime = runner.nanoseconds(program)
        return experts.n_slots * experts.shape.down.n_bytes / runtime if runtime else None

    def _make(
        self,
        runner: Runner,
    ) -> tuple[Program, Experts, LeftState, NDArray[np.float32], TensorRef]:
        rng = np.random.default_rng(self.seed)
        types = (None, None, self.type)
        experts = Experts(runner, types, self.use, self.n_columns, self.n_rows, rng)
        left = LeftState(runner, self.n_rows, -(-self.n_rows // self.tuning.rows), rng)
        act = rng.standard_normal((experts.n_slots, self.n_columns)).astype(np.float32)
        act_ref = TensorRef("act", act.size)
        program = Program("expert_down")
        expert_down(
            program,
            self.tuning,
            experts.shape,
            act_ref,
            experts.routing_ref,
            experts.n_slots,
            left.refs,
            experts.homes,
            "down",
            experts.span,
            experts.landing,
            weight_slot=self.use.weight_slot,
        )
        return program, experts, left, act, act_ref


def _compare_plain(
    case: GateUpCase | DownCase, runner: Runner, words: Sequence[Words], checks: Checks
) -> None:
    """What a kernel that keeps left, with what the plain one leaves of the same experts."""
    plain = replace(case, use=replace(case.use, kept=None))
    with Runner(runner.device) as other:
        _, wanted = plain.words(other)
    for found, same in zip(words, wanted, strict=True):
        checks.equal("bits of the plain kernel", found, same)
