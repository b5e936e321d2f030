"""Experts with biases, the activations of gpt-oss and Gemma, and shared experts with a weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.tunings import MAPPINGS, tuning_for
from vkmoe.facts import Activation
from vkmoe.gpu.program import TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.experts.cases import DownCase, GateUpCase
from vkmoe.kernels.experts.operations import (
    ExpertBlock,
    ExpertShape,
    SpanBiases,
    SpanMatrix,
    kept_bytes,
)
from vkmoe.kernels.experts.spans import Use
from vkmoe.kernels.experts.twins import activated
from vkmoe.kernels.experts.twins import expert_down as down_twin
from vkmoe.kernels.rows import PAIR, RowsCase
from vkmoe.kernels.tuning import Tuning

CPU_TUNING, GPU_TUNING = tuning_for(MAPPINGS[-1], 8, 4), tuning_for("", 32, 4)
both_mappings = pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])
USES = {
    "routed": Use(9, 4, biased=True),
    "fixed": Use(2, 1, routed=False, biased=True),
    "kept": Use(4, 4, kept=(2, 0, 3), biased=True),
}
every_use = pytest.mark.parametrize("use", USES.values(), ids=USES.keys())


@both_mappings
@every_use
@pytest.mark.sample(2)
def test_gate_and_up_with_biases(runner: Runner, use: Use, tuning: Tuning) -> None:
    """In one dispatch and in two, with either activation; a kept slot keeps its biases too."""
    activation: Activation = "silu" if use.routed and use.kept is None else "swiglu_oai"
    case = GateUpCase(tuning, ("MXFP4", "MXFP4"), use, 11, 64, activation=activation)
    for each in (case, replace(case, types=("F16", "MXFP4"))):
        with Runner(runner.device) as other:
            each.run(other).verify()


@both_mappings
@pytest.mark.parametrize("size", [1.0, 30.0, 1e15])
@pytest.mark.sample(3)
def test_geglu(runner: Runner, size: float, tuning: Tuning) -> None:
    """Of gates where it bends, of some beyond its ends, and of some whose powers overflow."""
    case = GateUpCase(tuning, ("F16", "F16"), Use(6, 3), 21, 64, activation="geglu", size=size)
    rows = RowsCase(replace(case, use=Use(4, 4)), PAIR)
    for each in (case, replace(case, types=("F32", "F16")), rows):
        with Runner(runner.device) as other:
            each.run(other).verify()


@both_mappings
@every_use
def test_down_with_biases(runner: Runner, use: Use, tuning: Tuning) -> None:
    DownCase(tuning, "MXFP4", use, 13, 96).run(runner).verify()


@both_mappings
def test_a_shared_expert_takes_its_weight_from_the_routing(runner: Runner, tuning: Tuning) -> None:
    """All other words of the routing are NaN. Its slot is the one behind the used ones."""
    for slot in (1, 32):
        use = Use(3, 1, routed=False, weight_slot=slot)
        with Runner(runner.device) as other:
            DownCase(tuning, "Q8_0", use, 9, 256).run(other).verify()


def test_routed_experts_have_no_weight_from_elsewhere() -> None:
    matrix, words = SpanMatrix("F32", 0, 4, 32, 128), TensorRef("words", 600)
    shape = ExpertShape(matrix, matrix, matrix, 512)
    with pytest.raises(AssertionError, match="fixed span"):
        ExpertBlock(shape, words, 2, weight_rank=2)


def test_biases_are_part_of_what_is_kept() -> None:
    """One float a row; the gaps between them belong to nobody."""
    gate = SpanMatrix("Q4_K", 0, 2, 256, 144)
    up, down = replace(gate, offset=512), SpanMatrix("Q4_K", 1024, 3, 256, 144)
    biases = SpanBiases(1536, 1552, 1568)
    plain = kept_bytes(ExpertShape(gate, up, down, 1600))
    kept = kept_bytes(ExpertShape(gate, up, down, 1600, biases))
    assert np.flatnonzero(kept & ~plain).tolist() == [
        *range(1536, 1544), *range(1552, 1560), *range(1568, 1580)
    ]  # fmt: skip
    assert not (plain & ~kept).any()


def test_the_clamped_activation_by_hand() -> None:
    """gate * sigmoid(1.702 * gate) * (up + 1); gate is cut above at 7, up on both sides."""
    gate = np.array([0.0, 1.0, 7.0, 100.0, -100.0, 1.0, 1.0])
    up = np.array([5.0, -1.0, 0.0, 0.0, 3.0, 100.0, -100.0])
    one = 1.0 / (1.0 + np.exp(-1.702))
    seven = 7.0 / (1.0 + np.exp(-7 * 1.702))
    wanted = [0.0, 0.0, seven, seven, 0.0, 8.0 * one, -6.0 * one]
    np.testing.assert_allclose(activated(gate, up, "swiglu_oai"), wanted, atol=1e-12)
    silu = activated(gate, up)
    np.testing.assert_allclose(silu[3], 0.0)
    np.testing.assert_allclose(silu[5], 100.0 / (1.0 + np.exp(-1.0)))


def test_geglu_by_hand() -> None:
    """Against tanh itself and known values of gelu: odd around x / 2, its least about -0.17."""
    gate = np.array([0.0, 1.0, -1.0, 0.5, 1e9, -1e9])
    found = activated(gate, np.full(6, 2.0), "geglu") / 2.0
    np.testing.assert_allclose(found, [0.0, 0.841192, -0.158808, 0.345714, 1e9, 0.0], atol=1e-6)
    least = activated(np.linspace(-2, 0, 2001), np.ones(2001), "geglu").min()
    assert least == pytest.approx(-0.170041, abs=1e-6)


def test_the_twin_weighs_biases_like_products() -> None:
    down = np.array([[[2.0]], [[3.0]]])
    left = down_twin(down, np.array([[5.0], [7.0]]), np.array([0.5, -1.0]), np.array([1.0]),
                     np.array([2.0]), np.array([[10.0], [20.0]]))  # fmt: skip
    np.testing.assert_allclose(left.hidden, [1 + 0.5 * 20 - 41])
    np.testing.assert_allclose(left.gained, [-60.0])
