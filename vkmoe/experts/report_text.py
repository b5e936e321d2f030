"""The statistics of `--expert-stats` as text for people. The figures are those of report.py."""

from __future__ import annotations

from collections.abc import Iterator

from vkmoe.experts.records.profiler import CacheCounters, PoolCounters, Tally
from vkmoe.experts.report import CopyTimes, ExpertReport, LayerReport

__all__ = ["as_text"]

SILENT = "(no accesses recorded)"


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
    if setup.host_places:
        n_all = len(report.layers) * setup.n_experts
        yield f"            {setup.host_places} of {n_all} experts in the host pool at a time"
    if setup.executor == "stepped":
        yield "executor    stepped: it stops at each router"
    yield f"tokens      {report.n_tokens}"
    yield f"hit rate    {_of(report.total)}"
    if report.before is not None and report.after is not None:
        yield f"            before warm-pinning, {report.warm_after} tokens: {_of(report.before)}"
        yield f"            after warm-pinning: {_of(report.after)}"
    if report.counters is not None:
        yield from _cache(report.counters, report.n_tokens, setup.experts_in == "cache")
    if report.copies is not None:
        yield f"overlap     {_overlap(report.copies)}"
    if report.counters is not None:
        yield f"guesses     {_guesses(report)}"
    if report.pool is not None:
        yield from _pool(report.pool)


def _cache(c: CacheCounters, n_tokens: int, has_slots: bool) -> Iterator[str]:
    guessed = f", {c.n_hinted} of them guessed" if c.n_hinted else ""
    if has_slots:
        yield (
            f"cache       {c.n_uploads} experts uploaded ({_mib(c.upload_bytes)}){guessed}, "
            f"{c.n_evictions} evicted, {c.n_failed_uploads} uploads failed, "
            f"{c.n_table_writes} table writes"
        )
    if c.n_landed:
        yield f"            {c.n_landed} experts kept on the device as they were read"
    if c.n_cancelled:
        yield f"            {c.n_cancelled} uploads taken back, out of date before they began"
    per_token = f", {_mib(c.missed_bytes / n_tokens, 2)} per token" if n_tokens else ""
    yield f"misses      {_mib(c.missed_bytes)} read from host memory{per_token}"
    if c.stall_ns:
        yield f"waiting     {_milliseconds(c.stall_ns)} for uploads{_each(c.stall_ns, n_tokens)}"


def _guesses(report: ExpertReport) -> str:
    predictor, guesses = report.setup.predictor or "none", report.predictions
    if guesses is None:
        ahead = report.pool is not None and report.pool.n_hinted > 0
        found = "experts fetched to the host pool only" if ahead else "no experts fetched"
        return predictor if predictor == "none" else f"{predictor}: {found}"
    return (
        f"{predictor}: {guesses.n_hinted} experts fetched ({_mib(guesses.hinted_bytes)}), "
        f"{_percent(guesses.n_right / guesses.n_hinted)} of them used at once"
    )


def _overlap(copies: CopyTimes) -> str:
    if copies.hidden is None:
        return f"unknown: {copies.reason}"
    return f"{_percent(copies.hidden)} of {_milliseconds(copies.copied_ns)} of copying was hidden"


def _pool(p: PoolCounters) -> Iterator[str]:
    rate = f"{_percent(p.n_hits / p.n_uses)} of {p.n_uses} uses" if p.n_uses else "no uses yet"
    guessed = f", {p.n_hinted} of them guessed" if p.n_hinted else ""
    right = f" ({_percent(p.n_right / p.n_hinted)} used at once)" if p.n_hinted else ""
    failed = f", {p.n_failed} failed" if p.n_failed else ""
    yield (
        f"host pool   {rate} served; {p.n_reads} experts read from the file "
        f"({_mib(p.read_bytes)}){guessed}{right}{failed}; waited {_milliseconds(p.stall_ns)}"
    )
    if p.hidden is not None:
        share, took = _percent(p.hidden), _milliseconds(p.read_ns)
        yield f"            {share} of {took} of reading was hidden behind computing"


def _placement(report: ExpertReport) -> str:
    setup = report.setup
    if setup.experts_in == "device":
        return "all experts in device memory (coverage 100.0 %)"
    if setup.experts_in == "host":
        who = "those" if setup.host_places else "all experts"
        return f"{who} in host memory are read in place (coverage 0.0 %)"
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


def _mib(n_bytes: float, digits: int = 1) -> str:
    return f"{n_bytes / 2**20:.{digits}f} MiB"


def _milliseconds(time_ns: int) -> str:
    return f"{time_ns / 1e6:.1f} ms"


def _each(time_ns: int, n_tokens: int) -> str:
    return f", {time_ns / 1e6 / n_tokens:.3f} ms per token" if n_tokens else ""
