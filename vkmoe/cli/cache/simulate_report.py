"""This module says what `vkmoe simulate` found: as a table, as values for JSON, and as a picture.

It owns words, units and columns; the figures are those of a Sweep. The picture needs matplotlib,
the extra `plot`.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import PolicyName
from vkmoe.experts.records.report import table
from vkmoe.experts.records.trace import Trace
from vkmoe.experts.study.replay import Rung, SimulationResult, Sweep, bend_of_curve, misses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    if trace.n_text:
        yield (
            f"{trace.n_tokens - trace.n_text} of these are guesses that are wrong; bytes are those "
            f"of a token of the text"
        )


def _hit_lines(sweep: Sweep) -> Iterator[str]:
    twice = 2 * sweep.trace.header.n_used
    yield from _policy_lines(sweep, twice)
    yield ""
    yield from _chosen_lines(sweep, twice)
    if twice in (rung.slots for rung in sweep.rungs):
        yield "* twice the experts of a token: a rule of thumb for any text (arXiv:2505.16056)"


def _policy_lines(sweep: Sweep, twice: int) -> Iterator[str]:
    yield from _wrapped(
        "Hit rate in %, each layer with slots of its own, by policy; exact is a forecast that "
        "knows the experts of each next token before it runs, best is Belady's optimum, which "
        "knows the future."
    )
    rows = []
    for rung in sweep.rungs:
        share = f"{100 * rung.slots / sweep.trace.header.n_experts:.0f} %"
        rates = map(_percent, [*rung.own.values(), rung.exact])
        rows.append([_slots(rung, twice), share, *rates, _best(rung, sweep)])
    yield from _columns(["slots", "of all", *sweep.rungs[0].own, "exact", "best"], rows)
    if sweep.trace.ids is None and "forecast" in sweep.rungs[0].own:
        yield from _wrapped(
            "These traces do not name their tokens, so that the forecast goes by how often experts "
            "were used. `vkmoe trace --with-ids` makes such that do."
        )


def _chosen_lines(sweep: Sweep, twice: int) -> Iterator[str]:
    yield from _wrapped(
        f"With {sweep.main}: hits, and those if layers with experts of one size "
        "share their slots (--expert-allocation global); bytes per token read in place, and copied "
        "into slots."
    )
    rows = []
    for rung in sweep.rungs:
        sizes = _size(rung.chosen.read_bytes), _size(rung.chosen.copied_bytes)
        rows.append([_slots(rung, twice), _percent(rung.chosen), _percent(rung.shared), *sizes])
    yield from _columns(["slots", "hits", "shared", "read", "copied"], rows)


def _columns(titles: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield from (f"  {line}" for line in table([titles, *rows]))


def _slots(rung: Rung, twice: int) -> str:
    return f"{'* ' if rung.slots == twice else ''}{rung.slots:3}"


def _percent(result: SimulationResult) -> str:
    return f"{100 * result.hit_rate:.1f}"


def _best(rung: Rung, sweep: Sweep) -> str:
    return f"{100 * rung.own_best.sum() / sweep.trace.routing.size:.1f}"


def _advice_lines(sweep: Sweep) -> Iterator[str]:
    header, slots = sweep.trace.header, bend_of_curve(sweep)
    if slots is None:
        advice = (
            f"{_counted(sweep.trace.n_tokens, 'token')}: too short a trace to suggest a number of "
            f"slots. Record {_GOOD_LENGTH} or more."
        )
    elif slots == header.n_experts:
        advice = (
            f"No number of slots stands out: fewer than all {slots} serve no larger share of the "
            "uses than of the experts. Give as many as fit."
        )
    else:
        size = _size(slots * sum(header.span_bytes))
        advice = (
            f"Suggested by this trace: --expert-slots {slots} ({size}), "
            f"{100 * sweep.curve[slots].hit_rate:.0f} % hits with {sweep.main}. Up to there a "
            "slot brings more than an average one, beyond it less."
        )
    yield from _wrapped(advice)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _wrapped(text: str) -> list[str]:
    """Break `text` into lines that fit on a terminal."""
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False)


def _size(n_bytes: float) -> str:
    """Show bytes in at most nine characters."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size * 1000 / 1024:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes / 2**10:.1f} KiB"


# ----- the same for JSON -----


