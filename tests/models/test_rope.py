"""The rotary table against an implementation that goes element by element, in plain Python."""

from __future__ import annotations

import math
import tracemalloc
from typing import Literal

import numpy as np
import pytest

from vkmoe.facts import RopeSpec
from vkmoe.models.rope import rope_table

N_POSITIONS = 300


def turns_per_position(rope: RopeSpec, pair: int) -> float:
    """How many radians pair `pair` advances from one position to the next.

    yarn (Peng et al. 2023, section 3.2): pairs that make more than beta_fast turns over the
    original context stay, those with fewer than beta_slow are slowed by the factor, a linear ramp
    over the pair's index in between, whose ends are rounded outwards.
    """
    plain: float = rope.base ** (-2 * pair / rope.dim)
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor

    def index_of(n_turns: float) -> float:
        # base^(-2i/dim) * original_context = 2 pi n_turns, solved for i.
        wanted = 2 * math.pi * n_turns / rope.original_context
        return -rope.dim / 2 * math.log(wanted, rope.base)

    first = max(0, math.floor(index_of(rope.beta_fast)))
    last = min(rope.dim - 1, math.ceil(index_of(rope.beta_slow)))
    if pair <= first:
        slowed = 0.0
    elif pair >= last:
        slowed = 1.0
    else:
        slowed = (pair - first) / (last - first)
    return plain / rope.factor * slowed + plain * (1 - slowed)


def magnitude(rope: RopeSpec) -> float:
    """yarn's temperature, folded into sines and cosines (section 3.4)."""
    if rope.scaling != "yarn":
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
