"""router_topk against its twin: ids and addresses exactly, weights within rounding."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ops.replay import PARAMS, Replay, params_words
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.router import (
    LOG_HEADER_WORDS,
    RouterShape,
    log_words,
    router_topk,
    routing_words,
)
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.router import router_topk as router_twin

N_LAYERS, LAYER = 3, 1
SHARED_ADDRESS = 0x1234_5678_9ABC_DE00
TUNINGS = [
    Tuning("blocks", 8, 8, False), Tuning("blocks", 16, 8, True),
    Tuning("lanes", 64, 4, False), Tuning("lanes", 64, 4, True),
]
SHAPES = [
    RouterShape(128, 8),
    RouterShape(60, 4, renormalise=False, shared=True, shared_gate=True),
    RouterShape(5, 5, scale=2.5),
    RouterShape(257, 7, gating="sigmoid", shared=True, scale=0.5),
    RouterShape(1024, 32, gating="sigmoid", renormalise=False),
    RouterShape(1, 1),
]


class RouterCase:
    """A recorded router on one device, and the check of one run."""

    def __init__(self, device: Device, runner: Runner, tuning: Tuning, shape: RouterShape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.n_experts)
        self.table = rng.integers(1, 1 << 63, (N_LAYERS, shape.n_experts), np.uint64)
        self.table_address = runner.place(self.table)
        self.logits = TensorRef("logits", shape.n_logits)
        self.routing = TensorRef("routing", routing_words(shape))
        self.log = TensorRef("log", log_words(N_LAYERS, shape.n_used))
        program = Program("router")
        router_topk(program, tuning, shape, LAYER, self.logits, PARAMS,
                    memory_range(self.table_address, self.table.nbytes), self.routing, self.log,
                    "router", SHARED_ADDRESS if shape.shared else 0)
        self.replay = Replay(device, program)

    def check(self, logits: NDArray[np.float32]) -> None:
        shape = self.shape
        routing, log = self.replay.run(
            {self.logits: logits, PARAMS: params_words(table=self.table_address)},
            self.routing, self.log)
        gate = float(logits[shape.n_experts]) if shape.shared_gate else None
        wanted = router_twin(logits[:shape.n_experts], shape.n_used, shape.gating,
                             shape.renormalise, shape.scale, gate)
        n_slots = shape.n_slots
        ids = routing[:shape.n_used].astype(np.int64)
        np.testing.assert_array_equal(ids, wanted.ids)
        weights = routing[n_slots:2 * n_slots].view(np.float32)
        np.testing.assert_allclose(weights[:shape.n_used], wanted.weights, rtol=2e-5, atol=1e-9)
        addresses = routing[2 * n_slots:].view(np.uint64)
        np.testing.assert_array_equal(addresses[:shape.n_used], self.table[LAYER, ids])
        if shape.shared:
            assert weights[-1] == pytest.approx(wanted.shared_weight, rel=2e-5)
            assert addresses[-1] == SHARED_ADDRESS
        self._check_log(log, ids)

    def _check_log(self, log: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        """The layer's ids stand in its place and nothing else was written."""
        rows = log[LOG_HEADER_WORDS:].reshape(N_LAYERS, -1)
        np.testing.assert_array_equal(rows[LAYER], ids)
        rows[LAYER] = SENTINEL
        assert np.all(log == SENTINEL)


def random_logits(shape: RouterShape, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, shape.n_logits).astype(np.float32)


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_logits(
    device: Device, runner: Runner, tuning: Tuning, shape: RouterShape,
) -> None:
    case = RouterCase(device, runner, tuning, shape)
    case.check(random_logits(shape, 1))
    case.check(np.round(random_logits(shape, 2)))  # ties


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_awkward_logits(device: Device, runner: Runner, gating: str, renormalise: bool) -> None:
    """NaN and infinities never make an invalid or doubled id, nor a weight that is not finite."""
    shape = RouterShape(40, 6, "sigmoid" if gating == "sigmoid" else "softmax", renormalise,
                        shared=True, shared_gate=True)
    case = RouterCase(device, runner, TUNINGS[0], shape)
    base = random_logits(shape, 3)
    for bad in (np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30):
        for where in (slice(0, 1), slice(2, 38), slice(None)):
            logits = base.copy()
            logits[where] = bad
            case.check(logits)
    case.check(np.where(np.arange(41) % 2, np.float32(np.nan), np.float32(np.inf)))


def test_all_nan_is_uniform() -> None:
    """The twin itself is right: without any logit the first experts share evenly."""
    routing = router_twin(np.full(10, np.nan, np.float32), 4)
    np.testing.assert_array_equal(routing.ids, [0, 1, 2, 3])
    np.testing.assert_allclose(routing.weights, 0.25)