def as_document(sweep: Sweep) -> dict[str, Any]:
    """Make the values of all that was found, by layer too; hit rates from 0 to 1.

    A value is None where the trace is too short for it.
    """
    trace, header = sweep.trace, sweep.trace.header
    return {
        **asdict(header),
        "n_tokens": trace.n_tokens,
        "n_prompt_tokens": int(trace.is_prompt.sum()),
        "n_sequences": len(trace.starts),
        "main_policy": sweep.main,
        "names_tokens": trace.ids is not None,
        "bend_of_curve": bend_of_curve(sweep),
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
        "chosen": _result_values(rung.chosen, rung.own_best),
        "exact": _result_values(rung.exact, rung.own_best),
        "global": {
            "belady": _hit_values(rung.shared_best, trace),
            "chosen": _result_values(rung.shared, rung.shared_best),
        },
    }


def _result_values(result: SimulationResult, best: Counts) -> dict[str, Any]:
    return {
        **_hit_values(result.layer_hits, result.trace),
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


# ----- the picture -----

# Colours that differ to any colour vision (Okabe and Ito's palette): the policies, in turn.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
CAUSES = {  # fields of Misses: label and colour
    "compulsory": ("first use", "#999999"),
    "capacity": ("too few slots", "#56B4E9"),
    "policy": ("what was decided", "#D55E00"),
}


def draw(sweep: Sweep, path: Path) -> None:
    """Write the picture; the ending of `path` says in which format. Raises OSError."""
    # No window is opened, and a backend that is not there would keep matplotlib from loading.
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    header = sweep.trace.header
    figure.suptitle(
        f"{ascii(header.model[:60])[1:-1]}: {header.n_used} of {header.n_experts} experts per token"
        f"\nMoE layers: {header.n_layers}, tokens: {sweep.trace.n_tokens}"
    )
    _hit_rates(left, sweep)
    _causes(right, sweep)
    figure.savefig(path, dpi=140)


def _hit_rates(axes: Axes, sweep: Sweep) -> None:
    header, rungs = sweep.trace.header, sweep.rungs
    slots = [rung.slots for rung in rungs]
    n_uses = sweep.trace.n_tokens * header.n_used
    best = [100 * rung.own_best.mean() / n_uses for rung in rungs]
    axes.plot(slots, best, "k--", label="best possible (Belady)")
    axes.fill_between(slots, best, 100, color="0.93", linewidth=0)
    colours = dict(zip(get_args(PolicyName), cycle(COLOURS), strict=False))
    for policy in rungs[0].own:
        rates = [100 * rung.own[policy].hit_rate for rung in rungs]
        axes.plot(slots, rates, "o-", color=colours[policy], label=policy, markersize=4)
    worst = [100 * rung.chosen.worst_rate for rung in rungs]
    shared = [100 * rung.shared.hit_rate for rung in rungs]
    name, colour = sweep.main, colours[sweep.main]
    axes.plot(slots, worst, "v:", color=colour, label=f"{name}, worst layer", markersize=4)
    axes.plot(slots, shared, "+-.", color=colour, label=f"{name}, slots shared", alpha=0.7)
    axes.plot([0, header.n_experts], [0, 100], color="0.6", lw=0.8, label="experts picked blindly")
    axes.axvline(2 * header.n_used, color="0.4", lw=0.8, ls=(0, (1, 2)))
    axes.annotate(
        "2 x active", (2 * header.n_used, 2), xytext=(3, 0), textcoords="offset points", fontsize=8
    )
    bend = bend_of_curve(sweep)
    if bend not in (None, header.n_experts):
        height = 100 * sweep.curve[bend].hit_rate
        axes.plot([bend], [height], "o", mfc="none", mec="k", markersize=11, label="suggested")
    axes.set(
        xlabel=f"slots per layer (of {header.n_experts})",
        ylabel="hit rate (% of expert uses)",
        title="Hit rate by slots",
        xlim=(0, header.n_experts * 1.02),
        ylim=(0, 101),
    )
    axes.set_xticks(slots)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")


def _causes(axes: Axes, sweep: Sweep) -> None:
    """Draw the misses of what was chosen by cause, as stacked bars."""
    n_uses = sweep.trace.routing.size
    splits = [misses(rung.chosen, rung.own_best) for rung in sweep.rungs]
    places, bottom = np.arange(len(splits)), np.zeros(len(splits))
    for name, (label, colour) in CAUSES.items():
        heights = np.array([100 * getattr(split, name) / n_uses for split in splits])
        heights = np.maximum(heights, 0)  # pins can beat what is best on demand
        axes.bar(places, heights, 0.7, bottom, color=colour, label=label)
        bottom += heights
    axes.set_xticks(places, [str(rung.slots) for rung in sweep.rungs])
    axes.set(
        xlabel="slots per layer",
        ylabel="misses (% of expert uses)",
        title=f"Why {sweep.main} misses",
    )
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8)
