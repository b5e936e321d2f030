"""Compares expert_gate_up and expert_down with their twins, at routed addresses or a fixed span.

Of slots that are kept, what is read must also be in their landing places, byte for byte, and the
results must be those of the kernel that does not keep, bit by bit: the driver made two pipelines.
Whatever no kernel may look at is NaN: the gaps between the matrices of a span, the experts that no
slot uses, the routing of a fixed span, and landing places before something is stored there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.facts import Activation
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.operations import (
    ACTIVATIONS,
    BOTH,
    NO_WORD,
    expert_down,
    expert_gate_up,
)
from vkmoe.kernels.experts.spans import DOWN, GATE, UP, PlacedExperts, Use
from vkmoe.kernels.experts.twins import activated, gelu, silu
from vkmoe.kernels.experts.twins import expert_down as down_twin
from vkmoe.kernels.family import (
    MIXED_TYPE,
    Family,
    Setting,
    Setup,
    Trial,
    Used,
    Work,
    trial,
    weights_work,
)
from vkmoe.kernels.inputs import WEIGHT_TYPES, LeftState, NormedInput, multiplied
from vkmoe.kernels.launches import kernel_class
from vkmoe.kernels.matvec.twins import matvec as matvec_twin
from vkmoe.kernels.rows import N_DRAWN, PAIR, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning

Wide = NDArray[np.float64]


class _ExpertCase(RowCase):
    """Checks a kernel of experts; of slots that are kept, also what was stored of them."""

    use: Use
    half: ClassVar[int]  # of the log: where gate and up are noted, or down

    @abstractmethod
    def place(self, runner: Runner, op: OpContext, batch: RowBatch) -> tuple[PlacedExperts, Rowed]:
        """Append the kernel, and return its experts too."""

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        return self.place(runner, op, batch)[1]

    def _rowed(self, runner: Runner, experts: PlacedExperts, rowed: Rowed) -> Rowed:
        """Add the routing and the log to what a kernel reads and leaves."""

        def compare_all(row: int, checks: Checks, words: Sequence[Words]) -> None:
            *found, log = words
            if self.use.kept is not None:
                experts.compare_landing(runner, log, self.half, checks)
                plain = replace(self, use=replace(self.use, kept=None))  # type: ignore[type-var]
                with runner.another() as other:
                    for one, same in zip(found, plain.words(other)[:-1], strict=True):
                        checks.equal("bits of the plain kernel", one, same)
            rowed.compare(row, checks, found)

        inputs = {**rowed.inputs, experts.routing_ref: experts.routing}
        return rowed._replace(
            inputs=inputs,
            compare=compare_all,
            inert={experts.routing_ref: 0},
            others=(experts.log.tensor,),
        )


@dataclass(frozen=True)
class GateUpCase(_ExpertCase):
    """Checks act = f(gate @ x, up @ x); gates and ups of different types take two dispatches.

    The size of x is about `size`: a large one makes gates whose powers overflow in float32.
    """

    tuning: Tuning
    types: tuple[str, str]
    use: Use
    n_rows: int
    n_columns: int
    n_partials: int = 3
    activation: Activation = "silu"
    size: float = 1.0
    half: ClassVar[int] = 0

    def place(self, runner: Runner, op: OpContext, batch: RowBatch) -> tuple[PlacedExperts, Rowed]:
        rng = np.random.default_rng(0)
        types, form = (*self.types, None), (self.n_rows, self.n_columns)
        experts = PlacedExperts(runner, batch, types, self.use, form, rng)
        source = NormedInput(batch, self.n_columns, self.n_partials, rng)
        source.x *= np.float32(self.size)
        act = batch.tensor("act", experts.n_slots * self.n_rows + 1)
        expert_gate_up(op, experts.block, source.x_ref, act, source.norm, self.activation)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            wanted, magnitude = self._twin(experts, source, row)
            found = words[0][:-1].view(np.float32).reshape(wanted.shape)
            checks.close_where_finite("act", found, wanted, magnitude)
            checks.untouched("the word behind act", words[0][-1:])

        return experts, self._rowed(runner, experts, Rowed(source.inputs, (act,), compare))

    def _twin(self, experts: PlacedExperts, source: NormedInput, row: int) -> tuple[Wide, Wide]:
        """Compute the wanted values of a row, and how far each may be off."""
        parts, sizes, scale = [], [], source.scale(row)
        for which, kind in zip((GATE, UP), self.types, strict=True):
            matrix, bias = experts.of_slots(which, row), experts.biases_of_slots(which, row)
            x = multiplied(self.tuning, kind, source.x[row])
            parts.append(matvec_twin(matrix, x, scale, bias))
            sizes.append(matvec_twin(np.abs(matrix), np.abs(x), scale, np.abs(bias)))
        return activated_with_sizes(parts, sizes, self.activation)


def activated_with_sizes(
    parts: Sequence[Wide], sizes: Sequence[Wide], activation: Activation
) -> tuple[Wide, Wide]:
    """Activate gate's and up's sums, and compute how far each value may be off, from their sizes.

    |d silu(g) / dg| <= 1.1 carries what gate's sum is off, |silu(g)| what up's is; gelu's slope is
    at most 1.13. The clamped kind adds 1 to up, and its slopes are no larger.
    """
    shift = 1.0 if activation == "swiglu_oai" else 0.0
    turned = {"silu": silu, "swiglu_oai": lambda gate: gate, "geglu": gelu}[activation](parts[0])
    of_gate = 1.13 * sizes[0] * (np.abs(parts[1]) + shift)
    of_up = np.abs(turned) * (sizes[1] + shift)
    return activated(parts[0], parts[1], activation), of_gate + of_up


@dataclass(frozen=True)
class DownCase(_ExpertCase):
    """Checks hidden += weighted sum over the slots of down @ act; = unless it `adds`."""

    tuning: Tuning
    type: str
    use: Use
    n_rows: int
    n_columns: int
    adds: bool = True
    half: ClassVar[int] = 1

    def place(self, runner: Runner, op: OpContext, batch: RowBatch) -> tuple[PlacedExperts, Rowed]:
        rng, form = np.random.default_rng(0), (self.n_columns, self.n_rows)
        types = (None, None, self.type)
        experts = PlacedExperts(runner, batch, types, self.use, form, rng)
        n_slots, n_there = experts.n_slots, experts.n_slots - self.use.n_absent
        kernel = kernel_class("expert_down", self.type, self.n_rows, n_slots * self.n_columns)
        group = self.tuning.launch(kernel).rows
        left = LeftState(runner, batch, self.n_rows, group, rng, self.adds)
        act = rng.standard_normal((N_DRAWN, n_slots, self.n_columns)).astype(np.float32)
        act[:, n_there:] = np.nan
        act_ref = batch.tensor("act", n_slots * self.n_columns)
        expert_down(op, experts.block, act_ref, left.refs)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            there, before = slice(n_there), left.before[row]
            down, biases = experts.of_slots(DOWN, row)[there], experts.biases_of_slots(DOWN, row)
            x, weights = multiplied(self.tuning, self.type, act[row, there]), experts.weights(row)
            wanted = down_twin(down, x, weights[there], before, left.gain, biases[there])
            terms = np.einsum("src,sc->sr", np.abs(down).astype(np.float64), np.abs(x))
            sizes = np.abs(weights[there]).astype(np.float64) @ (terms + np.abs(biases[there]))
            left.compare(checks, words, wanted, np.abs(before) + sizes)

        rowed = Rowed({act_ref: act, **left.inputs}, left.outputs, compare)
        return experts, self._rowed(runner, experts, rowed)


# ----- what is compared -----


class _Uses(NamedTuple):
    """Lists what the experts' kernels are compared with in all types, and in one."""

    all_types: tuple[Use, ...]
    one_type: tuple[Use, ...]


