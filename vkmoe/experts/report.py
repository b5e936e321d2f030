"""The statistics of `--expert-stats`: how often device memory served the experts' uses.

Collects them from the profiler and the cache, and says them as text for people and as one JSON
document for programs. Does not own when or where they are written (record_keeping.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vkmoe.experts.counters import CacheCounters
from vkmoe.experts.profiler import ExpertProfiler, Tally

__all__ = ["ExpertReport", "LayerReport", "Setup", "as_document", "as_text", "make_report"]

N_TOP = 8  # most used experts that are listed
SILENT = "(no accesses recorded)"
DOCUMENT_VERSION = 1


@dataclass(frozen=True)
class Setup:
    """What the figures belong to. `slots` per MoE layer."""

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
class ExpertReport:
    """All of it. `counters` only with a cache."""

    setup: Setup
    n_tokens: int
    total: Tally
    warm_after: int | None  # tokens before warm-pinning
    before: Tally | None
    after: Tally | None
    layers: tuple[LayerReport, ...]
    counters: CacheCounters | None

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
    )


# ----- for people -----


def as_text(report: ExpertReport) -> str:
    """Lines that end with a newline; one per layer in the table at the end."""
    return "\n".join([*_summary(report), "", *_table(report)]) + "\n"


def _summary(report: ExpertReport) -> Iterator[str]:
    setup = report.setup
    yield "vkmoe expert statistics"
    name = "".join(sign if sign.isprintable() else "?" for sign in setup.model)
    yield f"model       {name} ({setup.architecture})"
    yield f"device      {setup.device}"
    if not report.layers:
        yield "experts     none: the model is dense"
        return
    yield (
        f"experts     {len(report.layers)} layers of {setup.n_experts}, "
        f"{setup.n_used} used per token and layer"
    )
    yield f"placement   {_placement(report)}"
    yield f"tokens      {report.n_tokens}"
    yield f"hit rate    {_of(report.total)}"
    if report.before is not None and report.after is not None:
        yield f"            before warm-pinning, {report.warm_after} tokens: {_of(report.before)}"
        yield f"            after warm-pinning: {_of(report.after)}"
    if (c := report.counters) is not None:
        yield (
            f"cache       {c.n_uploads} experts uploaded ({_mib(c.upload_bytes)}), "
            f"{c.n_evictions} evicted, {c.n_failed_uploads} uploads failed, "
            f"{c.n_table_writes} table writes"
        )
        yield f"misses      {_mib(c.missed_bytes)} read from host memory"


def _placement(report: ExpertReport) -> str:
    setup = report.setup
    if setup.experts_in == "device":
        return "all experts in device memory (coverage 100.0 %)"
    if setup.experts_in == "host":
        return "all experts in host memory, read in place (coverage 0.0 %)"
    slots = [layer.n_slots for layer in report.layers]
    each = f"{slots[0]}" if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
    shared = ", shared between layers" if setup.allocation == "global" else ""
    return (
        f"cache, policy {setup.policy}, {each} slots per layer{shared} "
        f"(coverage {_percent(report.coverage)})"
    )


def _table(report: ExpertReport) -> Iterator[str]:
    if not report.layers:
        return
    # Columns are as wide as their longest entry; the last two are open-ended.
    heads = ("layer", "slots", "uses", "hit rate", "before", "after", "pinned")
    rows = [heads, *(_row(layer) for layer in report.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    for row, layer in zip(rows, (None, *report.layers), strict=True):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1].ljust(widths[-1])
        yield "  ".join([*cells, _top(layer) if layer else "most used (uses)"]).rstrip()


def _row(layer: LayerReport) -> tuple[str, ...]:
    rates = [
        tally.hit_rate if tally else None for tally in (layer.total, layer.before, layer.after)
    ]
    pinned = " ".join(map(str, layer.pinned)) or "-"
    counts = (str(layer.layer), str(layer.n_slots), str(layer.total.n_uses))
    return (*counts, *(_percent(rate) for rate in rates), pinned)


def _top(layer: LayerReport) -> str:
    return ", ".join(f"{expert} ({n_uses})" for expert, n_uses in layer.top) or SILENT


def _of(tally: Tally) -> str:
    if tally.hit_rate is None:
        return SILENT
    return f"{_percent(tally.hit_rate)} of {tally.n_uses} uses served from device memory"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


# ----- for programs -----


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
