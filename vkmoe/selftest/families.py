"""Declares the cases of each kernel family: small shapes for comparison, larger ones for speed.

`FAMILIES` is the table of them. Which variants a device gets is the subject of suite.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, get_args

from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import GROUP_BYTES
from vkmoe.gpu.runner import Runner
from vkmoe.kv_types import KV_NUMBERS, KvTypes, both
from vkmoe.ops.attention_shapes import AttentionShape, LatentShape, choose_split
from vkmoe.ops.experts import GROUP_BYTES as COPIED_BYTES
from vkmoe.ops.launches import ColumnClass, KernelClass, Launch, MatvecFamily, RowClass
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
from vkmoe.selftest.comparison import Checks, KernelCase
from vkmoe.selftest.experts import DownCase, GateUpCase, Use
from vkmoe.selftest.handover import FindCase, JoinCase
from vkmoe.selftest.inputs import WEIGHT_TYPES
from vkmoe.selftest.logits import CandidatesCase, FinishCase, PickCase, RouterCase, random_bias
from vkmoe.selftest.matmul import Batch, ExpertMatmulCase, HeadsMatmulCase, MatmulCase
from vkmoe.selftest.matvec import EmbedCase, HeadsCase, MatvecCase, ResidualCase, RmsNormCase
from vkmoe.selftest.memory import GatherCase, ReadCase
from vkmoe.selftest.prompt_attention import prompts
from vkmoe.selftest.prompt_experts import BringCase, CombineCase, RowsInUse, TilesCase
from vkmoe.selftest.rows import (
    Batch as RowBatch,
)
from vkmoe.selftest.rows import (
    CandidateRows,
    DownRows,
    EmbedRows,
    FindRows,
    GateUpRows,
    JoinRows,
    MatvecRows,
    NormRows,
    ResidualRows,
    RouterRows,
    RowsCase,
)

__all__ = ["FAMILIES", "MIXED_TYPE", "Family", "Setting", "Trial", "forms_of", "launched"]

# Weights read by a measured dispatch: on GPUs more than their caches hold (up to 128 MiB).
CPU_BYTES, GPU_BYTES = 2 << 20, 256 << 20
MIXED_TYPE = "Q4_K"  # the one whose gate goes with an up of another type in every mapping
WIDTH, INNER, N_SLOTS = 2048, 768, 4  # of the measured shapes
ALL_SLOTS = tuple(range(N_SLOTS))
ROUTERS = (  # and places for misses: for each to be gathered to, for some to be stored to
    (RouterShape(128, 8), 2),
    (RouterShape(60, 4, renormalise=False, shared_gate=True), 4),
    (RouterShape(257, 7, gating="sigmoid", scale=0.5), 0),
    (RouterShape(160, 6, renormalise=False, scale=16.0, n_groups=8, n_groups_used=3), 0),
)
BIASED_ROUTERS = (
    RouterShape(256, 8, gating="sigmoid", scale=2.5, n_groups=8, n_groups_used=4),
    RouterShape(33, 5),
)
PAIR = (RowBatch((3, 0), 2),)  # of rows, in another order than they are drawn
POSITIONS, POSITIONS_IN_WINDOWS = (0, 31, 32, 150), (120, 150)
PROMPT_ROWS = 40
CACHES = (*map(both, KV_NUMBERS), KvTypes("q8_0", "f16"))


class Setting(NamedTuple):
    """Holds what a variant is run with; `axis` is its weight type."""

    axis: str
    tuning: Tuning
    info: DeviceInfo

    @property
    def measured_bytes(self) -> int:
        return CPU_BYTES if self.info.is_cpu else GPU_BYTES

    def rows_of(self, n_columns: int, n_matrices: int) -> int:
        """Count rows per matrix so that all matrices together have the measured size."""
        row_bytes = device_row_bytes(self.axis, n_columns, self.info.layout)
        return max(1, self.measured_bytes // n_matrices // row_bytes)


def forms_of(family: MatvecFamily, kind: str) -> Iterator[KernelClass]:
    """List the classes of a kernel that reads weights of a type: one for each form of matrix."""
    for rows, columns in product(get_args(RowClass), get_args(ColumnClass)):
        yield KernelClass(family, kind, rows, columns)


def launched(tuning: Tuning, kernel: KernelClass, launch: Launch) -> Tuning:
    """Return the tuning that launches a kernel in this way, whatever the form of its matrix."""
    forms = forms_of(kernel.family, kernel.type)
    return replace(tuning, launches=tuple((form, launch) for form in forms))


class Trial(NamedTuple):
    """Names comparisons that give one result, each with a runner of its own, and what is timed."""

    what: str
    compares: Sequence[Callable[[Runner], Checks]]
    timed: KernelCase | None = None


class Family(NamedTuple):
    """Holds the trials of a kernel; `chosen_by` is the tuning's suffix that selects a variant."""

    trials: Callable[[Setting], Iterator[Trial]]
    chosen_by: Literal["dot_suffix", "tile_suffix", "reduce_suffix", "walk_suffix", "nothing"]