_PLAIN = _Uses(
    (Use(6, 3), Use(6, 1, routed=False)),
    (Use(6, 3, biased=True), Use(6, 1, routed=False, weight_slot=4)),
)
_OF_ROWS = Use(4, 4, biased=True)
_KEEPING = _Uses(
    (Use(6, 3, kept=(0, 2)),),
    (Use(6, 3, kept=(0, 2), biased=True),),
)


def _gate_up(setting: Setting, uses: _Uses) -> Iterator[Trial]:
    """Compare gate and up; of one type also with up of another type, and other activations."""
    # Gate and up in one dispatch have half the rows each: two at least, so that they can be mixed.
    kind, tuning = setting.axis, replace(setting.tuning, rows=max(4, setting.tuning.rows))
    cases = [GateUpCase(tuning, (kind, kind), use, 5, 512) for use in uses.all_types]
    yield trial(*cases)
    if uses is _PLAIN:
        rows = replace(cases[0], use=_OF_ROWS)
        yield trial(cases[0], RowsCase(rows, PAIR), what="rows of a batch")
    if kind == MIXED_TYPE:
        other = WEIGHT_TYPES[(WEIGHT_TYPES.index(kind) + 1) % len(WEIGHT_TYPES)]
        yield trial(replace(cases[0], types=(kind, other)), what=f"with up {other}")
        oai = replace(cases[0], use=uses.one_type[0], activation="swiglu_oai")
        yield trial(oai, replace(oai, types=(kind, other)), what="as gpt-oss has it")
        geglu = replace(oai, activation="geglu")
        large = replace(geglu, size=1e15)
        yield trial(geglu, replace(geglu, types=(kind, other)), large, what="as Gemma has it")


