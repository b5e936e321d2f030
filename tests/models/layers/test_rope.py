"""The rotary table against an implementation that goes element by element, in plain Python."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from vkmoe.facts import RopeSpec
from vkmoe.models.layers.rope import rope_table

N_POSITIONS = 300


LONG = RopeSpec(
    8,
    scaling="longrope",
    attention_factor=1.25,
    factors=(1.0, 1.1, 1.2, 1.3),
    long_factors=(1.0, 2.0, 4.0, 64.0),
)


def turns_per_position(rope: RopeSpec, pair: int) -> float:
    """How many radians pair `pair` advances from one position to the next.

    yarn (Peng et al. 2023, section 3.2): pairs that make more than beta_fast turns over the
    original context stay, those with fewer than beta_slow are slowed by the factor, a linear ramp
    over the pair's index in between, whose ends are rounded outwards (not by gpt-oss). longrope:
    this table is longer than the original context where that is shorter.
    """
    plain: float = rope.base ** (-2 * pair / rope.dim)
    factors = rope.factors
    if rope.scaling == "longrope" and rope.original_context < N_POSITIONS:
        factors = rope.long_factors
    if factors:
        plain /= factors[pair]
    if rope.scaling in ("none", "longrope"):
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor

    def index_of(n_turns: float) -> float:
        # base^(-2i/dim) * original_context = 2 pi n_turns, solved for i.
        wanted = 2 * math.pi * n_turns / rope.original_context
        return -rope.dim / 2 * math.log(wanted, rope.base)

    begin, end = index_of(rope.beta_fast), index_of(rope.beta_slow)
    first = max(0, math.floor(begin) if rope.truncate else begin)
    last = min(rope.dim - 1, math.ceil(end) if rope.truncate else end)
    if pair <= first:
        slowed = 0.0
    elif pair >= last:
        slowed = 1.0
    else:
        slowed = (pair - first) / (last - first)
    return plain / rope.factor * slowed + plain * (1 - slowed)


def magnitude(rope: RopeSpec) -> float:
    """yarn's temperature, folded into sines and cosines (section 3.4); longrope's is given."""
    if rope.scaling not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0


def spelled_out(rope: RopeSpec, position: int, pair: int) -> tuple[float, float]:
    angle = position * turns_per_position(rope, pair)
    return math.cos(angle) * magnitude(rope), math.sin(angle) * magnitude(rope)


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(64),
        RopeSpec(128, base=1e6),
        RopeSpec(32, base=10.0),
        RopeSpec(2),
        RopeSpec(64, scaling="linear", factor=4.0),
        RopeSpec(64, scaling="linear", factor=0.5),
        RopeSpec(64, scaling="yarn", factor=4.0, original_context=4096),
        RopeSpec(128, base=1e6, scaling="yarn", factor=4.0, original_context=32768),
        RopeSpec(32, scaling="yarn", factor=4.0, original_context=32),
        RopeSpec(64, scaling="yarn", factor=1.0, original_context=64),
        RopeSpec(64, scaling="yarn", factor=8.0, original_context=512, attention_factor=1.5),
        RopeSpec(
            96, 5e5, scaling="yarn", factor=16.0, original_context=8192, beta_fast=8, beta_slow=2
        ),
        RopeSpec(64, 1.5e5, scaling="yarn", factor=32.0, original_context=4096, truncate=False),
        RopeSpec(8, factors=(1.0, 2.0, 8.0, 0.5)),
        RopeSpec(8, scaling="linear", factor=2.0, factors=(1.0, 3.0, 8.0, 0.5)),
        replace(LONG, original_context=N_POSITIONS - 1),
        replace(LONG, original_context=N_POSITIONS),
    ],
    ids=str,
)
def test_every_entry(rope: RopeSpec) -> None:
    table = rope_table(rope, N_POSITIONS)
    assert table.shape == (N_POSITIONS, rope.dim // 2, 2) and table.dtype == np.float32
    wanted = [
        [spelled_out(rope, position, pair) for pair in range(rope.dim // 2)]
        for position in range(N_POSITIONS)
    ]
    np.testing.assert_allclose(table, np.array(wanted), rtol=0, atol=2e-7)


def test_positions_far_out_are_exact() -> None:
    """Angles are products in float64: a million positions lose nothing a float32 could hold."""
    rope = RopeSpec(4)
    table = rope_table(rope, 1_000_001)
    for pair in (0, 1):
        wanted = spelled_out(rope, 1_000_000, pair)
        np.testing.assert_allclose(table[-1, pair], wanted, rtol=0, atol=1e-6)


def test_angles_go_by_the_longest_text_there_may_be_and_not_by_the_table() -> None:
    """So that a table which grows with the text keeps its entries."""
    long = replace(LONG, original_context=N_POSITIONS - 1)
    whole, first = (rope_table(long, n, N_POSITIONS) for n in (N_POSITIONS, N_POSITIONS // 2))
    np.testing.assert_array_equal(first, whole[: N_POSITIONS // 2])
    assert not np.array_equal(first, rope_table(long, N_POSITIONS // 2))


Scaling = Literal["none", "linear", "yarn"]


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
def test_the_first_position_does_not_turn(scaling: Scaling) -> None:
    rope = RopeSpec(32, scaling=scaling, factor=2.0, original_context=64, attention_factor=1.0)
    np.testing.assert_array_equal(rope_table(rope, 1), [[[1.0, 0.0]] * 16])


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    """Known ends of the ramp, for a context of 4096 and base 10000 (dim 64): pairs 10 and 23."""
    yarn = RopeSpec(64, scaling="yarn", factor=8.0, original_context=4096, attention_factor=1.0)
    slow, fast = rope_table(yarn, 2)[1], rope_table(RopeSpec(64), 2)[1]
    angle, plain = np.arctan2(slow[:, 1], slow[:, 0]), np.arctan2(fast[:, 1], fast[:, 0])
    ratio = angle / plain
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[23:], 1 / 8, rtol=1e-3)
    assert (np.diff(ratio[10:24]) < 0).all()


def test_a_long_table_holds_no_second_one() -> None:
    """Computing the 32 MiB of 65536 positions takes a few MiB more, not float64 copies of all."""
    tracemalloc.start()
    try:
        table = rope_table(RopeSpec(128, base=1e6), 65536)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.nbytes == 32 << 20
    assert peak_bytes < table.nbytes + (16 << 20)


def test_gpt_oss_does_not_round_the_ramp() -> None:
    """Angles of a position that transformers 5 computes for the published configuration."""
    rope = RopeSpec(64, 1.5e5, scaling="yarn", factor=32.0, original_context=4096, truncate=False)
    table = rope_table(rope, 2)
    scale = 1.3465735902799727
    np.testing.assert_allclose(table[0, :, 0], scale, rtol=1e-6)
    wanted = {0: 1.0, 8: 5.081327259540558e-2, 9: 3.1705696135759354e-2, 12: 6.794959306716919e-3,
              16: 4.564839182421565e-4, 17: 1.2931869423482567e-4, 18: 3.830881178146228e-5,
              31: 3.023511396804679e-7}  # fmt: skip
    for pair, angle in wanted.items():
        assert math.atan2(table[1, pair, 1], table[1, pair, 0]) == pytest.approx(angle, rel=1e-6)
    rounded = rope_table(replace(rope, truncate=True), 2)
    assert not np.allclose(table[1, 9:17], rounded[1, 9:17], rtol=0, atol=1e-5)
