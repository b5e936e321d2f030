"""Compares router_topk with its twin: ids, addresses, log exactly, weights within rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.context import OpContext
from vkmoe.ops.router import (
    Landing,
    RouterShape,
    RouterTensors,
    RoutingLog,
    router_topk,
    routing_words,
)
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.router import look_up
from vkmoe.reference.router import router_topk as router_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.inputs import PARAMS, params_words

__all__ = ["RouterCase", "random_bias"]

N_LAYERS, LAYER = 3, 1
WEIGHT_LIMIT = 2e-5  # of a weight: the exponential of a float32 driver

Words = NDArray[np.uint32]


class RouterCase:
    """Checks one router of a three-layer model on any logits; `bias` [n_experts] is for choosing.

    About half of the experts are at home. Landing places, if any, are `gather`ed to or not; the
    first place of a few is null.
    """

    def __init__(
        self,
        runner: Runner,
        tuning: Tuning,
        shape: RouterShape,
        n_landing: int = 0,
        gather: bool = False,
        bias: NDArray[np.float32] | None = None,
    ) -> None:
        self.shape, self._runner, self._bias = shape, runner, bias
        rng = np.random.default_rng([shape.n_experts, n_landing])
        self.table = rng.integers(1, 1 << 63, (N_LAYERS, shape.n_experts), np.uint64)
        self.landing_places = 256 * rng.integers(1, 1 << 55, (N_LAYERS, n_landing), np.uint64)
        self.landing_places[:, n_landing // 2 : n_landing // 2 + 1] = 0
        self.landing = Landing(N_LAYERS, n_landing, gather)
        self.table_words = np.concatenate([self.table.reshape(-1), self.landing_places.reshape(-1)])
        self.table_address = runner.place(self.table_words)
        self.logits = TensorRef("logits", shape.n_logits)
        self.routing = TensorRef("routing", routing_words(shape))
        self._routing_log = RoutingLog(N_LAYERS, shape.n_used)
        self.log = self._routing_log.tensor
        self._program = Program("router")
        router_topk(
            OpContext(self._program, tuning, "router"),
            shape,
            LAYER,
            RouterTensors(self.logits, PARAMS, self.routing, self._routing_log),
            memory_range(self.table_address, self.table_words.nbytes),
            self.landing,
            selection_bias=0 if bias is None else runner.place(bias),
        )

    def run(self, logits: NDArray[np.float32], checks: Checks) -> None:
        shape = self.shape
        routing, log = self.words(logits)
        gate = float(logits[shape.n_experts]) if shape.shared_gate else None
        wanted = router_twin(
            logits[: shape.n_experts],
            shape.n_used,
            shape.gating,
            shape.renormalise,
            shape.scale,
            gate,
            self._bias,
            shape.n_groups,
            shape.n_groups_used,
        )
        ids, weights, *pairs = np.split(routing, np.array([1, 2, 4, 6]) * shape.n_used)
        checks.equal("ids", ids.astype(np.int64), wanted.ids)
        checks.close(
            "weights", weights.view(np.float32), wanted.weights, wanted.weights + 1e-4, WEIGHT_LIMIT
        )
        found = look_up(
            self.table[LAYER, wanted.ids], self.landing_places[LAYER], self.landing.gather
        )
        addresses, partners, shared_weight = pairs
        checks.equal("addresses", addresses.view(np.uint64), found.addresses)
        checks.equal("partners", partners.view(np.uint64), found.partners)
        if wanted.shared_weight is not None:
            shared = np.array([wanted.shared_weight])
            found_weight = shared_weight.view(np.float32)
            checks.close("shared weight", found_weight, shared, shared, WEIGHT_LIMIT)
        expected_log = np.full(self.log.n_words, SENTINEL, np.uint32)
        self._routing_log.views(expected_log).ids[0, LAYER] = wanted.ids
        checks.equal("log", log, expected_log)

    def words(self, logits: NDArray[np.float32], n_tokens: int = 1) -> tuple[Words, ...]:
        """Return the words of routing and log for a batch's first token, nothing compared."""
        params = params_words(table=self.table_address, n_tokens=n_tokens)
        inputs = {self.logits: logits, PARAMS: params}
        return self._runner.run(self._program, inputs, self.routing, self.log)

    def random_logits(self, seed: int) -> NDArray[np.float32]:
        """Draw float32 [n_logits]."""
        return np.random.default_rng(seed).normal(0, 2, self.shape.n_logits).astype(np.float32)


def random_bias(n_experts: int, seed: int = 0) -> NDArray[np.float32]:
    """Draw float32 [n_experts] in quarters, so that equal logits often have equal biases."""
    rng = np.random.default_rng([seed, n_experts])
    return (rng.integers(-2, 3, n_experts) / 4).astype(np.float32)