def _down(setting: Setting, n_columns: int, uses: _Uses) -> Iterator[Trial]:
    """Compare down; of one type also with biases, and as a shared expert with a weight."""
    kind, tuning = setting
    cases = [DownCase(tuning, kind, use, 13, n_columns) for use in uses.all_types]
    yield trial(*cases)
    if uses is _PLAIN:
        rows = RowsCase(replace(cases[0], use=_OF_ROWS), PAIR)
        yield trial(cases[0], rows, what="rows of a batch")
    if kind == MIXED_TYPE:
        yield trial(*(replace(cases[0], use=use) for use in uses.one_type), what="with biases")
        alone = [replace(case, adds=False) for case in cases]
        if uses is _PLAIN:
            some = Use(6, 5, biased=True, n_absent=2)
            yield trial(replace(cases[0], use=some), what="without some slots")
            of_rows = replace(alone[0], use=_OF_ROWS)
            none = replace(alone[0], use=Use(3, 3, n_absent=3))
            yield trial(replace(alone[0], use=some), none, what="without slots or adding")
            yield trial(*alone, RowsCase(of_rows, PAIR), what="without adding")
        else:
            yield trial(*alone, what="without adding")


# ----- what a model uses -----


def _use(used: Used) -> Use:
    """Say how a dispatch uses experts: three slots at most, or its fixed span."""
    numbers, biased = used.numbers, used.numbers["biased"] != 0
    if numbers["span"]:
        word = numbers.get("weight_word", NO_WORD)
        slot = None if word == NO_WORD else 4  # any: it is a push constant
        return Use(1, 1, routed=False, weight_slot=slot, biased=biased)
    n_absent = int(numbers.get("sparse", 0) != 0)
    n_slots = max(min(3, numbers["n_slots"]), 1 + n_absent)
    kept = (0,) if used.variant.family.endswith("_keep") else None
    return Use(n_slots, n_slots, kept=kept, biased=biased, n_absent=n_absent)


def _gate_up_probe(used: Used) -> GateUpCase:
    numbers = used.numbers
    return GateUpCase(
        used.launched("expert_gate_up", 2 if numbers["pass"] == BOTH else 1),
        used.types,
        _use(used),
        used.n_rows,
        used.n_columns,
        numbers["n_partials"],
        ACTIVATIONS[numbers["activation"]],
    )


def _down_probe(used: Used) -> DownCase:
    tuning, adds = used.launched("expert_down"), used.numbers["adds"] != 0
    return DownCase(tuning, used.variant.axis, _use(used), used.n_rows, used.n_columns, adds)


# ----- what is measured -----


def _gate_up_works(setup: Setup) -> Iterator[Work]:
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    for what, use, inner in _uses_of_model(setup):
        case = GateUpCase(
            tuning, (kind, kind), use, inner, shapes.width, activation=shapes.experts.activation
        )
        text = f"{use.n_slots} x 2 x {inner} x {shapes.width}"
        form = use.n_slots * 2 * inner, shapes.width
        yield weights_work(setup, f"{what}gate/up", text, case.run, form)


def _down_works(setup: Setup) -> Iterator[Work]:
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    for what, use, inner in _uses_of_model(setup):
        case = DownCase(tuning, kind, use, shapes.width, inner)
        text = f"{use.n_slots} x {shapes.width} x {inner}"
        form = use.n_slots * shapes.width, inner
        yield weights_work(setup, f"{what}down", text, case.run, form)


def _uses_of_model(setup: Setup) -> Iterator[tuple[str, Use, int]]:
    """Yield name, slots and inner width of what a family gets: experts that are routed, kept or
    shared, and a dense block beside them."""
    experts, n_used = setup.shapes.experts, setup.shapes.experts.n_used
    keeps = setup.variant.family.endswith("_keep")
    kept = tuple(range(n_used)) if keeps else None
    yield "", Use(n_used, n_used, kept=kept, biased=experts.biases), experts.width
    if experts.shared_width and not keeps:
        slot = n_used if experts.shared_gate else None
        yield "shared ", Use(1, 1, routed=False, weight_slot=slot), experts.shared_width
    if experts.beside_width and not keeps:
        yield "beside ", Use(1, 1, routed=False), experts.beside_width


FAMILIES = {
    "expert_gate_up": Family(
        partial(_gate_up, uses=_PLAIN), _gate_up_works, "dot_suffix", _gate_up_probe
    ),
    "expert_down": Family(
        partial(_down, n_columns=512, uses=_PLAIN), _down_works, "dot_suffix", _down_probe
    ),
    "expert_gate_up_keep": Family(
        partial(_gate_up, uses=_KEEPING), _gate_up_works, "dot_suffix", _gate_up_probe
    ),
    "expert_down_keep": Family(
        partial(_down, n_columns=768, uses=_KEEPING), _down_works, "dot_suffix", _down_probe
    ),
}
