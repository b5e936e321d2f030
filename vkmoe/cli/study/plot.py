"""This module draws the picture of `vkmoe simulate --plot`: hit rates by slots, causes of misses.

It needs matplotlib, the extra `plot`; nothing else imports that.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vkmoe.experts.study.replay import Sweep, bend_of_curve, misses

__all__ = ["draw"]

# Colours that differ to any colour vision (Okabe and Ito's palette).
COLOURS = {"lru": "#0072B2", "slru": "#D55E00", "lfru": "#009E73"}
CAUSES = {"first use": "#999999", "too few slots": "#56B4E9", "policy": "#D55E00"}


def draw(sweep: Sweep, path: Path) -> None:
    """Write the picture; the ending of `path` says in which format. Raises OSError."""
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
    for policy in rungs[0].own:
        rates = [100 * rung.own[policy].hit_rate for rung in rungs]
        axes.plot(slots, rates, "o-", color=COLOURS[policy], label=policy, markersize=4)
    main = COLOURS[sweep.main]
    worst = [100 * rung.own[sweep.main].worst_rate for rung in rungs]
    shared = [100 * rung.shared.hit_rate for rung in rungs]
    axes.plot(slots, worst, "v:", color=main, label=f"{sweep.main}, worst layer", markersize=4)
    axes.plot(slots, shared, "+-.", color=main, label=f"{sweep.main}, slots shared", alpha=0.7)
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
    """Draw the misses of the main policy by cause, as stacked bars."""
    n_uses = sweep.trace.routing.size
    splits = [misses(rung.own[sweep.main], rung.own_best) for rung in sweep.rungs]
    places, bottom = np.arange(len(splits)), np.zeros(len(splits))
    for cause, name in zip(CAUSES, ("compulsory", "capacity", "policy"), strict=True):
        heights = np.array([100 * getattr(split, name) / n_uses for split in splits])
        heights = np.maximum(heights, 0)  # pins can beat what is best on demand
        axes.bar(places, heights, 0.7, bottom, color=CAUSES[cause], label=cause)
        bottom += heights
    axes.set_xticks(places, [str(rung.slots) for rung in sweep.rungs])
    axes.set(
        xlabel="slots per layer",
        ylabel="misses (% of expert uses)",
        title=f"Why {sweep.main} misses",
    )
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8)
