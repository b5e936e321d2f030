"""This module says how many hits each slot of a layer brings, and splits slots over layers by that.

It owns the curves of single layers, from what `--expert-profile` names: a trace is replayed, uses
tell how skewed each layer is. Both change the mean curve of recorded traces (hit_curve.py) only as
far as one text was found to tell anything of the next. Which files there are is the subject of
experts/records/profile.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from stat import S_ISREG

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.settings import MOST_LANDING, CacheSettings, make_pools
from vkmoe.experts.decide.token_table import TokenRows
from vkmoe.experts.records.importance import is_importance_file
from vkmoe.experts.records.profile import (
    ProfiledModel,
    load_profile,
    profiled_model,
    trace_of_model,
)
from vkmoe.experts.records.trace import Trace, is_trace_file
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.experts.study.replay import ENOUGH_TOKENS, Transfers, simulate
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import TensorInfo

Rates = NDArray[np.float64]  # [n_layers, n_experts + 1]: hits per use with so many slots

# How much of what sets a layer apart from the others in one text is found in another, on six texts
# (bench/results/2026-11-25-slot_curves-cpu.json): of its skew, but for the tokens of which half is
# chance.
LASTING, HALF_CHANCE = 0.5, 50
HALF_LASTS = 2000  # tokens of a text of which half is found in another
# Of a trace that is replayed: shares of the experts that have a slot, the tokens that fill the
# cache, and the most tokens, and tokens times experts: they take about three seconds.
RUNGS, FILLING, MOST_TOKENS, MOST_LOOKED_AT = (1 / 8, 1 / 4, 1 / 2), 50, 2000, 16_000_000
SKEW_FROM, SKEW_TO = 1 / 8, 5 / 8  # the shares of the experts between which skew is measured
EVENLY = 1e-12  # gains that differ by less are equal


@dataclass(frozen=True, eq=False)
class LayerCurves(HitCurve):
    """Gives the hit rate of each layer for each number of slots; as a `HitCurve`, their mean.

    Each rises, and the more slots there are, the less another one brings.
    """

    rates_of: Rates

    @classmethod
    def of(cls, rates: Rates, reason: str) -> LayerCurves:
        """Make the least curves that bend down and are nowhere below `rates`."""
        bent = np.array([_envelope(row) for row in rates])
        mean, n_experts = bent.mean(axis=0)[1:-1], bent.shape[1] - 1
        shares = np.arange(1, n_experts) / n_experts
        return cls(tuple(shares.tolist()), tuple(mean.tolist()), reason, bent)

    def of_slots(self, slots: Sequence[int], n_experts: int) -> float:
        """Return the hits per use of all layers where each has its own number of slots."""
        assert self.rates_of.shape == (len(slots), n_experts + 1), (slots, n_experts)
        return float(self.rates_of[np.arange(len(slots)), list(slots)].mean())


def split_slots(n_bytes: int, slot_bytes: Sequence[int], n_experts: int) -> tuple[int, ...]:
    """Split `n_bytes` evenly: slots of each layer, at most `n_experts`; all 0 if not one each."""
    n_slots = min(n_experts, max(0, n_bytes) // sum(slot_bytes))
    rest = n_bytes - n_slots * sum(slot_bytes)
    slots = []
    for size in slot_bytes:
        more = 0 < n_slots < n_experts and size <= rest
        rest -= size * more
        slots.append(n_slots + more)
    return tuple(slots)


def split_by_gain(
    n_bytes: int, slot_bytes: Sequence[int], curves: LayerCurves, least: Sequence[int]
) -> tuple[int, ...]:
    """Find the slots of each layer, `least` or more, with the most hits that `n_bytes` hold.

    Must hold: the least fit. Each slot goes to the layer where a byte brings most, of equal ones to
    that which has fewest. Then slots are exchanged between two layers while that brings more.
    """
    gains, sizes = np.diff(curves.rates_of, axis=1), np.array(slot_bytes, np.int64)
    slots, rest = _first_slots(gains, sizes, np.array(least, np.int64), n_bytes)
    # Where all experts have a slot, another one is none.
    gains = np.hstack([gains, np.full((len(gains), 1), -np.inf)])
    layers = np.arange(len(slots))
    while True:
        while (values := np.where(sizes <= rest, gains[layers, slots] / sizes, -np.inf)).max() >= 0:
            equal = np.flatnonzero(values >= (1 - EVENLY) * values.max())
            layer = int(equal[np.argmin(slots[equal])])
            slots[layer] += 1
            rest -= int(sizes[layer])
        if (pair := _exchange(gains, slots, np.array(least), sizes, rest)) is None:
            return tuple(slots.tolist())
        giving, taking = pair
        slots[giving] -= 1
        slots[taking] += 1
        rest += int(sizes[giving] - sizes[taking])


def _first_slots(
    gains: Rates, sizes: NDArray[np.int64], least: NDArray[np.int64], n_bytes: int
) -> tuple[NDArray[np.int64], int]:
    """Give out slots by what a byte of them brings up to the first that does not fit.

    Returns them, and the bytes that are left.
    """
    rest, n_experts = n_bytes - int(least @ sizes), gains.shape[1]
    index = np.arange(n_experts)
    layers, nth = np.nonzero(index >= least[:, None])
    values = gains[layers, nth] / sizes[layers]
    values = np.round(values / max(values.max(initial=0.0), 1e-300), 12)
    order = np.lexsort((layers, nth, -values))
    n = int(np.searchsorted(np.cumsum(sizes[layers][order]), rest, side="right"))
    given = np.bincount(layers[order[:n]], minlength=len(sizes))
    return least + given, rest - int(given @ sizes)


def _exchange(
    gains: Rates,
    slots: NDArray[np.int64],
    least: NDArray[np.int64],
    sizes: NDArray[np.int64],
    rest: int,
) -> tuple[int, int] | None:
    """Find the layers between which the exchange of a slot brings most; None: it brings nothing."""
    layers = np.arange(len(slots))
    lost = np.where(slots > least, gains[layers, slots - 1], np.inf)
    more = gains[layers, slots][None, :] - lost[:, None]  # [giving, taking]
    more[sizes[None, :] - sizes[:, None] > rest] = -np.inf
    giving, taking = divmod(int(more.argmax()), len(slots))
    return (giving, taking) if more[giving, taking] > EVENLY else None


# ----- what is known -----


def known_curves(
    path: Path, spec: ModelSpec, layers: Sequence[Sequence[TensorInfo]]
) -> LayerCurves | None:
    """Return the curves by the file that `--expert-profile` names; None where it tells nothing.

    `layers` are the expert tensors of each MoE layer. Raises VkmoeError for a file that is damaged
    or belongs to another model.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    if not S_ISREG(found.st_mode):
        return None  # a pipe is read once, by what follows the uses
    tensors = [tensor for layer in layers for tensor in layer]
    described = profiled_model(spec, len(layers), tensors)
    return _read(path, (found.st_mtime_ns, found.st_size), described, spec.n_vocab)


