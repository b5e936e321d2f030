"""Makes the cases of each kernel family: small shapes for comparison, larger ones for speed.

`FAMILIES` is the table of them. Which variants a device gets is the subject of suite.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import GROUP_BYTES
from vkmoe.gpu.runner import Runner
from vkmoe.ops.attention_shapes import AttentionShape, AttentionSplit, LatentShape, choose_split
from vkmoe.ops.experts import GROUP_BYTES as COPIED_BYTES
from vkmoe.ops.router import RouterShape
from vkmoe.ops.tuning import Tuning
from vkmoe.quants import device_row_bytes
from vkmoe.reference.attention import first_seen
from vkmoe.selftest.attention import (
    AttentionCase,
    LatentCase,
    deepseek2_shape,
    gpt_oss_shape,
    qwen3_shape,
)
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.experts import DownCase, GateUpCase, Use
from vkmoe.selftest.gather import GatherCase
from vkmoe.selftest.inputs import WEIGHT_TYPES
from vkmoe.selftest.link import ReadCase
from vkmoe.selftest.matvec import EmbedCase, HeadsCase, MatvecCase, ResidualCase
from vkmoe.selftest.norms import RmsNormCase
from vkmoe.selftest.router import RouterCase, random_bias
from vkmoe.selftest.vocabulary import CandidatesCase, FinishCase

__all__ = ["FAMILIES", "Family", "Measured", "Setting"]

# Weights read by a measured dispatch: on GPUs more than their caches hold (up to 128 MiB).
CPU_BYTES, GPU_BYTES = 2 << 20, 256 << 20
MIXED_TYPE = "Q4_K"  # the one whose gate goes with an up of another type in every mapping
WIDTH, INNER, N_SLOTS = 2048, 768, 4  # of the measured shapes
ROUTERS = (  # and places for misses: for each to be gathered to, for some to be stored to
    (RouterShape(128, 8), 2),
    (RouterShape(60, 4, renormalise=False, shared_gate=True), 4),
    (RouterShape(257, 7, gating="sigmoid", scale=0.5), 0),
    (RouterShape(160, 6, renormalise=False, scale=16.0, n_groups=8, n_groups_used=3), 0),
    (RouterShape(256, 8, gating="sigmoid", scale=2.5, n_groups=8, n_groups_used=4), 0, True),
    (RouterShape(33, 5), 0, True),
)
POSITIONS, POSITIONS_IN_WINDOWS = (0, 31, 32, 150), (120, 150)


@dataclass(frozen=True)
class Setting:
    """Holds what a variant is run with.

    `axis` is its weight or cache type; `timed` asks for its speed.
    """

    axis: str
    tuning: Tuning
    device: Device
    timed: bool

    def rows_of(self, n_columns: int, n_matrices: int) -> int:
        """Count rows per matrix so that all matrices together have the measured size."""
        n_bytes = CPU_BYTES if self.device.info.is_cpu else GPU_BYTES
        return max(1, n_bytes // n_matrices // device_row_bytes(self.axis, n_columns))


class Measured(NamedTuple):
    """Holds what came of one case: comparisons, SPIR-V modules that ran, GB/s of weights."""

    what: str
    checks: Checks
    variants: set[str]
    gigabytes_per_second: float | None = None


Cases = Callable[[Setting], Iterator[Measured]]
Compare = Callable[[Runner], Checks]


class Family(NamedTuple):
    """Holds the cases of a kernel; `chosen_by` is the tuning's suffix that selects a variant."""

    cases: Cases
    chosen_by: Literal["dot_suffix", "reduce_suffix", "nothing"]


def _compared(setting: Setting, what: str, *compares: Compare) -> Measured:
    """Run a case of several comparisons, each with a runner of its own."""
    checks, variants = Checks(), set[str]()
    for compare in compares:
        # What a wrong kernel leaves may be anything; the comparison must still come to its end.
        with Runner(setting.device) as runner, np.errstate(all="ignore"):
            checks.checks += compare(runner).checks
            variants |= runner.variants
    return Measured(what, checks, variants)


def _timed(
    setting: Setting, measured: Measured, time: Callable[[Runner], float | None]
) -> Measured:
    """Add the speed of the case, if the setting wants one. A wrong result has no speed."""
    if not (setting.timed and measured.checks.worst.ok):
        return measured
    with Runner(setting.device) as runner:
        return measured._replace(gigabytes_per_second=time(runner))


