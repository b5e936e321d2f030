"""Reports how often device memory served the experts' uses in a run, and what was moved.

Puts them into words: a document for programs, the text of `--expert-stats`, and the lines at the
end of a command. Does not own where they are written, nor when (keeper.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vkmoe.choices import Executor, ExpertsIn, PolicyName
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.foresight import PredictionCounts
from vkmoe.experts.records.profiler import (
    CacheCounters,
    ExpertProfiler,
    Overlap,
    PoolCounters,
    Served,
    Tally,
)
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec

N_TOP = 8  # most used experts that are listed
FORMAT, DOCUMENT_VERSION = "vkmoe expert statistics", 1
SILENT = "(no accesses recorded)"
NOTHING = Served(Tally(0, 0))


@dataclass(frozen=True)
class Setup:
    """Says what the figures belong to; `slots` per MoE layer, `host_slots` of a small pool."""

    model: str
    architecture: str
    device: str
    experts_in: ExpertsIn
    n_experts: int  # per layer; 0: a dense model
    n_used: int
    slots: tuple[int, ...] = ()
    policy: PolicyName | None = None  # None: nothing is ever moved
    allocation: str | None = None
    executor: Executor = "fused"
    host_slots: int = 0  # 0: one for each expert
    exchanges: bool = False  # every expert is in a slot or a host slot; none comes from the file
    cpu_layers: int = 0  # MoE layers from the first on of which the CPU computes experts
    hits_from: str = "device memory"  # where a hit is read


def setup_of(
    spec: ModelSpec,
    plan: MemoryPlan,
    device: DeviceInfo,
    config: EngineConfig,
    policy: PolicyName | None,
) -> Setup:
    """Say what the statistics of a run belong to; `policy` is the one in force, if any is."""
    moves, experts = plan.mode.has_slots, spec.experts
    return Setup(
        spec.name,
        spec.architecture,
        device.name,
        plan.mode.experts_in,
        experts.n_experts if experts else 0,
        experts.n_used if experts else 0,
        plan.expert_slots,
        policy,
        config.expert_allocation if moves else None,
        plan.executor,
        sum(plan.host_slots),
        plan.exchanges,
        plan.cpu_layers,
        Setup.hits_from if device.layout == "planes" else "the mapped file",
    )


@dataclass(frozen=True)
class LayerReport:
    """Reports on one MoE layer; `layer` is its number in the model."""

    layer: int
    n_slots: int
    served: Served
    pinned: tuple[int, ...]
    top: tuple[tuple[int, int], ...]  # most used experts: (id, uses)


@dataclass(frozen=True)
class CopyTimes:
    """Says how long was copied into slots, and which part of it computing hid, from 0 to 1."""

    copied_ns: int
    hidden: float | None  # None: not known
    n_unknown: int  # copies whose times are not known

    def __str__(self) -> str:
        if self.hidden is not None:
            took = _milliseconds(self.copied_ns)
            return f"{_percent(self.hidden)} of {took} of copying was hidden"
        if not self.copied_ns:
            return "unknown: the device does not say when copies ran"
        return "unknown: the device times its queues by different clocks"


@dataclass(frozen=True)
class ExpertReport:
    """Holds all statistics; `counters` with a cache, `pool` where it is smaller than the model."""

    setup: Setup
    n_tokens: int = 0
    served: Served = NOTHING
    warm_after: int | None = None  # tokens before warm-pinning
    layers: tuple[LayerReport, ...] = ()
    counters: CacheCounters | None = None
    pool: PoolCounters | None = None
    copies: CopyTimes | None = None  # None: none were timed
    predictions: PredictionCounts | None = None  # None: nothing was fetched on a guess
    together: Mapping[int, Tally] = field(default_factory=dict)  # of the tokens that were decoded

    @property
    def coverage(self) -> float:
        """Return the part of the experts that fits into device memory, from 0 to 1."""
        n_total = self.setup.n_experts * len(self.layers)
        return sum(layer.n_slots for layer in self.layers) / n_total if n_total else 0.0


def make_report(
    setup: Setup,
    profiler: ExpertProfiler | None,
    counters: CacheCounters | None = None,
    *,
    pinned: Sequence[Sequence[int]] = (),
    pool: PoolCounters | None = None,
    overlap: Overlap | None = None,
    predictions: PredictionCounts | None = None,
) -> ExpertReport:
    """Report the state of now; without a profiler, on a model without experts.

    `pinned` are expert ids per layer.
    """
    if profiler is None:
        return ExpertReport(setup)
    full = setup.n_experts if setup.experts_in in ("device", "cpu") else 0
    layers = tuple(
        LayerReport(
            number,
            setup.slots[i] if setup.slots else full * (i >= setup.cpu_layers),
            profiler.served(i),
            tuple(sorted(pinned[i])) if pinned else (),
            profiler.top_experts(i, N_TOP),
        )
        for i, number in enumerate(profiler.layer_numbers)
    )
    return ExpertReport(
        setup,
        profiler.n_tokens,
        profiler.served(),
        profiler.n_tokens_before,
        layers,
        counters,
        pool,
        _copy_times(overlap) if overlap is not None else None,
        replace(predictions) if predictions and predictions.n_hinted else None,
        profiler.together,
    )


def _copy_times(overlap: Overlap) -> CopyTimes | None:
    hidden = overlap.fraction  # which adds up what is known by now
    times = CopyTimes(overlap.copied_ns, hidden, overlap.n_unknown)
    return times if times.copied_ns or times.n_unknown else None


def as_document(report: ExpertReport) -> dict[str, Any]:
    """Return plain values for json.dumps; rates from 0 to 1, null where nothing was recorded."""
    values = asdict(report)
    return {
        "format": FORMAT,
        "version": DOCUMENT_VERSION,
        **values["setup"],
        "slots": [layer.n_slots for layer in report.layers],
        "coverage": report.coverage,
        "n_tokens": report.n_tokens,
        **_rates(report.served),
        "warm_after": report.warm_after,
        "decoded_together": [
            {"n_sequences": n, **_rate(tally)} for n, tally in report.together.items()
        ],
        "cache": values["counters"],
        "host_pool": values["pool"],
        "copies": values["copies"],
        "predictions": values["predictions"],
        "layers": [
            {
                "layer": layer.layer,
                "n_slots": layer.n_slots,
                **_rates(layer.served),
                "pinned": list(layer.pinned),
                "top": [{"expert": expert, "n_uses": uses} for expert, uses in layer.top],
            }
            for layer in report.layers
        ],
    }


def _rates(served: Served) -> dict[str, Any]:
    total, before, after = (tally and _rate(tally) for tally in served)
    return {**(total or {}), "before_warm_pinning": before, "after_warm_pinning": after}


def _rate(tally: Tally) -> dict[str, Any]:
    return {**tally._asdict(), "hit_rate": tally.hit_rate}


def as_text(report: ExpertReport) -> str:
    """Return lines that end with a newline; the table at the end has one per layer."""
    return "\n".join([*_summary(report), "", *_table(report)]) + "\n"


def _summary(report: ExpertReport) -> Iterator[str]:
    setup = report.setup
    name = "".join(sign if sign.isprintable() else "?" for sign in setup.model)
    yield from (FORMAT, f"model       {name} ({setup.architecture})", f"device      {setup.device}")
    if not report.layers:
        yield "experts     none: the model is dense"
        return
    yield (
        f"experts     {len(report.layers)} layers of {setup.n_experts}, "
        f"{setup.n_used} used per token and layer"
    )
    yield f"placement   {_placement(report)}"
    if setup.host_slots:
        n_all = len(report.layers) * setup.n_experts
        others = ", the others on the device" if setup.exchanges else ""
        where = f"in the host pool at a time{others}"
        yield f"            {setup.host_slots} of {n_all} experts {where}"
    if setup.executor == "stepped":
        yield "executor    stepped: it stops at each router"
    yield f"tokens      {report.n_tokens}"
    total, before, after = report.served
    yield f"hit rate    {_of(total, setup)}"
    if before is not None and after is not None:
        yield f"            before warm-pinning, {report.warm_after} tokens: {_of(before, setup)}"
        yield f"            after warm-pinning: {_of(after, setup)}"
    if max(report.together, default=1) > 1:
        for n, tally in report.together.items():
            what = "one sequence decoded alone" if n == 1 else f"{n} sequences decoded together"
            yield f"            {what}: {_of(tally, setup)}"
    if report.counters is not None:
        yield from _cache(report.counters, report.n_tokens, setup)
    if report.copies is not None:
        yield f"overlap     {report.copies}"
    if report.counters is not None:
        yield f"guesses     {_guesses(report)}"
    if (pool := report.pool) is not None:
        yield f"host pool   {_pool(pool)}"
        if pool.hidden is not None:
            share, took = _percent(pool.hidden), _milliseconds(pool.read_ns)
            yield f"            {share} of {took} of reading was hidden behind computing"


def _cache(c: CacheCounters, n_tokens: int, setup: Setup) -> Iterator[str]:
    guessed = f", {c.n_hinted} of them guessed" if c.n_hinted else ""
    if setup.experts_in == "cache":
        yield (
            f"cache       {c.n_uploads} experts uploaded ({_mib(c.upload_bytes)}){guessed}, "
            f"{c.n_evictions} evicted, {c.n_failed_uploads} uploads failed, "
            f"{c.n_table_writes} table writes"
        )
    if c.n_written_back:
        written = f"{c.n_written_back} experts written back ({_mib(c.written_back_bytes)})"
        yield f"            {written} to host memory, so that they could leave"
    if c.n_landed:
        yield f"            {c.n_landed} experts kept on the device as they were read"
    if c.n_cancelled:
        yield f"            {c.n_cancelled} uploads taken back, out of date before they began"
    per_token = f", {_mib(c.missed_bytes / n_tokens, 2)} per token" if n_tokens else ""
    where = "computed by the CPU" if setup.cpu_layers else "read from host memory"
    yield f"misses      {_mib(c.missed_bytes)} {where}{per_token}"
    if c.stall_ns:
        each = f", {_milliseconds(c.stall_ns / n_tokens, 3)} per token" if n_tokens else ""
        yield f"waiting     {_milliseconds(c.stall_ns)} for uploads{each}"


def _guesses(report: ExpertReport) -> str:
    guesses = report.predictions
    if guesses is None:
        ahead = report.pool is not None and report.pool.n_hinted > 0
        return "experts fetched to the host pool only" if ahead else "no experts fetched"
    return (
        f"{guesses.n_hinted} experts fetched ({_mib(guesses.hinted_bytes)}), "
        f"{_percent(guesses.n_right / guesses.n_hinted)} of them used at once"
    )


def _pool(p: PoolCounters) -> str:
    rate = f"{_percent(p.n_hits / p.n_uses)} of {p.n_uses} uses" if p.n_uses else "no uses yet"
    guessed = (
        f", {p.n_hinted} of them guessed ({_percent(p.n_right / p.n_hinted)} used at once)"
        if p.n_hinted
        else ""
    )
    failed = f", {p.n_failed} failed" if p.n_failed else ""
    return (
        f"{rate} served; {p.n_reads} experts read from the file "
        f"({_mib(p.read_bytes)}){guessed}{failed}; waited {_milliseconds(p.stall_ns)}"
    )


def _placement(report: ExpertReport) -> str:
    setup = report.setup
    if setup.experts_in == "device":
        return f"all experts in {setup.hits_from} (coverage 100.0 %)"
    if setup.experts_in == "cpu":
        layers = f"{setup.cpu_layers} of {len(report.layers)} layers"
        return f"the CPU computes those of {layers} (coverage {_percent(report.coverage)})"
    if setup.experts_in == "host":
        what = "those" if setup.host_slots else "all experts"
        return f"{what} in host memory are read in place (coverage 0.0 %)"
    slots = [layer.n_slots for layer in report.layers]
    each = f"{slots[0]}" if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
    shared = ", shared between layers" if setup.allocation == "global" else ""
    name, others = "cache", ""
    if setup.cpu_layers:
        name, others = "hybrid", ", the CPU computes the others"
    return (
        f"{name}, policy {setup.policy}, {each} slots per layer{shared}{others} "
        f"(coverage {_percent(report.coverage)})"
    )


def _table(report: ExpertReport) -> Iterator[str]:
    if not report.layers:
        return
    rows = [["layer", "slots", "uses", "hit rate", "before", "after", "pinned", "most used (uses)"]]
    for layer in report.layers:
        rates = [_percent(tally.hit_rate if tally else None) for tally in layer.served]
        pinned = " ".join(map(str, layer.pinned)) or "-"
        top = ", ".join(f"{expert} ({n_uses})" for expert, n_uses in layer.top) or SILENT
        counts = str(layer.layer), str(layer.n_slots), str(layer.served.total.n_uses)
        rows.append([*counts, *rates, pinned, top])
    yield from table(rows, n_left=2)


def table(rows: Sequence[Sequence[str]], n_left: int = 0) -> Iterator[str]:
    """Lay out columns two blanks apart, aligned to the right, the last `n_left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">"] * (len(widths) - n_left) + ["<"] * n_left
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


def as_lines(report: ExpertReport) -> list[str]:
    """Return the lines at the end of a command: one on the cache and one on a small host pool."""
    lines, counters = [], report.counters
    if counters is not None and report.setup.experts_in == "cache" and report.n_tokens:
        lines.append(
            f"experts: {_of(report.served.total, report.setup)}, "
            f"{_mib(counters.missed_bytes / report.n_tokens, 2)} "
            f"{'computed by the CPU' if report.setup.cpu_layers else 'read through'} per token, "
            f"{_mib(counters.upload_bytes)} uploaded"
        )
    if report.pool is not None:
        lines.append(f"host pool: {_pool(report.pool)}")
    return lines


def _of(tally: Tally, setup: Setup) -> str:
    if tally.hit_rate is None:
        return SILENT
    return f"{_percent(tally.hit_rate)} of {tally.n_uses} uses served from {setup.hits_from}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _mib(n_bytes: float, digits: int = 1) -> str:
    return f"{n_bytes / 2**20:.{digits}f} MiB"


def _milliseconds(time_ns: float, digits: int = 1) -> str:
    return f"{time_ns / 1e6:.{digits}f} ms"