_BATCH = Batch(tuple(range(11)), n_spare=2)  # in groups of 8 and 4 columns
_TIMED_ROWS = tuple(range(32))


def _trial(*cases: KernelCase | RowsCase, what: str = "", timed: KernelCase | None = None) -> Trial:
    return Trial(what, [case.run for case in cases], timed)


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
    Use(N_SLOTS, N_SLOTS, kept=ALL_SLOTS),
)


def _matvec(setting: Setting) -> Iterator[Trial]:
    kind, tuning, _ = setting
    yield _trial(
        MatvecCase(tuning, ((kind, 5), (kind, 3), (kind, 7)), 768, n_partials=3, biased=True),
        MatvecCase(replace(tuning, rows=1), ((kind, 1),), 256),
        HeadsCase(tuning, kind, 3, 11, 512, x_offset=8, x_gap=4),
        RowsCase(MatvecRows(tuning, ((kind, 6),)), PAIR),
        timed=MatvecCase(tuning, ((kind, setting.rows_of(WIDTH, 1)),), WIDTH, 1),
    )


def _matvec_residual(setting: Setting) -> Iterator[Trial]:
    kind, tuning, _ = setting
    large = ResidualCase(tuning, kind, setting.rows_of(WIDTH, 1), WIDTH)
    rows = RowsCase(ResidualRows(tuning, kind), PAIR)
    yield _trial(ResidualCase(tuning, kind, 13, 512, biased=True), rows, timed=large)


def _matmul(setting: Setting) -> Iterator[Trial]:
    """Compare with as many rows as take two groups of columns, not all of the program's."""
    kind, tuning, _ = setting
    segments = ((kind, 37), (kind, 5))
    case = MatmulCase(tuning, segments, 768, _BATCH, biased=True, gap=4, offset=8)
    large = MatmulCase(tuning, ((kind, setting.rows_of(WIDTH, 1)),), WIDTH, Batch(_TIMED_ROWS))
    yield _trial(case, HeadsMatmulCase(tuning, kind, 2, 11, 256, _BATCH), timed=large)


def _matmul_residual(setting: Setting) -> Iterator[Trial]:
    case = MatmulCase(setting.tuning, ((setting.axis, 37),), 512, _BATCH, residual=True)
    yield _trial(replace(case, biased=True))


def _expert_gate_up_tiles(setting: Setting) -> Iterator[Trial]:
    """Compare routed experts and a fixed one; of one type also as gpt-oss has it."""
    kind, tuning, _ = setting
    case = ExpertMatmulCase(tuning, (kind, kind), 21, 512, _BATCH, 6, 3)
    yield _trial(case, replace(case, n_experts=1, n_used=0))
    if kind == MIXED_TYPE:
        other = WEIGHT_TYPES[(WEIGHT_TYPES.index(kind) + 1) % len(WEIGHT_TYPES)]
        oai = replace(case, biased=True, activation="swiglu_oai")
        yield _trial(oai, replace(oai, types=(kind, other)), what="as gpt-oss has it")