class _Uses(NamedTuple):
    """Lists what the experts' kernels are compared with in all types and in one, and timed with."""

    all_types: tuple[Use, ...]
    one_type: tuple[Use, ...]
    timed: Use


_PLAIN = _Uses(
    (Use(6, 3), Use(6, 1, routed=False)),
    (Use(6, 3, biased=True), Use(6, 1, routed=False, weight_slot=4)),
    Use(N_SLOTS, N_SLOTS),
)
_KEEPING = _Uses(
    (Use(6, 3, kept=(0, 2)),),
    (Use(6, 3, kept=(0, 2), biased=True),),
    Use(N_SLOTS, N_SLOTS, kept=tuple(range(N_SLOTS))),
)


def _matvec(setting: Setting) -> Iterator[Measured]:
    kind, tuning = setting.axis, setting.tuning
    stacked = MatvecCase(tuning, ((kind, 5), (kind, 3), (kind, 7)), 768, n_partials=3, biased=True)
    single = MatvecCase(tuning, ((kind, 1),), 256)
    heads = HeadsCase(tuning, kind, 3, 11, 512, x_offset=8, x_gap=4)
    large = MatvecCase(tuning, ((kind, setting.rows_of(WIDTH, 1)),), WIDTH, 1)
    yield _timed(setting, _compared(setting, "", stacked.run, single.run, heads.run), large.time)


def _matvec_residual(setting: Setting) -> Iterator[Measured]:
    kind, tuning = setting.axis, setting.tuning
    small = ResidualCase(tuning, kind, 13, 512, biased=True)
    large = ResidualCase(tuning, kind, setting.rows_of(WIDTH, 1), WIDTH)
    yield _timed(setting, _compared(setting, "", small.run), large.time)


def _embed(setting: Setting) -> Iterator[Measured]:
    yield _compared(
        setting, "", EmbedCase(setting.tuning, setting.axis, 5, 768, (0, 3, 4, 5, 0xFFFFFFFF)).run
    )


def _gate_up(setting: Setting, uses: _Uses) -> Iterator[Measured]:
    """Compare gate and up; of one type also with up of another type, and as gpt-oss has it."""
    # Gate and up in one dispatch have half the rows each: two at least, so that they can be mixed.
    kind, tuning = setting.axis, replace(setting.tuning, rows=max(4, setting.tuning.rows))
    cases = [GateUpCase(tuning, (kind, kind), use, 5, 512) for use in uses.all_types]
    large = GateUpCase(tuning, (kind, kind), uses.timed, setting.rows_of(WIDTH, 2 * N_SLOTS), WIDTH)
    yield _timed(setting, _compared(setting, "", *(case.run for case in cases)), large.time)
    if kind == MIXED_TYPE:
        other = WEIGHT_TYPES[(WEIGHT_TYPES.index(kind) + 1) % len(WEIGHT_TYPES)]
        mixed = replace(cases[0], types=(kind, other))
        yield _compared(setting, f"with up {other}", mixed.run)
        oai = replace(cases[0], use=uses.one_type[0], activation="swiglu_oai")
        clamped = (oai, replace(oai, types=mixed.types))
        yield _compared(setting, "as gpt-oss has it", *(case.run for case in clamped))


def _down(setting: Setting, n_columns: int, uses: _Uses) -> Iterator[Measured]:
    """Compare down; of one type also with biases, and as a shared expert with a weight."""
    kind, tuning = setting.axis, setting.tuning
    cases = [DownCase(tuning, kind, use, 13, n_columns) for use in uses.all_types]
    large = DownCase(tuning, kind, uses.timed, setting.rows_of(INNER, N_SLOTS), INNER)
    yield _timed(setting, _compared(setting, "", *(case.run for case in cases)), large.time)
    if kind == MIXED_TYPE:
        others = [replace(cases[0], use=use) for use in uses.one_type]
        yield _compared(setting, "with biases", *(case.run for case in others))


def _split(setting: Setting, shape: AttentionShape | LatentShape) -> AttentionSplit:
    """Choose three splits, in the setting's variant."""
    split = choose_split(shape, setting.tuning, n_splits=3)
    return replace(split, subgroup=setting.tuning.subgroup)


