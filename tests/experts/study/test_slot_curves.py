"""Hits of single layers by their slots, and how slots are split by that: predictions and bounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.engine.tiny import model_path
from tests.experts.invented_traces import trace_of
from tests.gpu.invented import DISCRETE_12
from tests.placement.invented_models import MIXED, N_EXPERTS, SCRATCH, SPEC
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.settings import CacheSettings, make_pools
from vkmoe.experts.records.trace import Trace
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.experts.study.replay import ENOUGH_TOKENS, Transfers, simulate
from vkmoe.experts.study.slot_curves import (
    LayerCurves,
    curves_of_counts,
    curves_of_trace,
    known_curves,
    split_by_gain,
    split_slots,
)
from vkmoe.facts import MemoryPlan
from vkmoe.models import open_model
from vkmoe.placement.plan import plans
from vkmoe.placement.pools import SlotLayout

MIB, GIB = 1 << 20, 1 << 30
CACHE = EngineConfig(expert_mode="cache")

SPANS = st.sampled_from((100, 300, 301, 1000))


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int], LayerCurves, list[int]]:
    """Bytes, those of a slot in each layer, curves of any form, and the least slots."""
    n_layers, n_experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    sizes = draw(st.lists(SPANS, min_size=n_layers, max_size=n_layers))
    gains = st.lists(st.integers(0, 20), min_size=n_experts, max_size=n_experts)
    rows = draw(st.lists(gains, min_size=n_layers, max_size=n_layers))
    rates = np.array([np.cumsum([0, *row]) / max(1, sum(row)) for row in rows], np.float64)
    least = [draw(st.integers(1, n_experts))] * n_layers
    n_bytes = least[0] * sum(sizes) + draw(st.integers(0, n_experts * sum(sizes)))
    return n_bytes, sizes, LayerCurves.of(rates, "invented"), least


@given(splits())
def test_no_exchange_of_a_slot_and_no_slot_more_would_bring_more(
    case: tuple[int, list[int], LayerCurves, list[int]],
) -> None:
    """Within the bytes there are; each layer has its least slots, and no more than experts."""
    n_bytes, sizes, curves, least = case
    n_layers, n_experts = len(sizes), curves.rates_of.shape[1] - 1
    slots = split_by_gain(n_bytes, sizes, curves, least)
    taken = int(np.dot(slots, sizes))
    assert taken <= n_bytes
    assert all(low <= n <= n_experts for low, n in zip(least, slots, strict=True))
    assert all(
        n == n_experts or taken + size > n_bytes for n, size in zip(slots, sizes, strict=True)
    )
    rate = curves.of_slots(slots, n_experts)
    for giving, taking in permutations(range(n_layers), 2):
        other = list(slots)
        other[giving] -= 1
        other[taking] += 1
        fits = taken - sizes[giving] + sizes[taking] <= n_bytes
        if fits and other[giving] >= least[giving] and other[taking] <= n_experts:
            assert curves.of_slots(other, n_experts) <= rate + 1e-9, (slots, other)


@given(splits())
def test_layers_that_are_alike_have_the_even_split(
    case: tuple[int, list[int], LayerCurves, list[int]],
) -> None:
    n_bytes, sizes, curves, least = case
    n_layers, n_experts = len(sizes), curves.rates_of.shape[1] - 1
    alike = LayerCurves.of(np.repeat(curves.rates_of[:1], n_layers, axis=0), "invented")
    even = split_slots(n_bytes, sizes[:1] * n_layers, n_experts)
    if min(even) >= least[0]:
        assert split_by_gain(n_bytes, sizes[:1] * n_layers, alike, least) == even


@pytest.mark.parametrize("n_landing", [0, 2])
def test_slots_of_a_device_fit_and_no_layer_has_fewer_than_a_token_uses(n_landing: int) -> None:
    """Landing slots and what allocations add included; where memory is short the least is less."""
    spans = (50_176, 100_096, 50_176)
    rates = np.linspace(0, 1, 65) ** np.array([[1.0], [0.5], [0.1]])
    curves = LayerCurves.of(rates, "invented")
    layout = SlotLayout(DISCRETE_12, spans, 64, 8, n_landing, curves=curves)
    for n_bytes in (0, 700_000, 1_500_000, 3_000_000, 6_000_000, 9_000_000, 1 << 30):
        slots = layout.largest(n_bytes)
        even = SlotLayout(DISCRETE_12, spans, 64, 8, n_landing).largest(n_bytes)
        assert any(slots) == any(even)
        assert not any(slots) or layout.n_bytes(slots) <= n_bytes
        assert min(slots) >= min(8, min(even)), (slots, even)
        if 8 < max(even) < 64:
            assert slots[0] > slots[2], "one more brings more there"


def test_experts_that_stay_in_their_slots_fit_in_each_layer() -> None:
    """And one more; where all layers alike have room for fewer, they have those."""
    rates = np.linspace(0, 1, 65) ** np.array([[1.0], [0.5], [0.1]])
    curves = LayerCurves.of(rates, "invented")
    layout = SlotLayout(DISCRETE_12, (50_176,) * 3, 64, 8, curves=curves, n_kept=16)
    assert min(layout.largest(2_000_000)) <= 16 < min(layout.largest(6_000_000)) < 20
    asked = replace(CACHE, expert_resident_ids=",".join(map(str, range(60))))
    steep = LayerCurves.of(
        np.linspace(0, 1, 129) ** np.linspace(1.0, 0.05, 48)[:, None], "invented"
    )
    for config, least in ((CACHE, 8), (asked, 61)):
        found = plans(config, SPEC, DISCRETE_12, MIXED, SCRATCH, 40 * GIB, steep)[0]
        assert min(found.expert_slots) == least


def test_a_split_by_gain_never_costs_the_place_of_all_experts_together() -> None:
    """With just enough host memory for the experts that the even split leaves, it is taken."""
    gains = np.where(np.arange(48)[:, None] % 2, 0.2, 1.0)  # those of large experts bring more
    curves = LayerCurves.of(np.linspace(0, 1, N_EXPERTS + 1) ** gains, "invented")

    def made(ram: int, curve: HitCurve = MEAN_CURVE) -> MemoryPlan:
        return plans(CACHE, SPEC, DISCRETE_12, MIXED, SCRATCH, ram, curve)[0]

    too_few, enough = 8 * GIB, 15 * GIB
    assert not made(too_few).exchanges and made(enough).exchanges
    assert made(enough, curves).expert_slots != made(enough).expert_slots
    while enough - too_few > MIB:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if made(middle).exchanges else (middle, enough)
    found = made(enough, curves)
    assert found.exchanges and found.expert_slots == made(enough).expert_slots

    def reason(found: MemoryPlan) -> str:
        return next(line.reason for line in found.lines if line.item.startswith("expert slots"))

    assert reason(found) == "what the device has left"
    assert reason(made(40 * GIB, curves)).endswith(", split by --expert-profile")


# ----- what is predicted -----


def zipf(skews: Sequence[float], n_tokens: int, seed: int, order: int = 0) -> NDArray[np.uint32]:
    """Routing of layers whose experts are liked by Zipf's law, one more unequally than the next.

    `order` says which experts those are.
    """
    random, orders = np.random.default_rng(seed), np.random.default_rng(order)
    liking = -np.array(skews)[:, None] * np.log1p(np.arange(32))
    liking = np.array([orders.permutation(row) for row in liking])
    scores = liking + random.gumbel(size=(n_tokens, *liking.shape))
    return np.argsort(-scores, axis=2)[:, :, :4].astype(np.uint32)


SKEWS = (0.0, 0.0, 0.7, 0.7, 1.5, 1.5)


def counts_of(trace: Trace) -> NDArray[np.float64]:
    keys = trace.space.keys_of(trace.routing).reshape(-1)
    uses = np.bincount(keys, minlength=trace.space.n_keys).astype(np.float64)
    return uses.reshape(trace.space.n_layers, -1)


def hits_of(trace: Trace, slots: Sequence[int]) -> float:
    """Hits of a cache by default, replayed."""
    header = trace.header
    pools = make_pools(slots, header.span_bytes, header.n_used, "layer")
    settings = CacheSettings("forecast", lag=2)
    return simulate(trace, settings, pools, transfers=Transfers(late=True, n_landing=2)).hit_rate


@pytest.mark.parametrize("n_slots", [12, 16, 20])
@pytest.mark.parametrize("source", ["trace", "counts"])
@pytest.mark.sample(2)
def test_what_is_known_of_one_text_serves_the_next(source: str, n_slots: int) -> None:
    """Of layers that differ: with as many slots in all, more hits than an even split has."""
    learned = trace_of(zipf(SKEWS, 2000, 1), 32)
    curves = curves_of_counts(counts_of(learned), 2000)
    if source == "trace":
        found = curves_of_trace(learned)
        assert found is not None
        curves = found
    even = (n_slots,) * 6
    slots = split_by_gain(6 * n_slots, [1] * 6, curves, [4] * 6)
    other = trace_of(zipf(SKEWS, 600, 2), 32)
    assert sum(slots) == sum(even) and slots[0] > slots[4]
    assert hits_of(other, slots) > hits_of(other, even) + 0.005
    predicted = curves.of_slots(slots, 32) - curves.of_slots(even, 32)
    assert predicted > 0


def test_layers_that_differ_by_chance_share_nearly_evenly() -> None:
    """However few the tokens are; as many as 90 are in the counts of a profile."""
    for n_tokens, seed in product((1, 10, 90), range(5)):
        counts = counts_of(trace_of(zipf((0.5,) * 6, n_tokens, seed), 32))
        slots = split_by_gain(6 * 12, [1] * 6, curves_of_counts(counts, n_tokens), [4] * 6)
        assert max(slots) - min(slots) <= 2, slots


def test_the_curve_of_layers_that_are_alike_is_the_mean_curve() -> None:
    curves = curves_of_counts(np.ones((3, 32)), inf)
    for n in range(33):
        assert curves.of_slots((n,) * 3, 32) == pytest.approx(MEAN_CURVE.rate(n / 32), abs=0.02)
    assert curves.rate(0.25) == pytest.approx(curves.of_slots((8,) * 3, 32))


def test_a_layer_whose_experts_are_always_the_same_needs_no_more_slots() -> None:
    """Its curve is no less than if those had the slots, whatever the mean curve says."""
    counts = np.ones((3, 32))
    counts[1, 4:] = 0.0
    curves = curves_of_counts(counts, inf)
    assert curves.rates_of[1, 4:] == pytest.approx(1.0)
    assert split_by_gain(60, [1] * 3, curves, [4] * 3) == (28, 4, 28)


def test_a_layer_without_uses_is_like_the_others() -> None:
    counts = np.ones((3, 32))
    counts[1] = 0.0
    rates = curves_of_counts(counts, inf).rates_of
    assert np.isfinite(rates).all() and rates[1] == pytest.approx(rates[0])


def test_a_short_trace_tells_nothing() -> None:
    routing = zipf(SKEWS, ENOUGH_TOKENS, 0)
    assert curves_of_trace(trace_of(routing[1:], 32)) is None
    assert curves_of_trace(trace_of(routing, 32)) is not None


def test_a_pipe_is_left_to_what_follows_the_uses(tmp_path: Path) -> None:
    """What one reader has taken of a pipe, no other gets."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        os.write(writer, b"{}")
        with open_model(model_path("moe_plain")) as model:
            assert known_curves(pipe, model.spec, model.expert_tensors) is None
        assert os.read(writer, 9) == b"{}"
    finally:
        os.close(writer)
