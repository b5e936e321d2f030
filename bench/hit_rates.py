"""Hit rates of every policy beside Belady's optimum, on any routing and for any number of slots.

Uses the simulator, and so the engine's own decisions (vkmoe/experts/study/replay.py). Does not
record or invent routing (routing.py), prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.keys import DecayedCounts
from vkmoe.experts.decide.locations import Locations
from vkmoe.experts.decide.policies import Slru
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.records.trace import Trace
from vkmoe.experts.study.replay import Misses, ceiling, misses, simulate

__all__ = [
    "DEFAULT",
    "POLICIES",
    "Curve",
    "Point",
    "Setting",
    "frequency_pays",
    "mean_curve",
    "measure_curve",
]

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT: PolicyName = EngineConfig().expert_policy
TIE = 1e-12  # rates that differ by less are equal


class Setting(NamedTuple):
    """What is compared within: everything but policy and slots."""

    allocation: SlotSharing
    pinning: bool  # the default warm-pinning; off without

    def __str__(self) -> str:
        shared = "own slots" if self.allocation == "layer" else "shared slots"
        return f"{shared}, {'warm-pinning' if self.pinning else 'no warm-pinning'}"


class Point(NamedTuple):
    """A policy at one number of slots; rates from 0 to 1."""

    rate: float
    worst: float  # of the layer with the fewest hits
    misses: tuple[float, float, float]  # compulsory, capacity, policy: per use


@dataclass(frozen=True)
class Curve:
    """One workload under one setting, by rising slots."""

    slots: tuple[int, ...]
    best: tuple[Point, ...]  # Belady's optimum; no misses by policy
    policies: Mapping[PolicyName, tuple[Point, ...]]

    def winners(self) -> list[str]:
        """The policy with the most hits at each number of slots; several where they are equal."""
        found = []
        for index in range(len(self.slots)):
            rates = {name: points[index].rate for name, points in self.policies.items()}
            top = max(rates.values())
            found.append("=".join(name for name, rate in rates.items() if rate >= top - TIE))
        return found

    def below_lru(self) -> list[tuple[int, float]]:
        """Where the default has fewer hits than lru: slots, and by how much (rates)."""
        pairs = zip(self.slots, self.policies[DEFAULT], self.policies["lru"], strict=True)
        return [(n, lru.rate - own.rate) for n, own, lru in pairs if own.rate < lru.rate - TIE]

    def document(self) -> dict[str, Any]:
        """Rounded, for JSON."""
        rows = {"belady": self.best, **{str(name): row for name, row in self.policies.items()}}
        return {
            "slots": self.slots,
            **{
                name: {
                    "rate": [round(point.rate, 5) for point in points],
                    "worst": [round(point.worst, 5) for point in points],
                    "misses": [[round(share, 5) for share in point.misses] for point in points],
                }
                for name, points in rows.items()
            },
        }


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Of several workloads: rates and misses averaged, the worst layer of all."""

    def mean(columns: Iterator[tuple[Point, ...]]) -> tuple[Point, ...]:
        return tuple(
            Point(
                float(np.mean([point.rate for point in points])),
                min(point.worst for point in points),
                tuple(np.mean([point.misses for point in points], axis=0).tolist()),
            )
            for points in columns
        )

    policies = {
        name: mean(zip(*(curve.policies[name] for curve in curves), strict=True))
        for name in curves[0].policies
    }
    best = mean(zip(*(curve.best for curve in curves), strict=True))
    return Curve(curves[0].slots, best, policies)


def measure_curve(trace: Trace, slots: Sequence[int], setting: Setting) -> Curve:
    """Replay a trace for each number of slots and policy, on a cold cache."""
    header, config = trace.header, EngineConfig()
    best: list[Point] = []
    policies: dict[PolicyName, list[Point]] = {name: [] for name in POLICIES}
    for n_slots in slots:
        layers = [n_slots] * header.n_layers
        pools = make_pools(layers, header.span_bytes, header.n_used, setting.allocation)
        most = ceiling(trace, pools)
        for name in POLICIES:
            pins = setting.pinning and n_slots < header.n_experts and config.warm_pins
            settings = CacheSettings(
                policy=name,
                half_life=config.expert_half_life,
                pins=(replace(pins, n=header.n_used),) if pins else (),
            )
            result = simulate(trace, settings, pools)
            split = misses(result, most)
            point = Point(result.hit_rate, result.worst_rate, _per_use(split, trace))
            policies[name].append(point)
        rates = most / (trace.n_tokens * header.n_used)
        unavoidable = _per_use(split._replace(policy=0), trace)
        best.append(Point(float(rates.mean()), float(rates.min()), unavoidable))
    return Curve(tuple(slots), tuple(best), {name: tuple(row) for name, row in policies.items()})


def _per_use(split: Misses, trace: Trace) -> tuple[float, float, float]:
    n_uses = trace.routing.size
    return split.compulsory / n_uses, split.capacity / n_uses, split.policy / n_uses


# ----- what frequency is worth -----


def frequency_pays(trace: Trace, n_slots: int) -> tuple[float, float]:
    """Hit rates of slru that looks at frequency, and of slru by recency alone; no pins."""
    pools = make_pools(
        [n_slots] * trace.header.n_layers, trace.header.span_bytes, trace.header.n_used, "layer"
    )
    by_frequency, by_recency = (_hits(trace, pools, on) for on in (True, False))
    replayed = simulate(trace, CacheSettings("slru", EngineConfig().expert_half_life), pools)
    assert by_frequency == replayed.layer_hits.sum(), "this replay is not the simulator's"
    return by_frequency / trace.routing.size, by_recency / trace.routing.size


def _hits(trace: Trace, pools: Sequence[PoolSpec], frequency: bool) -> int:
    """Hits as `Residency` has them; `simulate` cannot switch frequency off."""
    space = trace.space
    counts = DecayedCounts(space.n_keys, EngineConfig().expert_half_life)
    policy = Slru(Locations(space, pools), counts, frequency=frequency)
    first = np.arange(space.n_layers)[:, None] * space.n_experts
    n_misses = 0
    for routing in trace.routing:
        keys = routing + first
        counts.use(keys.reshape(-1))
        missing = policy.use(keys.T.reshape(-1))
        needed = np.zeros(space.n_keys, np.bool_)
        needed[keys] = True
        policy.promote(missing.tolist(), needed)
        counts.advance()
        n_misses += len(missing)
    return trace.routing.size - n_misses