def _attention(setting: Setting) -> Iterator[Measured]:
    """Compare where everything is seen; then with a window and sinks, nothing written outside."""
    kv_type = setting.axis or "F32"

    def compare(runner: Runner, shape: AttentionShape, positions: Sequence[int]) -> Checks:
        unseen = first_seen(positions[0], shape.window)
        split = _split(setting, shape)
        return AttentionCase(runner, shape, split, positions[-1], n_unseen=unseen).run(positions)

    yield _compared(
        setting,
        "",
        partial(compare, shape=qwen3_shape(kv_type=kv_type), positions=POSITIONS),
        partial(compare, shape=gpt_oss_shape(kv_type=kv_type), positions=POSITIONS_IN_WINDOWS),
    )


def _latent_attention(setting: Setting) -> Iterator[Measured]:
    shape = deepseek2_shape(kv_type=setting.axis)

    def compare(runner: Runner) -> Checks:
        return LatentCase(runner, shape, _split(setting, shape), POSITIONS[-1]).run(POSITIONS)

    yield _compared(setting, "", compare)


def _router_topk(setting: Setting) -> Iterator[Measured]:
    def compare(shape: RouterShape, n_landing: int, biased: bool = False) -> Compare:
        def run(runner: Runner) -> Checks:
            gather = n_landing == shape.n_used
            bias = random_bias(shape.n_experts) if biased else None
            case = RouterCase(runner, setting.tuning, shape, n_landing, gather, bias)
            checks = Checks()
            case.run(case.random_logits(1), checks)
            case.run(case.random_logits(2).round(), checks)  # ties
            return checks

        return run

    yield _compared(setting, "", *(compare(*router) for router in ROUTERS))


def _rms_norm(setting: Setting) -> Iterator[Measured]:
    yield _compared(setting, "", RmsNormCase(setting.tuning, 1531, x_offset=5).run)


def _gather(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        checks = Checks()
        GatherCase(runner, 2 * COPIED_BYTES + 16 * 67, 5, (0, 3)).run(checks)
        return checks

    def time(runner: Runner) -> float | None:
        n_bytes = CPU_BYTES if setting.device.info.is_cpu else GPU_BYTES // 4
        return GatherCase(runner, n_bytes // N_SLOTS, N_SLOTS, tuple(range(N_SLOTS))).time()

    yield _timed(setting, _compared(setting, "", compare), time)


def _candidates(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        case, checks = CandidatesCase(runner, setting.tuning, 5003), Checks()
        case.run(case.random_logits(), checks)
        case.run((case.random_logits() * 0.5).round(), checks)  # ties
        return checks

    yield _compared(setting, "", compare)


def _finish(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        case, checks = FinishCase(runner), Checks()
        case.run(0xFFFFFFFF, checks)
        return checks

    yield _compared(setting, "", compare)


def _read_words(setting: Setting) -> Iterator[Measured]:
    def compare(runner: Runner) -> Checks:
        checks = Checks()
        ReadCase(runner, 5).run(checks)
        return checks

    def time(runner: Runner) -> float | None:
        n_bytes = CPU_BYTES if setting.device.info.is_cpu else GPU_BYTES
        return ReadCase(runner, n_bytes // GROUP_BYTES).time()

    yield _timed(setting, _compared(setting, "", compare), time)


FAMILIES = {
    "matvec": Family(_matvec, "dot_suffix"),
    "matvec_residual": Family(_matvec_residual, "dot_suffix"),
    "expert_gate_up": Family(partial(_gate_up, uses=_PLAIN), "dot_suffix"),
    "expert_down": Family(partial(_down, n_columns=512, uses=_PLAIN), "dot_suffix"),
    "expert_gate_up_keep": Family(partial(_gate_up, uses=_KEEPING), "dot_suffix"),
    "expert_down_keep": Family(partial(_down, n_columns=768, uses=_KEEPING), "dot_suffix"),
    "embed": Family(_embed, "nothing"),
    "rms_norm": Family(_rms_norm, "reduce_suffix"),
    "attention": Family(_attention, "reduce_suffix"),
    "latent_attention": Family(_latent_attention, "reduce_suffix"),
    "attention_combine": Family(_attention, "nothing"),
    "router_topk": Family(_router_topk, "reduce_suffix"),
    "candidates_partial": Family(_candidates, "nothing"),
    "candidates_merge": Family(_candidates, "nothing"),
    "finish": Family(_finish, "nothing"),
    "gather": Family(_gather, "nothing"),
    "read_words": Family(_read_words, "nothing"),
}
