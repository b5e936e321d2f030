"""Compares router_topk with its twin.

Ids, addresses and logs must be equal; weights are within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.inputs import normal
from vkmoe.kernels.router import twins
from vkmoe.kernels.router.operations import (
    GATHER,
    RENORMALISE,
    SHARED_GATE,
    SIGMOID,
    ExpertNumbers,
    Landing,
    RouterShape,
    RouterTensors,
    RoutingLog,
    router_topk,
    routing_words,
)
from vkmoe.kernels.rows import ALL, N_DRAWN, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning

N_LAYERS, LAYER = 3, 1
Logits = NDArray[np.float32]
WEIGHT_LIMIT = 2e-5  # of a weight: the exponential of a float32 driver


@dataclass(frozen=True)
class RouterCase(RowCase):
    """Checks one router of a three-layer model; `bias` [n_experts] is for choosing,
    `output_scales` [n_experts] are for the weights.

    About half of the experts are at home. `n_landing` places, if any, are gathered to or not; the
    first place of a few is null. Without `logits`, random ones are taken, and some with ties.
    """

    tuning: Tuning
    shape: RouterShape
    n_landing: int = 0
    gather: bool = False
    bias: Logits | None = None
    output_scales: Logits | None = None
    logits: tuple[Logits, ...] = ()

    @property
    def n_compared(self) -> int:
        return len(self.logits) or 2

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        shape = self.shape
        rng = np.random.default_rng([shape.n_experts, self.n_landing])
        table = rng.integers(1, 1 << 63, (N_LAYERS, shape.n_experts), np.uint64)
        places = 256 * rng.integers(1, 1 << 55, (N_LAYERS, self.n_landing), np.uint64)
        places[:, self.n_landing // 2 : self.n_landing // 2 + 1] = 0
        entries = np.concatenate([table.reshape(-1), places.reshape(-1)])
        address = runner.place(entries)
        log = RoutingLog(N_LAYERS, shape.n_used, batch.n_rows)
        routing = batch.tensor("routing", routing_words(shape))
        logits = batch.tensor("logits", shape.n_logits + 2)
        given = self.bias, self.output_scales
        router_topk(
            op,
            shape,
            LAYER,
            RouterTensors(logits, batch.params_ref, routing, log),
            memory_range(address, entries.nbytes),
            Landing(N_LAYERS, self.n_landing, self.gather),
            ExpertNumbers(*(0 if each is None else runner.place(each) for each in given)),
        )
        random = [self.random_logits(row) for row in ALL]
        drawn = self.logits or [one.round() if row % 2 else one for row, one in enumerate(random)]
        rows = np.array([*islice(cycle(drawn), max(N_DRAWN, len(drawn)))])

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            self._compare(table[LAYER], places[LAYER], rows[row], checks, words)

        params = partial(RowBatch.params, table=address)
        return Rowed({logits: rows}, (routing,), compare, params, others=(log.tensor,))

    def _compare(
        self,
        table: NDArray[np.uint64],
        places: NDArray[np.uint64],
        logits: Logits,
        checks: Checks,
        words: Sequence[Words],
    ) -> None:
        shape, (routing, log) = self.shape, words
        wanted = twins.router_topk(
            logits[: shape.n_experts],
            shape.n_used,
            shape.gating,
            shape.renormalise,
            shape.scale,
            self.bias,
            (shape.n_groups, shape.n_groups_used),
        )
        if self.output_scales is not None:
            wanted = wanted.scaled(self.output_scales)
        ids, weights, addresses, partners, shared = np.split(
            routing, np.array([1, 2, 4, 6]) * shape.n_used
        )
        checks.equal("ids", ids.astype(np.int64), wanted.ids)
        sizes = np.abs(wanted.weights) + 1e-4
        checks.close("weights", weights.view(np.float32), wanted.weights, sizes, WEIGHT_LIMIT)
        found = twins.look_up(table[wanted.ids], places, self.gather)
        checks.equal("addresses", addresses.view(np.uint64), found.addresses)
        checks.equal("partners", partners.view(np.uint64), found.partners)
        if shape.shared_gate:
            gate = twins.shared_weights(logits[shape.n_experts :])
            checks.close("shared weight", shared.view(np.float32), gate, gate, WEIGHT_LIMIT)
        expected_log = np.full(len(log), SENTINEL, np.uint32)
        RoutingLog(N_LAYERS, shape.n_used).views(expected_log).ids[0, LAYER] = wanted.ids
        checks.equal("log", log, expected_log)

    def random_logits(self, seed: int) -> Logits:
        """Draw float32 [n_logits]."""
        return normal(2, self.shape.n_logits, seed)


def random_bias(n_experts: int, seed: int = 0) -> Logits:
    """Draw float32 [n_experts] in quarters, so that equal logits often have equal biases."""
    rng = np.random.default_rng([seed, n_experts])
    return (rng.integers(-2, 3, n_experts) / 4).astype(np.float32)


def random_scales(n_experts: int) -> Logits:
    """Draw float32 [n_experts] of both signs, none twice, of which one is 0."""
    scales = np.random.default_rng([7, n_experts]).uniform(-2, 2, n_experts).astype(np.float32)
    scales[n_experts // 2] = 0.0
    return scales


# ----- what is compared -----


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

SCALED_ROUTERS = (  # the first as Gemma 4 has it
    RouterShape(128, 8),
    RouterShape(60, 4, renormalise=False, scale=2.5, shared_gate=True),
)


def _router_topk(setting: Setting) -> Iterator[Trial]:
    yield trial(
        *(
            RouterCase(setting.tuning, shape, n_landing, gather=n_landing == shape.n_used)
            for shape, n_landing in ROUTERS
        ),
        *(
            RouterCase(setting.tuning, shape, bias=random_bias(shape.n_experts))
            for shape in BIASED_ROUTERS
        ),
        *(
            RouterCase(setting.tuning, shape, output_scales=random_scales(shape.n_experts))
            for shape in SCALED_ROUTERS
        ),
        RowsCase(RouterCase(setting.tuning, ROUTERS[1][0])),
    )


# ----- what a model uses -----


@dataclass(frozen=True)
class RouterProbe:
    """Checks a model's router, with random numbers for its experts where it has some."""

    tuning: Tuning
    shape: RouterShape
    n_landing: int
    gather: bool
    biased: bool
    scaled: bool

    def run(self, runner: Runner) -> Checks:
        """Compare random logits, and some with ties."""
        n, (tuning, shape) = self.shape.n_experts, (self.tuning, self.shape)
        bias, scales = random_bias(n) if self.biased else None, random_scales(n)
        case = RouterCase(tuning, shape, self.n_landing, self.gather, bias)
        return (replace(case, output_scales=scales) if self.scaled else case).run(runner)


def _router_topk_probe(used: Used) -> RouterProbe:
    numbers = used.numbers
    flags = numbers["flags"]
    shape = RouterShape(
        numbers["n_experts"],
        numbers["n_used"],
        "sigmoid" if flags & SIGMOID else "softmax",
        renormalise=flags & RENORMALISE != 0,
        scale=numbers["scale"],
        shared_gate=flags & SHARED_GATE != 0,
        n_groups=numbers["n_groups"],
        n_groups_used=numbers["n_groups_used"],
    )
    given = (numbers[name] != 0 for name in ("selection_bias", "output_scales"))
    return RouterProbe(used.tuning, shape, numbers["n_landing"], flags & GATHER != 0, *given)


# ----- what is measured -----


def _router_topk_works(setup: Setup) -> Iterator[Work]:
    router = setup.shapes.router
    case = RouterCase(setup.tuning, router)

    yield Work(f"router top {router.n_used} of {router.n_experts}", 4 * router.n_logits, case.run)


FAMILIES = {
    "router_topk": Family(_router_topk, _router_topk_works, "reduce_suffix", _router_topk_probe)
}
