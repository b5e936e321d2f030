"""This module says what `vkmoe simulate` found: as tables for people, and as values for JSON.

It owns words, units and the order of the tables; the figures are those of a Sweep.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.sizing import recommended_slots
from vkmoe.experts.study.accuracy import Accuracies
from vkmoe.experts.study.locality import SEGMENT, SHARES, Locality
from vkmoe.experts.study.replay import (
    GUESSES,
    Misses,
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


def as_text(sweep: Sweep, local: Locality, right: Accuracies) -> str:
    """Write tables and figures in lines of 80 columns; hit rates in percent of the uses."""
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
        "in %, and in brackets the copies per 100 uses. First no expert is guessed, and each "
        "missed expert gets a slot (--no-expert-admission)."
    )
    yield from _table(
        ["slots", "no admission", *GUESSES],
        [[_marked(sweep, rung.slots), *_guess_cells(rung)] for rung in sweep.rungs],
    )
    lines = list(_right_lines(right))
    if lines:
        yield from _wrapped("Of as many guesses as a token uses experts, so many are right:")
        for line in lines:
            yield from _item(line)


def _guess_cells(rung: Rung) -> list[str]:
    """Hit rate in % and copies per 100 uses: without admission, then with each predictor."""
    return [_guess_cell(rung.unweighed), *(_guess_cell(rung.guessing[name]) for name in GUESSES)]


def _guess_cell(result: SimulationResult) -> str:
    return f"{100 * result.hit_rate:.1f} ({_copied(result):.1f})"


def _copied(result: SimulationResult) -> float:
    return 100 * float(result.n_promoted.sum()) / result.trace.routing.size


def _right_lines(right: Accuracies) -> Iterator[str]:
    """Say how often each predictor is right, for the fused executor and the stepped one."""
    of_what = {"fused": "of the next token", "stepped": "of the next layer"}
    for meaning, found in right.items():
        shares = [f"{n} {100 * share:.0f} %" for n, share in found.items() if share is not None]
        if shares:
            yield f"{of_what[meaning]} (--executor {meaning}): {', '.join(shares)}"


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


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines of `text` that fit on a terminal."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
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


# ----- the same for JSON -----


def as_document(sweep: Sweep, local: Locality, right: Accuracies) -> dict[str, Any]:
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
        "guesses_right": {meaning: dict(shares) for meaning, shares in right.items()},
        "locality": _locality_values(local),
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
        "guessing": _guess_values(rung),
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


def _guess_values(rung: Rung) -> dict[str, Any]:
    """Make the values of each way to guess; bytes per token."""
    return {
        "no_admission": _guess_result_values(rung.unweighed),
        **{name: _guess_result_values(rung.guessing[name]) for name in GUESSES},
    }


def _guess_result_values(result: SimulationResult) -> dict[str, Any]:
    guesses, n_tokens = result.guesses, result.trace.n_tokens
    return {
        "hit_rate": result.hit_rate,
        "read_bytes_per_token": result.read_bytes,
        "copied_bytes_per_token": result.copied_bytes,
        "n_landed": result.n_landed,
        "n_hinted": guesses.n_hinted,
        "hinted_bytes_per_token": guesses.hinted_bytes / n_tokens,
        "right_share": guesses.n_right / guesses.n_hinted if guesses.n_hinted else None,
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
