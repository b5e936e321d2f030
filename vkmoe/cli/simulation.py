"""What `vkmoe simulate` found, as tables for people and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.locality import SEGMENT, SHARES, Locality
from vkmoe.experts.simulate import Misses, SimulationResult, misses
from vkmoe.experts.sweep import Rung, Sweep, recommended_slots
from vkmoe.experts.trace import Trace

__all__ = ["as_document", "as_text"]

Counts = NDArray[np.int64]


def as_text(sweep: Sweep, local: Locality) -> str:
    """Tables and figures; hit rates in percent of the uses."""
    parts = [
        _trace_lines(sweep.trace),
        _hit_lines(sweep),
        _sharing_lines(sweep),
        _miss_lines(sweep),
        _locality_lines(local, sweep.trace),
        _advice_lines(sweep),
    ]
    return "\n".join("\n".join(lines) + "\n" for lines in parts)


def as_document(sweep: Sweep, local: Locality) -> dict[str, Any]:
    """All of it, per layer too; hit rates from 0 to 1. None where a trace is too short."""
    trace, header = sweep.trace, sweep.trace.header
    return {
        "model": header.model,
        "architecture": header.architecture,
        "layer_numbers": list(header.layer_numbers),
        "n_experts": header.n_experts,
        "n_used": header.n_used,
        "span_bytes": list(header.span_bytes),
        "n_tokens": trace.n_tokens,
        "n_prompt_tokens": int(trace.is_prompt.sum()),
        "n_sequences": len(trace.starts),
        "main_policy": sweep.main,
        "recommended_slots": recommended_slots(sweep),
        "twice_active": 2 * header.n_used,
        "slots": [_rung_values(sweep, rung) for rung in sweep.rungs],
        "locality": _locality_values(local),
    }


# ----- tables -----


def _trace_lines(trace: Trace) -> Iterator[str]:
    header = trace.header
    n_prompt = int(trace.is_prompt.sum())
    prompts = f" in {len(trace.starts)} sequences" if len(trace.starts) > 1 else ""
    yield (
        f"{ascii(header.model[:60])[1:-1]}: {header.n_layers} MoE layers, {header.n_used} of "
        f"{header.n_experts} experts per token"
    )
    yield (
        f"{trace.n_tokens} tokens{prompts}: {n_prompt} of prompts, {trace.n_tokens - n_prompt} of "
        "replies"
    )


def _hit_lines(sweep: Sweep) -> Iterator[str]:
    policies = list(sweep.rungs[0].own)
    yield "Hit rate in %: all layers, and in brackets the worst. Each layer has its own slots."
    yield _row("slots", "of all", *policies, "best (Belady)", "read", "copied")
    for rung in sweep.rungs:
        result = rung.own[sweep.main]
        yield _row(
            _marked(sweep, rung.slots),
            f"{100 * rung.slots / sweep.trace.header.n_experts:.0f} %",
            *(_rates(rung.own[policy].layer_hits, sweep.trace) for policy in policies),
            _rates(rung.own_best, sweep.trace),
            _size(result.read_bytes),
            _size(result.copied_bytes),
        )
    yield "* twice the experts of a token"
    yield f"read, copied: bytes per token from host memory, in place and into slots ({sweep.main})"


def _sharing_lines(sweep: Sweep) -> Iterator[str]:
    yield f"The same with {sweep.main}, if layers with experts of one size share their slots."
    yield _row("slots", "of all", "own", "shared", "best (Belady)")
    for rung in sweep.rungs:
        yield _row(
            _marked(sweep, rung.slots),
            f"{100 * rung.slots / sweep.trace.header.n_experts:.0f} %",
            _rates(rung.own[sweep.main].layer_hits, sweep.trace),
            _rates(rung.shared.layer_hits, sweep.trace),
            _rates(rung.shared_best, sweep.trace),
        )


def _miss_lines(sweep: Sweep) -> Iterator[str]:
    policies = list(sweep.rungs[0].own)
    yield "Misses in % of the uses: the first of each expert, which no cache avoids; others that"
    yield "the best has too, for want of slots; and by policy what lies between it and the best."
    yield _row("slots", "first uses", "too few slots", *policies)
    for rung in sweep.rungs:
        splits = {policy: misses(rung.own[policy], rung.own_best) for policy in policies}
        main = splits[sweep.main]
        yield _row(
            _marked(sweep, rung.slots),
            _percent(main.compulsory, sweep.trace),
            _percent(main.capacity, sweep.trace),
            *(_percent(splits[policy].policy, sweep.trace) for policy in policies),
        )


def _locality_lines(local: Locality, trace: Trace) -> Iterator[str]:
    n = trace.header.n_experts
    shares = ", ".join(f"{100 * share:.0f} %" for share in SHARES)
    covering = " / ".join(f"{_mean(local.covering[share]):.1f}" for share in SHARES)
    yield "Locality of the routing, mean of the layers."
    if trace.n_tokens > len(trace.starts):
        yield (
            f"  adjacent tokens have {100 * _mean(local.overlap):.0f} % of their experts in common "
            f"(Jaccard; by chance {100 * local.overlap_by_chance:.0f} %; worst layer "
            f"{100 * float(np.nanmin(local.overlap)):.0f} %)"
        )
    yield f"  {shares} of the uses go to {covering} of {n} experts"
    if not np.isnan(local.reuse_distance).all():
        yield f"  an expert is used again after {_mean(local.reuse_distance):.1f} tokens (median)"
    sizes = [f"{_mean(size):.1f} in {n}" for n, size in [*local.working_set.items()][::2]]
    yield f"  different experts in so many tokens: {', '.join(sizes)}"
    if not np.isnan(local.consistency).all():
        yield (
            f"  routing consistency over {SEGMENT} tokens (SRP): {_mean(local.consistency):.2f}, "
            f"holding {_mean(local.consistency_size):.1f} times the experts of a token"
        )


def _advice_lines(sweep: Sweep) -> Iterator[str]:
    header, slots = sweep.trace.header, recommended_slots(sweep)
    rung = next(rung for rung in sweep.rungs if rung.slots == slots)
    rate = rung.own[sweep.main].hit_rate
    n_bytes = slots * sum(header.span_bytes)
    yield (
        f"Recommended: --expert-slots {slots} ({_size(n_bytes)}), {100 * rate:.0f} % hits with "
        f"{sweep.main}."
    )
    yield (
        "Beyond it a slot brings less than an average one. The rule of thumb, twice the experts of"
    )
    yield f"a token (arXiv:2505.16056), gives {2 * header.n_used}."


def _size(n_bytes: float) -> str:
    """Bytes as people read them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes / 2**10:,.1f} KiB"


