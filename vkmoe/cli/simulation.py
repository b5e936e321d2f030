"""What `vkmoe simulate` found, as tables for people; simulation_values.py has it for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vkmoe.cli.simulation_guesses import guess_cells, right_lines
from vkmoe.experts.decide.sizing import recommended_slots
from vkmoe.experts.study.accuracy import Accuracies
from vkmoe.experts.study.locality import SEGMENT, SHARES, Locality
from vkmoe.experts.study.replay import GUESSES, Sweep, bend_of_curve, misses
from vkmoe.experts.study.trace import Trace

__all__ = ["as_text"]

WIDTH = 80
GOOD_LENGTH = 500  # tokens; the first use of each expert counts for little by then

Counts = NDArray[np.int64]


def as_text(sweep: Sweep, local: Locality, right: Accuracies) -> str:
    """Tables and figures in lines of 80 columns; hit rates in percent of the uses."""
    parts = [
        _trace_lines(sweep.trace),
        _hit_lines(sweep),
        _sharing_lines(sweep),
        _miss_lines(sweep),
        _guess_lines(sweep, right),
        _locality_lines(local, sweep.trace),
        _advice_lines(sweep),
    ]
    return "\n".join("\n".join(lines) + "\n" for lines in parts)


# ----- the parts -----


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
    policies, trace = list(sweep.rungs[0].own), sweep.trace
    yield "Hit rate in %, of all layers and (the worst). Each layer has its own slots."
    yield from _table(
        ["slots", "of all", *policies, "best (Belady)"],
        [
            [
                _marked(sweep, rung.slots),
                f"{100 * rung.slots / trace.header.n_experts:.0f} %",
                *(_rates(rung.own[policy].layer_hits, trace) for policy in policies),
                _rates(rung.own_best, trace),
            ]
            for rung in sweep.rungs
        ],
    )
    if any(_is_rule_of_thumb(sweep, rung.slots) for rung in sweep.rungs):
        yield "* twice the experts of a token"


def _sharing_lines(sweep: Sweep) -> Iterator[str]:
    yield from _wrapped(
        f"The same with {sweep.main}, if layers with experts of one size share their slots "
        "(--expert-allocation global)."
    )
    yield from _table(
        ["slots", "own", "shared", "best (Belady)"],
        [
            [
                _marked(sweep, rung.slots),
                _rates(rung.own[sweep.main].layer_hits, sweep.trace),
                _rates(rung.shared.layer_hits, sweep.trace),
                _rates(rung.shared_best, sweep.trace),
            ]
            for rung in sweep.rungs
        ],
    )


def _miss_lines(sweep: Sweep) -> Iterator[str]:
    policies, rows = list(sweep.rungs[0].own), []
    yield from _wrapped(
        "Misses in % of the uses: the first of each expert, which no cache avoids; others that "
        "the best has too, for want of slots; and by policy what lies between it and the best. "
        f"Bytes per token, with {sweep.main}: read in place, copied into slots."
    )
    for rung in sweep.rungs:
        splits = {policy: misses(rung.own[policy], rung.own_best) for policy in policies}
        main = splits[sweep.main]
        rows.append(
            [
                _marked(sweep, rung.slots),
                _percent(main.compulsory, sweep.trace),
                _percent(main.capacity, sweep.trace),
                *(_percent(splits[policy].policy, sweep.trace) for policy in policies),
                _size(rung.own[sweep.main].read_bytes),
                _size(rung.own[sweep.main].copied_bytes),
            ]
        )
    yield from _table(["slots", "first uses", "too few slots", *policies, "read", "copied"], rows)


def _guess_lines(sweep: Sweep, right: Accuracies) -> Iterator[str]:
    yield from _wrapped(
        f"Experts guessed before they are needed (--expert-predictor), with {sweep.main}: hit rate "
        "in %, and in brackets the copies per 100 uses. First nobody is guessed, and each missed "
        "expert gets a slot (--no-expert-admission)."
    )
    yield from _table(
        ["slots", "no admission", *GUESSES],
        [[_marked(sweep, rung.slots), *guess_cells(rung)] for rung in sweep.rungs],
    )
    lines = list(right_lines(right))
    if lines:
        yield from _wrapped("Of as many guesses as a token uses experts, so many are right:")
        for line in lines:
            yield from _item(line)


def _locality_lines(local: Locality, trace: Trace) -> Iterator[str]:
    n = trace.header.n_experts
    shares = ", ".join(f"{100 * share:.0f} %" for share in SHARES)
    covering = " / ".join(f"{_mean(local.covering[share]):.1f}" for share in SHARES)
    yield "Locality of the routing, mean of the layers."
    if trace.n_tokens > len(trace.starts):
        yield from _item(
            f"adjacent tokens have {100 * _mean(local.overlap):.0f} % of their experts in common "
            f"(Jaccard; by chance {100 * local.overlap_by_chance:.0f} %; worst layer "
            f"{100 * float(np.nanmin(local.overlap)):.0f} %)"
        )
    yield from _item(f"{shares} of the uses go to {covering} of {_counted(n, 'expert')}")
    if not np.isnan(local.reuse_distance).all():
        yield from _item(
            f"an expert is used again after {_mean(local.reuse_distance):.1f} tokens (median)"
        )
    sizes = [f"{_mean(size):.1f} in {n}" for n, size in [*local.working_set.items()][::2]]
    yield from _item(f"different experts in so many tokens: {', '.join(sizes)}")
    if not np.isnan(local.consistency).all():
        yield from _item(
            f"routing consistency over {SEGMENT} tokens (SRP): {_mean(local.consistency):.2f}, "
            f"holding {_mean(local.consistency_size):.1f} times the experts of a token"
        )


def _advice_lines(sweep: Sweep) -> Iterator[str]:
    header, slots = sweep.trace.header, bend_of_curve(sweep)
    least = recommended_slots(header.n_experts, header.n_used)
    if slots is None:
        yield from _wrapped(
            f"{_counted(sweep.trace.n_tokens, 'token')}: too short a trace to suggest a number of "
            f"slots. Record {GOOD_LENGTH} or more."
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


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines of `text` that fit on a terminal."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _item(text: str) -> list[str]:
    return _wrapped(text, "  ", "    ")


def _table(titles: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Columns as narrow as their cells, two blanks before each."""
    table = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "".join(f"  {cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def _size(n_bytes: float) -> str:
    """Bytes as people read them, in at most nine characters."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size * 1000 / 1024:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes / 2**10:.1f} KiB"


def _marked(sweep: Sweep, slots: int) -> str:
    return f"{'*' if _is_rule_of_thumb(sweep, slots) else ''} {slots:3}"


def _is_rule_of_thumb(sweep: Sweep, slots: int) -> bool:
    return slots == 2 * sweep.trace.header.n_used


def _rates(hits: Counts, trace: Trace) -> str:
    rates = 100 * hits / (trace.n_tokens * trace.header.n_used)
    return f"{rates.mean():.1f} ({rates.min():.1f})"


def _percent(count: int, trace: Trace) -> str:
    return f"{100 * count / trace.routing.size:.1f}"


def _mean(values: NDArray[np.float64]) -> float:
    return float(np.nanmean(values))
