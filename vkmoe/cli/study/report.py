"""This module says what `vkmoe simulate` found: as a table for people, and as values for JSON.

It owns words, units and columns; the figures are those of a Sweep.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.settings import recommended_slots
from vkmoe.experts.study.replay import (
    Rung,
    SimulationResult,
    Sweep,
    bend_of_curve,
    misses,
)
from vkmoe.experts.study.trace import Trace

__all__ = ["as_document", "as_text"]

_WIDTH = 80
_GOOD_LENGTH = 500  # tokens; the first use of each expert counts for little by then

Counts = NDArray[np.int64]


def as_text(sweep: Sweep) -> str:
    """Write the table and what follows from it, in lines of 80 columns."""
    parts = [_trace_lines(sweep.trace), _hit_lines(sweep), _advice_lines(sweep)]
    return "\n".join("\n".join(lines) + "\n" for lines in parts)


# ----- the parts of the text -----


def _trace_lines(trace: Trace) -> Iterator[str]:
    header = trace.header
    n_prompt = int(trace.is_prompt.sum())
    sequences = f" in {len(trace.starts)} sequences" if len(trace.starts) > 1 else ""
    yield from _wrapped(
        f"{ascii(header.model[:60])[1:-1]}: {_counted(header.n_layers, 'MoE layer')}, "
        f"{header.n_used} of {_counted(header.n_experts, 'expert')} per token"
    )
    yield (
        f"{_counted(trace.n_tokens, 'token')}{sequences}: {n_prompt} of prompts, "
        f"{trace.n_tokens - n_prompt} of replies"
    )


def _hit_lines(sweep: Sweep) -> Iterator[str]:
    policies, n_experts = list(sweep.rungs[0].own), sweep.trace.header.n_experts
    yield from _wrapped(
        "Hit rate in %, each layer with slots of its own; best is Belady's optimum, which knows "
        f"the future. With {sweep.main}: if layers with experts of one size share their slots "
        "(--expert-allocation global); bytes per token read in place, and copied into slots."
    )
    titles = ["slots", "of all", *policies, "best", "shared", "read", "copied"]
    rows = []
    for rung in sweep.rungs:
        main, best = rung.own[sweep.main], rung.own_best.sum() / sweep.trace.routing.size
        rates = [*(result.hit_rate for result in rung.own.values()), best, rung.shared.hit_rate]
        marked = "* " if _is_rule_of_thumb(sweep, rung.slots) else ""
        coverage = f"{100 * rung.slots / n_experts:.0f} %"
        cells = [f"{marked}{rung.slots:3}", coverage, *(f"{100 * rate:.1f}" for rate in rates)]
        rows.append([*cells, _size(main.read_bytes), _size(main.copied_bytes)])
    yield from _table(titles, rows)
    if any(_is_rule_of_thumb(sweep, rung.slots) for rung in sweep.rungs):
        yield "* twice the experts of a token"


def _advice_lines(sweep: Sweep) -> Iterator[str]:
    header, slots = sweep.trace.header, bend_of_curve(sweep)
    least = recommended_slots(header.n_experts, header.n_used)
    if slots is None:
        yield from _wrapped(
            f"{_counted(sweep.trace.n_tokens, 'token')}: too short a trace to suggest a number of "
            f"slots. Record {_GOOD_LENGTH} or more."
        )
    elif slots == header.n_experts:
        yield from _wrapped(
            f"No number of slots stands out: fewer than all {slots} serve no larger share of the "
            "uses than of the experts. Give as many as fit."
        )
    else:
        size = _size(slots * sum(header.span_bytes))
        yield from _wrapped(
            f"Suggested by this trace: --expert-slots {slots} ({size}), "
            f"{100 * sweep.curve[slots].hit_rate:.0f} % hits with {sweep.main}. Up to there a slot "
            "brings more than an average one, beyond it less."
        )
    yield from _wrapped(
        f'The "recommended at least {least}" of `vkmoe info` and at the start of a run is a rule '
        "of thumb for any text, twice the experts of a token (arXiv:2505.16056)."
    )


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _wrapped(text: str) -> list[str]:
    """Break `text` into lines that fit on a terminal."""
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False)


def _table(titles: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Lay out columns as narrow as their cells, two blanks before each."""
    table = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "".join(f"  {cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def _size(n_bytes: float) -> str:
    """Show bytes in at most nine characters."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size * 1000 / 1024:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes / 2**10:.1f} KiB"


def _is_rule_of_thumb(sweep: Sweep, slots: int) -> bool:
    return slots == 2 * sweep.trace.header.n_used


# ----- the same for JSON -----


def as_document(sweep: Sweep) -> dict[str, Any]:
    """Make the values of all that was found, by layer too; hit rates from 0 to 1.

    A value is None where the trace is too short for it.
    """
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
        "bend_of_curve": bend_of_curve(sweep),
        "twice_active": 2 * header.n_used,
        "slots": [_rung_values(sweep, rung) for rung in sweep.rungs],
    }


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
    return {
        **_hit_values(result.layer_hits, result.trace),
        "decode_hit_rate": result.decode_rate,
        "misses": misses(result, best)._asdict(),
        "read_bytes_per_token": result.read_bytes,
        "copied_bytes_per_token": result.copied_bytes,
        "n_landed": result.n_landed,
    }


def _hit_values(hits: Counts, trace: Trace) -> dict[str, Any]:
    rates = hits / (trace.n_tokens * trace.header.n_used)
    return {
        "hit_rate": float(rates.mean()),
        "worst_layer_hit_rate": float(rates.min()),
        "hits_per_layer": hits.tolist(),
    }
