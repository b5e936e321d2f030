"""This module draws what a benchmark found, from its document.

It owns colours, axes and words of the pictures. It needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ to any colour vision (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
CLOCKS = {"gpu_timestamp": "GPU clock", "wall": "wall", "host_wall": "wall"}
BAR_INCHES, FRAME_INCHES = 0.22, 1.6
MOST_TEXT = 72  # characters of a bar's name
DPI, MOST_PIXELS = 140, 65000  # of a picture; Agg draws less than 2**16 in either direction


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture; the ending of `path` says in which format. Raises OSError."""
    # No window is opened, and a backend that is not there would keep matplotlib from loading.
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure

    results, card = document["results"], document["card"]
    figure = Figure(layout="constrained")
    {"kernels": _kernels, "transfer": _transfer, "decode": _decode}[document["benchmark"]](
        figure, results
    )
    copy = results["roofline"]["rows"][0]["value"]["median"]
    figure.suptitle(
        f"vkmoe bench {document['benchmark']}: {ascii(card['device'])[1:-1]}\n"
        f"{ascii(card['driver'])[1:-1]}; copy within device memory {copy:.3g} GB/s; "
        f"clock: {results['roofline']['latency_mode']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=min(DPI, MOST_PIXELS / max(figure.get_size_inches())))


def _kernels(figure: Figure, results: Mapping[str, Any]) -> None:
    """Draw the share of the roofline that each kernel reaches, coloured by family."""
    kernels = results["kernels"]
    figure.set_size_inches(10, FRAME_INCHES + BAR_INCHES * len(kernels))
    families = list(dict.fromkeys(_family(kernel) for kernel in kernels))
    shares = np.array([100 * kernel["share_of_roofline"] for kernel in kernels])
    spans = [[100 * kernel["share_of_roofline"] * kernel["us"]["median"] / kernel["us"][end]
              for kernel in kernels] for end in ("high", "low")]  # fmt: skip
    names = [f"{kernel['variant'].partition('+')[0]}, {kernel['shape']}" for kernel in kernels]
    texts = [_speed(kernel) for kernel in kernels]
    colours = [COLOURS[families.index(_family(kernel)) % len(COLOURS)] for kernel in kernels]
    axes = figure.subplots()
    _bars(axes, names, shares, np.array(spans), colours, texts)
    axes.axvline(100, color="0.3", lw=0.8, ls="--")
    models = dict.fromkeys(kernel["model"] for kernel in kernels)
    axes.set_title(f"Kernels in the shapes of {ascii(', '.join(models))[1:-1]}", fontsize=9)
    axes.set_xlabel("share of the roofline (%): the least time possible / the time taken")


def _family(kernel: Mapping[str, Any]) -> str:
    return str(kernel["variant"].partition("+")[0].partition(".")[0])


def _speed(kernel: Mapping[str, Any]) -> str:
    us = kernel["us"]["median"]
    time = f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} us"
    speed = kernel["gb_per_s"]
    return f"{time}, {speed['median']:.2g} GB/s" if speed and us >= 1000 else time


def _transfer(figure: Figure, results: Mapping[str, Any]) -> None:
    """Draw speed by size for copies, and a bar for every other speed."""
    others = {
        part: rows
        for part, section in results.items()
        if (rows := [row for row in section["rows"] if row["unit"] == "GB/s"]) and part != "copies"
    }
    coloured = zip(COLOURS, others.items(), strict=False)
    bars = [(colour, part, row) for colour, (part, rows) in coloured for row in rows]
    figure.set_size_inches(14 if "copies" in results else 9, 2 + BAR_INCHES * max(len(bars), 12))
    if "copies" in results:
        left, right = figure.subplots(1, 2)
        _copies(left, results["copies"]["rows"])
    else:
        right = figure.subplots()
    rows = [row for *_, row in bars]
    values, spans = _values(rows)
    names = [f"{part}: {row['what']} ({CLOCKS[row['mode']]})" for _, part, row in bars]
    texts = [f"{value:.3g}" for value in values]
    colours = [colour for colour, *_ in bars]
    right.set_xscale("log")
    _bars(right, names, values, spans, colours, texts)
    right.set(xlabel="GB/s, with the 95 % interval of the median", title="Other speeds")


def _copies(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    ways = list(dict.fromkeys(row["what"].rpartition(", ")[0] for row in rows))
    axes.set_xscale("log", base=2)
    for index, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
        own = [row for row in rows if row["what"].startswith(way)]
        sizes = np.array([float(row["what"].rpartition(", ")[2].split()[0]) for row in own])
        values, spans = _values(own)
        errors = np.abs(spans - values)
        places = sizes * 1.04**index  # beside each other
        axes.errorbar(places, values, errors, fmt="o-", color=colour, capsize=3, label=way, ms=4)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="size of the copy (MiB)", ylabel="GB/s (wall clock, submit and wait)",
             title="Copies by size", ylim=(0, None))  # fmt: skip
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _decode(figure: Figure, results: Mapping[str, Any]) -> None:
    """Draw the repeats, their median with its interval, and what the roofline allows."""
    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    row, values = results["rows"][0], results["values"]
    median, low, high = (row["value"][name] for name in ("median", "low", "high"))
    repeats = np.arange(1, len(values) + 1)
    axes.axhspan(low, high, color=COLOURS[0], alpha=0.15, label="95 % interval of the median")
    axes.axhline(median, color=COLOURS[0], label=f"median: {median:.3g} tok/s")
    axes.plot(repeats, values, "o", color=COLOURS[1], label=f"{results['tokens']} tokens each")
    bound = median / results["share_of_roofline"]
    axes.set(
        xlabel="repeat",
        ylabel="decoded tokens per second",
        title=f"{ascii(results['model'])[1:-1]}, {results['model_bytes'] / 1e6:,.0f} MB: "
        f"{results['share_of_roofline']:.1%} of the {bound:,.4g} tok/s the roofline allows",
        ylim=(0, 1.25 * max(*values, high)),
    )
    axes.title.set_fontsize(9)
    axes.set_xticks(repeats)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")


def _values(rows: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return medians [n], and the ends of their intervals [2, n]."""
    values = np.array([row["value"]["median"] for row in rows])
    return values, np.array([[row["value"][end] for row in rows] for end in ("low", "high")])


def _bars(
    axes: Axes,
    names: Sequence[str],
    values: Any,
    spans: Any,
    colours: Sequence[str],
    texts: Sequence[str],
) -> None:
    """Draw horizontal bars, the first on top, with intervals and a text behind each.

    On a logarithmic axis, where lengths mean nothing, they are points.
    """
    places = np.arange(len(names))
    errors = np.abs(spans - values)
    if axes.get_xscale() == "linear":
        axes.barh(places, values, 0.72, color=colours)
    else:
        axes.scatter(values, places, 36, colours, zorder=3)
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor="0.2", lw=0.8, alpha=0.7)
    axes.set_yticks(places, [_cut(name) for name in names], fontsize=7)
    for place, end, text in zip(places, np.maximum(values, spans[1]), texts, strict=True):
        axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=7)  # fmt: skip
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.18)
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.25)


def _cut(text: str) -> str:
    plain = ascii(text)[1:-1]
    return plain if len(plain) <= MOST_TEXT else plain[: MOST_TEXT - 3] + "..."
