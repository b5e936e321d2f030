"""router_topk against its twin: ids and addresses exactly, weights within rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.gpu.runner import Runner
from vkmoe.kernels.router.cases import RouterCase, random_scales
from vkmoe.kernels.router.operations import RouterShape, RoutingLog
from vkmoe.kernels.router.twins import look_up
from vkmoe.kernels.router.twins import router_topk as router_twin
from vkmoe.kernels.tuning import Tuning

TUNINGS = [
    Tuning("blocks", 8, 8, False),
    Tuning("blocks", 16, 8, True),
    Tuning("lanes", 64, 4, False),
    Tuning("lanes", 64, 4, True),
]
SHAPES = [
    RouterShape(128, 8),
    RouterShape(60, 4, renormalise=False, shared_gate=True),
    RouterShape(5, 5, scale=2.5),
    RouterShape(257, 7, gating="sigmoid", scale=0.5),
    RouterShape(1024, 32, gating="sigmoid", renormalise=False),
    RouterShape(1, 1),
]


def check(runner: Runner, case: RouterCase, *logits: NDArray[np.float32]) -> None:
    replace(case, logits=logits).run(runner).verify()


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sample(10)
def test_random_logits(runner: Runner, tuning: Tuning, shape: RouterShape) -> None:
    """Some of them with ties."""
    RouterCase(tuning, shape).run(runner).verify()


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sample(6)
def test_scales_of_experts(runner: Runner, tuning: Tuning, shape: RouterShape) -> None:
    """Some logits with ties; neither the choice nor a shared expert's weight has the scales."""
    case = RouterCase(tuning, shape, output_scales=random_scales(shape.n_experts))
    case.run(runner).verify()
    with Runner(runner.device) as other, Runner(runner.device) as third:
        words = case.words(other)[0]
        plain = replace(case, output_scales=None).words(third)[0]
    n = shape.n_used
    np.testing.assert_array_equal(words[:n], plain[:n])
    np.testing.assert_array_equal(words[6 * n :], plain[6 * n :])


def test_scales_of_one_change_no_bit(runner: Runner) -> None:
    case = RouterCase(TUNINGS[0], SHAPES[1])
    ones = replace(case, output_scales=np.ones(SHAPES[1].n_experts, np.float32))
    with Runner(runner.device) as other:
        wanted = case.words(other)[0]
    found, n = ones.words(runner)[0], SHAPES[1].n_used
    np.testing.assert_array_equal(found[: 2 * n], wanted[: 2 * n])


@pytest.mark.parametrize("gather", [False, True], ids=["read", "gather"])
@pytest.mark.parametrize("n_landing", [1, 2, 8, 32])
def test_misses_get_landing_places_in_slot_order(
    runner: Runner, n_landing: int, gather: bool
) -> None:
    """Fewer places than misses, as many, more; one place is null."""
    shape = RouterShape(40, 32) if n_landing == 32 else RouterShape(40, 8, shared_gate=True)
    tuning = TUNINGS[n_landing % len(TUNINGS)]
    case = RouterCase(tuning, shape, n_landing, gather)
    check(runner, case, *(case.random_logits(seed) for seed in range(3)))


def test_the_views_of_a_log_name_every_word_once() -> None:
    log = RoutingLog(n_layers=3, n_used=4, n_tokens=2)
    words = np.arange(log.tensor.n_words, dtype=np.uint32)
    ids, filled = log.views(words)
    assert ids.shape == (2, 3, 4) and filled.shape == (2, 3, 4, 2)
    found = np.concatenate([ids.reshape(-1), filled.reshape(-1)])
    assert sorted(found.tolist()) == words[4:].tolist()
    for layer in range(3):
        assert [4 * ids[0, layer, 0], 4 * ids[1, layer, 3] + 4] == [*log.ids(layer)[1:]]
        ends = filled[0, layer, 0, 0], filled[1, layer, 3, 1]
        assert [4 * ends[0], 4 * ends[1] + 4] == [*log.filled(layer)[1:]]


def test_the_twin_looks_up_as_stated() -> None:
    """Two of four at home, one place free: worked out by hand."""
    entries = np.array([0x500, 0x1001, 0x600, 0x2001], np.uint64)
    free, none = np.array([0x9000], np.uint64), np.zeros(0, np.uint64)
    for landing in (none, np.zeros(4, np.uint64)):
        for gather in (False, True):
            found = look_up(entries, landing, gather)
            assert found.addresses.tolist() == [0x500, 0x1000, 0x600, 0x2000]
            assert found.partners.tolist() == [0, 0, 0, 0]
    read, gathered = look_up(entries, free), look_up(entries, free, gather=True)
    assert read.addresses.tolist() == [0x500, 0x1000, 0x600, 0x2000]
    assert read.partners.tolist() == [0, 0x9000, 0, 0]
    assert gathered.addresses.tolist() == [0x500, 0x9000, 0x600, 0x2000]
    assert gathered.partners.tolist() == [0, 0x1000, 0, 0]


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_awkward_logits(runner: Runner, gating: str, renormalise: bool) -> None:
    """NaN and infinities never make an invalid or doubled id, nor a weight that is not finite."""
    shape = RouterShape(
        40, 6, "sigmoid" if gating == "sigmoid" else "softmax", renormalise, shared_gate=True
    )
    case = RouterCase(TUNINGS[0], shape)
    base = case.random_logits(3)
    damaged = [np.where(np.arange(41) % 2, np.float32(np.nan), np.float32(np.inf))]
    for bad in (np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30):
        for where in (slice(0, 1), slice(2, 38), slice(None)):
            logits = base.copy()
            logits[where] = bad
            damaged.append(logits)
    check(runner, case, *damaged)


def test_the_twin_scales_weights_at_last() -> None:
    """They need not add up to the scale of all then: worked out by hand."""
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    scales = np.array([8.0, 0.5, -2.0], np.float32)
    found = router_twin(logits, 2, scale=3.0).scaled(scales)
    assert found.ids.tolist() == [1, 2]
    np.testing.assert_allclose(found.weights, [3 * 0.5 * 2 / 3, 3 * -2.0 / 3], rtol=1e-6)


def test_all_nan_is_uniform() -> None:
    """The twin itself is right: without any logit the first experts share evenly."""
    routing = router_twin(np.full(10, np.nan, np.float32), 4)
    np.testing.assert_array_equal(routing.ids, [0, 1, 2, 3])
    np.testing.assert_allclose(routing.weights, 0.25)