def _expert_down_tiles(setting: Setting) -> Iterator[Trial]:
    """Compare routed experts without biases and with them, and a fixed one that has some."""
    case = ExpertMatmulCase(setting.tuning, (setting.axis,), 37, 512, _BATCH, 6, 3)
    biased = replace(case, biased=True)
    yield _trial(case, biased, replace(biased, n_experts=1, n_used=0))


def _embed(setting: Setting) -> Iterator[Trial]:
    case = EmbedCase(setting.tuning, setting.axis, 5, 768, (0, 3, 4, 5, 0xFFFFFFFF))
    yield _trial(case, RowsCase(EmbedRows(setting.tuning, setting.axis), PAIR))


def _gate_up(setting: Setting, uses: _Uses) -> Iterator[Trial]:
    """Compare gate and up; of one type also with up of another type, and as gpt-oss has it."""
    # Gate and up in one dispatch have half the rows each: two at least, so that they can be mixed.
    kind, tuning = setting.axis, replace(setting.tuning, rows=max(4, setting.tuning.rows))
    cases = [GateUpCase(tuning, (kind, kind), use, 5, 512) for use in uses.all_types]
    large = GateUpCase(tuning, (kind, kind), uses.timed, setting.rows_of(WIDTH, 2 * N_SLOTS), WIDTH)
    yield _trial(*cases, timed=large)
    if uses is _PLAIN:
        rows = GateUpRows(tuning, (kind, kind))
        yield _trial(cases[0], RowsCase(rows, PAIR), what="rows of a batch")
    if kind == MIXED_TYPE:
        other = WEIGHT_TYPES[(WEIGHT_TYPES.index(kind) + 1) % len(WEIGHT_TYPES)]
        yield _trial(replace(cases[0], types=(kind, other)), what=f"with up {other}")
        oai = replace(cases[0], use=uses.one_type[0], activation="swiglu_oai")
        yield _trial(oai, replace(oai, types=(kind, other)), what="as gpt-oss has it")


def _down(setting: Setting, n_columns: int, uses: _Uses) -> Iterator[Trial]:
    """Compare down; of one type also with biases, and as a shared expert with a weight."""
    kind, tuning, _ = setting
    cases = [DownCase(tuning, kind, use, 13, n_columns) for use in uses.all_types]
    large = DownCase(tuning, kind, uses.timed, setting.rows_of(INNER, N_SLOTS), INNER)
    yield _trial(*cases, timed=large)
    if uses is _PLAIN:
        yield _trial(cases[0], RowsCase(DownRows(tuning, kind), PAIR), what="rows of a batch")
    if kind == MIXED_TYPE:
        yield _trial(*(replace(cases[0], use=use) for use in uses.one_type), what="with biases")
        if uses is _PLAIN:
            some = Use(6, 5, biased=True, n_absent=2)
            yield _trial(replace(cases[0], use=some), what="without some slots")


def _attention(setting: Setting) -> Iterator[Trial]:
    """Compare where everything is seen; then with a window and sinks, nothing written outside."""
    for kv_types in CACHES:
        full, windowed = qwen3_shape(kv_types=kv_types), gpt_oss_shape(kv_types=kv_types)
        compare = partial(_attended, setting)
        yield Trial(
            str(kv_types),
            [partial(compare, full, POSITIONS), partial(compare, windowed, POSITIONS_IN_WINDOWS)],
        )


def _combine(setting: Setting) -> Iterator[Trial]:
    yield next(_attention(setting))


def _latent_attention(setting: Setting) -> Iterator[Trial]:
    for kv_type in KV_NUMBERS:
        shape = deepseek2_shape(kv_type=kv_type)
        yield Trial(kv_type, [partial(_attended, setting, shape, POSITIONS)])


def _prompts(setting: Setting) -> Iterator[Trial]:
    """Compare chunks of two prompts; then with a window and sinks."""
    for kv_types in CACHES:
        shapes = qwen3_shape(kv_types=kv_types), gpt_oss_shape(kv_types=kv_types)
        yield Trial(str(kv_types), [partial(_chunks, setting, shape) for shape in shapes])


