"""The statistics of `--expert-stats`: how often device memory served the experts' uses.

Collects them from the profiler and the cache, and says them as one JSON document for programs; as
text for people in report_text.py. Does not own when or where they are written (record_keeping.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from vkmoe.experts.decide.worth import PredictionCounts
from vkmoe.experts.records.overlap import Overlap
from vkmoe.experts.records.profiler import CacheCounters, ExpertProfiler, PoolCounters, Tally

__all__ = ["CopyTimes", "ExpertReport", "LayerReport", "Setup", "as_document", "make_report"]

N_TOP = 8  # most used experts that are listed
DOCUMENT_VERSION = 1


@dataclass(frozen=True)
class Setup:
    """What the figures belong to. `slots` per MoE layer; `host_places` of a small host pool."""

    model: str
    architecture: str
    device: str
    experts_in: Literal["device", "host", "cache"]
    n_experts: int  # per layer; 0: a dense model
    n_used: int
    slots: tuple[int, ...] = ()
    policy: str | None = None  # None: nothing is ever moved
    allocation: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # as asked, to run the same again
    executor: Literal["fused", "stepped"] = "fused"
    host_places: int = 0  # 0: one for each expert
    predictor: str | None = None  # None: nobody guesses


@dataclass(frozen=True)
class LayerReport:
    """One MoE layer; `layer` is its number in the model."""

    layer: int
    n_slots: int
    total: Tally
    before: Tally | None  # warm-pinning; None: there was none
    after: Tally | None
    pinned: tuple[int, ...]
    top: tuple[tuple[int, int], ...]  # most used experts: (id, uses)


@dataclass(frozen=True)
class CopyTimes:
    """How long was copied into slots, and the part of it that computing hid, from 0 to 1."""

    copied_ns: int
    hidden: float | None  # None: not known
    n_unknown: int  # copies whose times are not known

    @property
    def reason(self) -> str:
        """Why it is not known; empty where it is."""
        if self.hidden is not None:
            return ""
        if not self.copied_ns:
            return "the device does not say when copies ran"
        return "the device times its queues by different clocks"


@dataclass(frozen=True)
class ExpertReport:
    """All of it. `counters` only with a cache, `pool` only where it is smaller than the model."""

    setup: Setup
    n_tokens: int
    total: Tally
    warm_after: int | None  # tokens before warm-pinning
    before: Tally | None
    after: Tally | None
    layers: tuple[LayerReport, ...]
    counters: CacheCounters | None
    pool: PoolCounters | None = None
    copies: CopyTimes | None = None  # None: none were timed
    predictions: PredictionCounts | None = None  # None: nothing was fetched on a guess

    @property
    def coverage(self) -> float:
        """The part of the experts that fits into device memory, from 0 to 1."""
        n_total = self.setup.n_experts * len(self.layers)
        return sum(layer.n_slots for layer in self.layers) / n_total if n_total else 0.0


def make_report(
    setup: Setup,
    profiler: ExpertProfiler | None,
    counters: CacheCounters | None,
    pinned: Sequence[Sequence[int]] | None = None,
    pool: PoolCounters | None = None,
    overlap: Overlap | None = None,
    predictions: PredictionCounts | None = None,
) -> ExpertReport:
    """The state of now. `pinned` are expert ids per layer, the profiler's without; no profiler
    means a model without experts.
    """
    if profiler is None:
        return ExpertReport(setup, 0, Tally(0, 0), None, None, None, (), None)
    pins = pinned if pinned is not None else profiler.pinned
    full = setup.n_experts if setup.experts_in == "device" else 0
    uses = profiler.uses
    layers = tuple(
        LayerReport(
            number,
            setup.slots[i] if setup.slots else full,
            profiler.total(i),
            profiler.before(i),
            profiler.after(i),
            tuple(sorted(pins[i])) if pins else (),
            tuple((expert, int(uses[i, expert])) for expert in profiler.top_experts(i, N_TOP)),
        )
        for i, number in enumerate(profiler.layer_numbers)
    )
    return ExpertReport(
        setup,
        profiler.n_tokens,
        profiler.total(),
        profiler.n_tokens_before,
        profiler.before(),
        profiler.after(),
        layers,
        counters,
        pool,
        _copies(overlap),
        replace(predictions) if predictions is not None and predictions.n_hinted else None,
    )


def _copies(overlap: Overlap | None) -> CopyTimes | None:
    """None without any copy."""
    if overlap is None:
        return None
    hidden = overlap.fraction  # which adds up what is known by now
    times = CopyTimes(overlap.copied_ns, hidden, overlap.n_unknown)
    return times if times.copied_ns or times.n_unknown else None


def as_document(report: ExpertReport) -> dict[str, Any]:
    """Plain values for json.dumps; rates from 0 to 1, null where nothing was recorded."""
    return {
        "format": "vkmoe expert statistics",
        "version": DOCUMENT_VERSION,
        **asdict(report.setup),
        "slots": [layer.n_slots for layer in report.layers],
        "coverage": report.coverage,
        "n_tokens": report.n_tokens,
        **_rates(report),
        "warm_after": report.warm_after,
        "cache": asdict(report.counters) if report.counters else None,
        "host_pool": asdict(report.pool) if report.pool else None,
        "copies": asdict(report.copies) if report.copies else None,
        "predictions": asdict(report.predictions) if report.predictions else None,
        "layers": [
            {
                "layer": layer.layer,
                "n_slots": layer.n_slots,
                **_rates(layer),
                "pinned": list(layer.pinned),
                "top": [{"expert": expert, "n_uses": uses} for expert, uses in layer.top],
            }
            for layer in report.layers
        ],
    }


def _rates(part: ExpertReport | LayerReport) -> dict[str, Any]:
    before, after = part.before, part.after
    return {
        **_tally(part.total),
        "before_warm_pinning": None if before is None else _tally(before),
        "after_warm_pinning": None if after is None else _tally(after),
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {"n_uses": tally.n_uses, "n_hits": tally.n_hits, "hit_rate": tally.hit_rate}
