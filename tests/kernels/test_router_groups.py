"""router_topk with selection biases and groups, against its twin; the twin against hand work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.test_router import TUNINGS, check
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.router.cases import RouterCase, random_bias
from vkmoe.kernels.router.operations import RouterShape
from vkmoe.kernels.router.twins import router_topk as twin
from vkmoe.kernels.tuning import Tuning

Floats = NDArray[np.float32]
V3 = RouterShape(256, 8, "sigmoid", scale=2.5, n_groups=8, n_groups_used=4)
BIASED = [
    V3,
    RouterShape(384, 8, "sigmoid", scale=2.8),
    RouterShape(384, 32, "sigmoid", n_groups=8, n_groups_used=2),
    RouterShape(30, 30, renormalise=False, scale=3.0),  # all of them
    RouterShape(77, 1, shared_gate=True),
    RouterShape(12, 5, n_groups=2),
]
UNBIASED = [
    RouterShape(160, 6, renormalise=False, scale=16.0, n_groups=8, n_groups_used=3),
    RouterShape(160, 8, "sigmoid", n_groups=8, n_groups_used=8),
    RouterShape(24, 4, "sigmoid", n_groups=12, n_groups_used=2, shared_gate=True),
    RouterShape(7, 2, "sigmoid", n_groups=7, n_groups_used=3),  # groups of one
    RouterShape(1024, 32, "sigmoid", n_groups=64, n_groups_used=3),
]


def shape_id(shape: RouterShape) -> str:
    return f"{shape.n_used} of {shape.n_experts} in {shape.n_groups}, {shape.gating}"


def random_normal_bias(n_experts: int) -> Floats:
    return np.random.default_rng(n_experts).normal(0, 0.3, n_experts).astype(np.float32)


def tuning_of(shape: RouterShape, turn: int) -> Tuning:
    """They take turns: every shape has two of them."""
    return TUNINGS[((BIASED + UNBIASED).index(shape) + turn) % len(TUNINGS)]


@pytest.mark.parametrize("shape", BIASED, ids=shape_id)
@pytest.mark.sample(3)
def test_biased_choice(runner: Runner, shape: RouterShape) -> None:
    case = RouterCase(tuning_of(shape, 0), shape, bias=random_normal_bias(shape.n_experts))
    check(runner, case, case.random_logits(1))
    with Runner(runner.device) as other:
        tied = RouterCase(tuning_of(shape, 1), shape, 3, bias=random_bias(shape.n_experts))
        check(other, tied, np.round(tied.random_logits(2)))


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("shape", UNBIASED, ids=shape_id)
def test_groups(runner: Runner, shape: RouterShape, turn: int) -> None:
    case = RouterCase(tuning_of(shape, turn), shape)
    equal = np.zeros(shape.n_logits, np.float32)  # the lowest groups, the lowest ids
    check(runner, case, case.random_logits(1), equal, np.round(0.5 * case.random_logits(2)))


@pytest.mark.parametrize("shape", [V3, *UNBIASED[:2]], ids=shape_id)
def test_logits_and_biases_that_are_not_finite(runner: Runner, shape: RouterShape) -> None:
    """Ids stay valid and distinct, weights finite; a bias of NaN is the last to be chosen."""
    bias = random_normal_bias(shape.n_experts)
    for at, bad in enumerate((np.nan, np.inf, -np.inf, 1e30, -1e30)):
        damaged = bias.copy()
        damaged[at::9] = bad
        with Runner(runner.device) as other:
            case = RouterCase(TUNINGS[at % len(TUNINGS)], shape, bias=damaged)
            drawn = [case.random_logits(at) for _ in range(4)]  # the first stays as it is
            drawn[1][3:5] = drawn[2][::2] = drawn[3][:] = bad
            check(other, case, *drawn)


def routing_words(runner: Runner, shape: RouterShape, logits: Floats, bias: Floats | None) -> Any:
    with Runner(runner.device) as other:
        return RouterCase(TUNINGS[0], shape, bias=bias, logits=(logits,)).words(other)[0]


def test_a_bias_that_changes_nothing_leaves_the_weights_bits(runner: Runner) -> None:
    """Weights are made of unbiased scores: a bias for all alike is nowhere in them."""
    for gating, renormalise in (("sigmoid", True), ("sigmoid", False), ("softmax", True)):
        shape = RouterShape(40, 6, gating, renormalise)  # type: ignore[arg-type]
        logits = np.random.default_rng(5).normal(0, 1, 40).astype(np.float32)
        plain = routing_words(runner, shape, logits, None)
        biased = routing_words(runner, shape, logits, np.full(40, 0.25, np.float32))
        np.testing.assert_array_equal(biased, plain)


def test_logits_far_below_the_largest_can_be_chosen_first(runner: Runner) -> None:
    """Weights are relative to the largest chosen logit, which is not the first one's."""
    bias = np.zeros(20, np.float32)
    bias[[3, 7]] = 3.0, 2.0
    for renormalise in (True, False):
        with Runner(runner.device) as other:
            case = RouterCase(TUNINGS[1], RouterShape(20, 4, renormalise=renormalise), bias=bias)
            logits = case.random_logits(4)
            logits[3] = -200.0
            check(other, case, logits)