def _latent_prompts(setting: Setting) -> Iterator[Trial]:
    for kv_type in KV_NUMBERS:
        shape = deepseek2_shape(kv_type=kv_type)
        yield Trial(f"{kv_type} of latent rows", [partial(_chunks, setting, shape)])


def _prompt_attention(setting: Setting) -> Iterator[Trial]:
    yield from _prompts(setting)
    yield from _latent_prompts(setting)


def _chunks(setting: Setting, shape: AttentionShape | LatentShape, runner: Runner) -> Checks:
    """Compare a prompt in chunks, with rows of another beside it."""
    case, checks = prompts(runner, shape, setting.tuning, PROMPT_ROWS), Checks()
    for chunk in (range(PROMPT_ROWS), range(PROMPT_ROWS, 2 * PROMPT_ROWS)):
        case.step(case.draw(chunk), checks)
    case.step(case.draw([2 * PROMPT_ROWS, 0, 1, 2], [0, 1, 1, 1]), checks)
    return checks


def _attended(
    setting: Setting, shape: AttentionShape | LatentShape, positions: Sequence[int], runner: Runner
) -> Checks:
    """Compare in three splits, in the setting's variant."""
    split = choose_split(shape, setting.tuning, n_splits=3)
    split = replace(split, subgroup=setting.tuning.subgroup)
    if isinstance(shape, LatentShape):
        return LatentCase(runner, shape, split, positions[-1]).run(positions)
    unseen = first_seen(positions[0], shape.window)
    return AttentionCase(runner, shape, split, positions[-1], n_unseen=unseen).run(positions)


def _router_topk(setting: Setting) -> Iterator[Trial]:
    yield _trial(
        *(
            RouterCase(setting.tuning, shape, n_landing, gather=n_landing == shape.n_used)
            for shape, n_landing in ROUTERS
        ),
        *(
            RouterCase(setting.tuning, shape, bias=random_bias(shape.n_experts))
            for shape in BIASED_ROUTERS
        ),
        RowsCase(RouterRows(setting.tuning, ROUTERS[1][0])),
    )


def _rms_norm(setting: Setting) -> Iterator[Trial]:
    yield _trial(RmsNormCase(setting.tuning, 1531, x_offset=5), RowsCase(NormRows(setting.tuning)))


