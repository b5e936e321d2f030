"""The cases of the kernels with dot products: matrices, embedding rows, experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from vkmoe.selftest.embed import EmbedCase
from vkmoe.selftest.experts import DownCase, GateUpCase
from vkmoe.selftest.heads import HeadsCase
from vkmoe.selftest.matvec import MatvecCase, ResidualCase
from vkmoe.selftest.setting import Measured, Setting, compared, timed
from vkmoe.selftest.spans import Use
from vkmoe.selftest.weights import WEIGHT_TYPES

__all__ = [
    "KEEPING",
    "N_SLOTS",
    "PLAIN",
    "Uses",
    "down_cases",
    "embed_cases",
    "gate_up_cases",
    "matvec_cases",
    "matvec_residual_cases",
]

MIXED_TYPE = "Q4_K"  # the one whose gate goes with an up of another type in every mapping
WIDTH, INNER, N_SLOTS = 2048, 768, 4  # of the measured shapes


class Uses(NamedTuple):
    """What the experts' kernels are compared with in all types and in one, and timed with."""

    all_types: tuple[Use, ...]
    one_type: tuple[Use, ...]
    timed: Use


PLAIN = Uses(
    (Use(6, 3), Use(6, 1, routed=False)),
    (Use(6, 3, biased=True), Use(6, 1, routed=False, weight_slot=4)),
    Use(N_SLOTS, N_SLOTS),
)
KEEPING = Uses(
    (Use(6, 3, kept=(0, 2)),),
    (Use(6, 3, kept=(0, 2), biased=True),),
    Use(N_SLOTS, N_SLOTS, kept=tuple(range(N_SLOTS))),
)


def matvec_cases(setting: Setting) -> Iterator[Measured]:
    kind, tuning = setting.axis, setting.tuning
    stacked = MatvecCase(tuning, ((kind, 5), (kind, 3), (kind, 7)), 768, n_partials=3, biased=True)
    single = MatvecCase(tuning, ((kind, 1),), 256)
    heads = HeadsCase(tuning, kind, 3, 11, 512, x_offset=8, x_gap=4)
    large = MatvecCase(tuning, ((kind, setting.rows_of(WIDTH, 1)),), WIDTH, 1)
    yield timed(setting, compared(setting, "", stacked.run, single.run, heads.run), large.time)


def matvec_residual_cases(setting: Setting) -> Iterator[Measured]:
    kind, tuning = setting.axis, setting.tuning
    small = ResidualCase(tuning, kind, 13, 512, biased=True)
    large = ResidualCase(tuning, kind, setting.rows_of(WIDTH, 1), WIDTH)
    yield timed(setting, compared(setting, "", small.run), large.time)


def embed_cases(setting: Setting) -> Iterator[Measured]:
    yield compared(
        setting, "", EmbedCase(setting.tuning, setting.axis, 5, 768, (0, 3, 4, 5, 0xFFFFFFFF)).run
    )


def gate_up_cases(setting: Setting, uses: Uses) -> Iterator[Measured]:
    """One type is also compared with up of another type, and as gpt-oss has it."""
    # Gate and up in one dispatch have half the rows each: two at least, so that they can be mixed.
    kind, tuning = setting.axis, replace(setting.tuning, rows=max(4, setting.tuning.rows))
    cases = [GateUpCase(tuning, (kind, kind), use, 5, 512) for use in uses.all_types]
    large = GateUpCase(tuning, (kind, kind), uses.timed, setting.rows_of(WIDTH, 2 * N_SLOTS), WIDTH)
    yield timed(setting, compared(setting, "", *(case.run for case in cases)), large.time)
    if kind == MIXED_TYPE:
        other = WEIGHT_TYPES[(WEIGHT_TYPES.index(kind) + 1) % len(WEIGHT_TYPES)]
        mixed = replace(cases[0], types=(kind, other))
        yield compared(setting, f"with up {other}", mixed.run)
        oai = replace(cases[0], use=uses.one_type[0], activation="swiglu_oai")
        clamped = (oai, replace(oai, types=mixed.types))
        yield compared(setting, "as gpt-oss has it", *(case.run for case in clamped))


def down_cases(setting: Setting, n_columns: int, uses: Uses) -> Iterator[Measured]:
    """One type is also compared with biases, and as a shared expert with a weight."""
    kind, tuning = setting.axis, setting.tuning
    cases = [DownCase(tuning, kind, use, 13, n_columns) for use in uses.all_types]
    large = DownCase(tuning, kind, uses.timed, setting.rows_of(INNER, N_SLOTS), INNER)
    yield timed(setting, compared(setting, "", *(case.run for case in cases)), large.time)
    if kind == MIXED_TYPE:
        others = [replace(cases[0], use=use) for use in uses.one_type]
        yield compared(setting, "with biases", *(case.run for case in others))