@lru_cache(maxsize=4)
def _read(
    path: Path, state: tuple[int, int], model: ProfiledModel, n_vocab: int
) -> LayerCurves | None:
    """Make the curves of a file once for each `state` of it: a plan is made several times."""
    if is_trace_file(path):
        return curves_of_trace(trace_of_model(path, model))
    history = load_profile(path, model, n_vocab)
    if history is None or not history.counts.any():
        return None
    counts = history.counts.reshape(model.n_moe_layers, model.n_experts)
    if is_importance_file(path):
        return curves_of_counts(counts, inf)
    if history.tokens is not None and len(history.tokens.ids):  # more text than is in the counts
        counts = _uses_of_tokens(history.tokens, counts.shape)
    if not counts.any():
        return None
    return curves_of_counts(counts, float(counts.sum(axis=1).max()) / model.n_used)


def _uses_of_tokens(tokens: TokenRows, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Add up what is known of all tokens by their ids: uses [n_layers, n_experts]."""
    _, seen, experts, shares = tokens
    uses, each = np.zeros(shape), seen[:, None, None] * (shares / np.iinfo(shares.dtype).max)
    np.add.at(uses, (np.arange(shape[0])[None, :, None], experts), each)
    return uses


def curves_of_counts(counts: NDArray[np.float64], n_tokens: float) -> LayerCurves:
    """Make the curves of layers with these uses [n_layers, n_experts] by `n_tokens`, not all 0.

    A layer whose uses are more skewed than those of others has more hits than they have, and no
    fewer than if its most used experts always had the slots. Of few tokens most skew is chance, and
    which experts are used most is another matter in the next text.
    """
    n_experts, known = counts.shape[1], counts.any(axis=1)
    kept = _kept(counts, HALF_CHANCE / (n_tokens + HALF_CHANCE))
    first, last = (max(1, round(share * n_experts)) for share in (SKEW_FROM, SKEW_TO))
    skew = _logit(kept[:, first : last + 1]).mean(axis=1)
    shifts = np.where(known, LASTING * (skew - skew[known].mean()), 0.0)
    least = _kept(counts, HALF_LASTS / (n_tokens + HALF_LASTS))
    rates = np.maximum(_shifted(shifts, n_experts), least)
    return LayerCurves.of(rates, "how skewed the uses of each layer are in --expert-profile")


def _kept(counts: NDArray[np.float64], alike: float) -> Rates:
    """Return the hits if the most used experts keep the slots; a share of uses is of all alike."""
    n_experts, sums = counts.shape[1], counts.sum(axis=1, keepdims=True)
    shares = (1 - alike) * counts / np.where(sums > 0, sums, 1.0) + alike / n_experts
    most_used = np.cumsum(-np.sort(-shares, axis=1), axis=1)
    return np.hstack([np.zeros_like(sums), most_used])


def curves_of_trace(trace: Trace) -> LayerCurves | None:
    """Replay the last tokens of a trace through a cache by default; None where they are too few.

    Each counts as one that was drawn. All layers together have the hits that were found; what sets
    one apart counts for more the longer the trace is.
    """
    header, most = trace.header, min(MOST_TOKENS, MOST_LOOKED_AT // trace.space.n_keys)
    n_tokens = min(trace.n_tokens, max(ENOUGH_TOKENS, most))
    if n_tokens < ENOUGH_TOKENS:
        return None
    ids = None if trace.ids is None else trace.ids[-n_tokens:]
    drawn = np.zeros(n_tokens, np.bool_)
    part = replace(trace, routing=trace.routing[-n_tokens:], is_prompt=drawn, starts=(0,), ids=ids)
    rungs = sorted({max(1, round(share * header.n_experts)) for share in RUNGS})
    settings = CacheSettings("forecast", lag=2)
    transfers, found = Transfers(late=True, n_landing=MOST_LANDING), []
    for n_slots in rungs:
        slots = [n_slots] * header.n_layers
        pools = make_pools(slots, header.span_bytes, header.n_used, "layer")
        hits = simulate(part, settings, pools, transfers=transfers).hits[FILLING:]
        found.append(hits.mean(axis=0) / header.n_used)
    usual = np.array([MEAN_CURVE.rate(n / header.n_experts) for n in rungs])
    each = (_logit(np.array(found).T) - _logit(usual)).mean(axis=1)  # [n_layers]
    lasting = n_tokens / (n_tokens + HALF_LASTS)
    shifts = each.mean() + lasting * (each - each.mean())
    return LayerCurves.of(_shifted(shifts, header.n_experts), "a replay of --expert-profile")


# ----- curves -----


def _shifted(shifts: NDArray[np.float64], n_experts: int) -> Rates:
    """Make the mean curve of each layer with its odds of a hit times e^shift, and no corners."""
    fit = np.polyfit(_logit(np.array(MEAN_CURVE.shares)), _logit(np.array(MEAN_CURVE.rates)), 2)
    usual = np.polyval(fit, _logit(np.arange(1, n_experts) / n_experts))
    rates = 1 / (1 + np.exp(-(shifts[:, None] + usual)))
    ends = np.ones((len(shifts), 1))
    return np.hstack([0 * ends, rates, ends])


def _logit(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of odds; of what is never or always as of what hardly is."""
    inside = np.clip(rates, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(inside / (1 - inside)), np.float64)


def _envelope(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least curve that bends down and is nowhere below `rates`."""
    corners = [0]
    for index in range(1, len(rates)):
        while len(corners) > 1 and _is_below(rates, corners[-2], corners[-1], index):
            corners.pop()
        corners.append(index)
    return np.interp(np.arange(len(rates)), corners, rates[corners])


def _is_below(rates: NDArray[np.float64], first: int, middle: int, last: int) -> bool:
    """Say whether a point is not above the line between two others."""
    rise = (rates[last] - rates[first]) / (last - first)
    return bool(rates[middle] <= rates[first] + rise * (middle - first))