def _gather(setting: Setting) -> Iterator[Trial]:
    n_bytes = CPU_BYTES if setting.info.is_cpu else GPU_BYTES // 4
    large = GatherCase(n_bytes // N_SLOTS, N_SLOTS, ALL_SLOTS)
    yield _trial(GatherCase(2 * COPIED_BYTES + 16 * 67, 5, (0, 3)), timed=large)


def _candidates(setting: Setting) -> Iterator[Trial]:
    yield _trial(CandidatesCase(setting.tuning, 5003), RowsCase(CandidateRows(setting.tuning)))


def _expert_tiles(setting: Setting) -> Iterator[Trial]:
    rows = RowsInUse(RouterShape(60, 4), 77, 71)
    cases = [TilesCase(setting.tuning, rows, columns=8, clears=clears) for clears in (False, True)]
    cases.append(TilesCase(setting.tuning, rows, columns=8, picks=True))
    if setting.info.layout == "planes":  # a CPU reads experts where they are
        cases += [replace(case, brings=True) for case in (cases[0], cases[-1])]
        cases.append(replace(cases[0], brings=True, ahead=True))
    yield _trial(*cases)


def _bring_experts(setting: Setting) -> Iterator[Trial]:
    n_bytes, tuning = CPU_BYTES if setting.info.is_cpu else GPU_BYTES // 4, setting.tuning
    large = BringCase(tuning, n_bytes // N_SLOTS, N_SLOTS, N_SLOTS)
    small = [BringCase(tuning, 2 * COPIED_BYTES + 16 * 67, 8, 3, index, 1) for index in (1, 2)]
    yield _trial(*small, timed=large)


def _combine_rows(setting: Setting) -> Iterator[Trial]:
    gated, tuning = RouterShape(60, 4, shared_gate=True), setting.tuning
    few = RowsInUse(gated, 5, 3)
    cases = [CombineCase(tuning, few, 300, use) for use in (None, False, True)]
    cases.append(CombineCase(tuning, few, 300, True, partial=True))
    cases += [CombineCase(tuning, few, 300, True, partial, picks=True) for partial in (False, True)]
    large = RowsInUse(RouterShape(128, 8), 64, 64)
    yield _trial(*cases, timed=CombineCase(tuning, large, WIDTH))


def _pick_rows(setting: Setting) -> Iterator[Trial]:
    sizes = ((17, 516), (17, 516, 3), (2, 4))
    yield _trial(*(PickCase(setting.tuning, *size) for size in sizes))


def _find_experts(setting: Setting) -> Iterator[Trial]:
    cases = (FindCase(setting.tuning, shape) for shape, _ in ROUTERS)
    yield _trial(*cases, *(RowsCase(FindRows(setting.tuning, shape), PAIR) for shape, _ in ROUTERS))


def _join_rows(setting: Setting) -> Iterator[Trial]:
    tuning = setting.tuning
    rows = RowsCase(JoinRows(tuning), PAIR)
    yield _trial(JoinCase(tuning, 4), JoinCase(tuning, 1028), JoinCase(tuning, 516, False), rows)


def _finish(setting: Setting) -> Iterator[Trial]:
    yield _trial(FinishCase((0xFFFFFFFF,)))


def _read_words(setting: Setting) -> Iterator[Trial]:
    yield _trial(ReadCase(5), timed=ReadCase(setting.measured_bytes // GROUP_BYTES))


FAMILIES = {
    "matvec": Family(_matvec, "dot_suffix"),
    "matvec_residual": Family(_matvec_residual, "dot_suffix"),
    "expert_gate_up": Family(partial(_gate_up, uses=_PLAIN), "dot_suffix"),
    "expert_down": Family(partial(_down, n_columns=512, uses=_PLAIN), "dot_suffix"),
    "expert_gate_up_keep": Family(partial(_gate_up, uses=_KEEPING), "dot_suffix"),
    "expert_down_keep": Family(partial(_down, n_columns=768, uses=_KEEPING), "dot_suffix"),
    "matmul": Family(_matmul, "tile_suffix"),
    "matmul_residual": Family(_matmul_residual, "tile_suffix"),
    "expert_matmul_gate_up": Family(_expert_gate_up_tiles, "tile_suffix"),
    "expert_matmul_down": Family(_expert_down_tiles, "tile_suffix"),
    "embed": Family(_embed, "nothing"),
    "rms_norm": Family(_rms_norm, "reduce_suffix"),
    "attention": Family(_attention, "reduce_suffix"),
    "latent_attention": Family(_latent_attention, "reduce_suffix"),
    "attention_combine": Family(_combine, "nothing"),
    "append_rows": Family(_prompts, "walk_suffix"),
    "append_latent_rows": Family(_latent_prompts, "walk_suffix"),
    "prompt_attention": Family(_prompt_attention, "walk_suffix"),
    "router_topk": Family(_router_topk, "reduce_suffix"),
    "candidates_partial": Family(_candidates, "nothing"),
    "candidates_merge": Family(_candidates, "nothing"),
    "expert_tiles": Family(_expert_tiles, "nothing"),
    "bring_experts": Family(_bring_experts, "nothing"),
    "combine_rows": Family(_combine_rows, "nothing"),
    "pick_rows": Family(_pick_rows, "nothing"),
    "find_experts": Family(_find_experts, "nothing"),
    "join_rows": Family(_join_rows, "nothing"),
    "finish": Family(_finish, "nothing"),
    "gather": Family(_gather, "nothing"),
    "read_words": Family(_read_words, "nothing"),
}