def test_using_all_groups_is_using_none(runner: Runner) -> None:
    for gating in ("softmax", "sigmoid"):
        shape = RouterShape(48, 7, gating)
        logits = np.random.default_rng(6).normal(0, 1, 48).astype(np.float32)
        grouped = replace(shape, n_groups=6, n_groups_used=6)
        found = routing_words(runner, grouped, logits, None)
        np.testing.assert_array_equal(found, routing_words(runner, shape, logits, None))


def test_the_twin_chooses_groups_as_stated() -> None:
    """Three groups of two, worked out by hand: the best of one, and the best two of another."""
    logits = np.log(np.array([0.9, 0.1, 0.6, 0.5, 0.2, 0.3]) / (1 - np.array(
        [0.9, 0.1, 0.6, 0.5, 0.2, 0.3]))).astype(np.float32)  # fmt: skip
    sums = twin(logits, 2, "sigmoid", groups=(3, 1))
    best = twin(logits, 2, "softmax", groups=(3, 1))
    assert sums.ids.tolist() == [2, 3] and best.ids.tolist() == [0, 1]
    np.testing.assert_allclose(sums.weights, [0.6 / 1.1, 0.5 / 1.1], rtol=1e-6)
    two = twin(logits, 3, "sigmoid", renormalise=False, groups=(3, 2))
    assert two.ids.tolist() == [0, 2, 3]
    np.testing.assert_allclose(two.weights, [0.9, 0.6, 0.5], rtol=1e-6)


def test_the_twin_biases_the_choice_alone() -> None:
    """The bias lifts an expert of score 0.1 over those of 0.6 and 0.5; its weight stays 0.1."""
    scores = np.array([0.1, 0.6, 0.5, 0.2])
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    bias = np.array([0.75, 0.0, 0.25, -1.0], np.float32)
    found = twin(logits, 3, "sigmoid", renormalise=False, scale=2.0, selection_bias=bias)
    assert found.ids.tolist() == [0, 2, 1]
    np.testing.assert_allclose(found.weights, [0.2, 1.0, 1.2], rtol=1e-6)
    negative = twin(logits, 4, "sigmoid", groups=(2, 2), selection_bias=bias - 5)
    assert sorted(negative.ids.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "values",
    [
        {"n_groups": 3, "n_groups_used": 2},  # 3 does not divide 8
        {"n_groups": 2, "n_groups_used": 3},
        {"n_groups": 4, "n_groups_used": 0},
        {"n_groups": 4, "n_groups_used": 1},  # two experts, of which three are to be used
        {"n_groups": 0, "n_groups_used": 0},
    ],
    ids=str,
)
def test_groups_that_cannot_be(values: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        RouterShape(8, 3, **values)  # type: ignore[arg-type]