def _row(first: str, *cells: str) -> str:
    return f"{first:>7}" + "".join(f"{cell:>15}" for cell in cells)


def _marked(sweep: Sweep, slots: int) -> str:
    return f"{'*' if slots == 2 * sweep.trace.header.n_used else ''} {slots:3}"


def _rates(hits: Counts, trace: Trace) -> str:
    rates = 100 * hits / (trace.n_tokens * trace.header.n_used)
    return f"{rates.mean():.1f} ({rates.min():.1f})"


def _percent(count: int, trace: Trace) -> str:
    return f"{100 * count / trace.routing.size:.1f}"


def _mean(values: NDArray[np.float64]) -> float:
    return float(np.nanmean(values))


# ----- values -----


def _rung_values(sweep: Sweep, rung: Rung) -> dict[str, Any]:
    trace = sweep.trace
    return {
        "slots": rung.slots,
        "coverage": rung.slots / trace.header.n_experts,
        "layer": {
            "belady": _hit_values(rung.own_best, trace),
            **{policy: _result_values(item, rung.own_best) for policy, item in rung.own.items()},
        },
        "global": {
            "belady": _hit_values(rung.shared_best, trace),
            sweep.main: _result_values(rung.shared, rung.shared_best),
        },
    }


def _result_values(result: SimulationResult, best: Counts) -> dict[str, Any]:
    split: Misses = misses(result, best)
    return {
        **_hit_values(result.layer_hits, result.trace),
        "decode_hit_rate": result.decode_rate,
        "misses": split._asdict(),
        "read_bytes_per_token": result.read_bytes,
        "copied_bytes_per_token": result.copied_bytes,
    }


def _hit_values(hits: Counts, trace: Trace) -> dict[str, Any]:
    rates = hits / (trace.n_tokens * trace.header.n_used)
    return {
        "hit_rate": float(rates.mean()),
        "worst_layer_hit_rate": float(rates.min()),
        "hits_per_layer": hits.tolist(),
    }


def _locality_values(local: Locality) -> dict[str, Any]:
    return {
        "overlap": _plain(local.overlap),
        "overlap_by_chance": local.overlap_by_chance,
        "covering": {str(share): _plain(values) for share, values in local.covering.items()},
        "reuse_distance": _plain(local.reuse_distance),
        "working_set": {str(window): _plain(size) for window, size in local.working_set.items()},
        "consistency": _plain(local.consistency),
        "consistency_size": _plain(local.consistency_size),
    }


def _plain(values: Iterable[float]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
