"""This module says how often the experts that tokens use are found in memory that holds some only.

A curve goes by the share of a layer's experts that are held. It owns the mean curve of recorded
traces, and what the file that `--expert-profile` names changes about it. Which files there are is
the subject of experts/records/profile.py.
"""

from __future__ import annotations

from collections import Counter
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
from vkmoe.experts.study.replay import ENOUGH_TOKENS, Transfers, simulate
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import TensorInfo

__all__ = ["MEAN_CURVE", "HitCurve", "curve_of_counts", "curve_of_trace", "known_curve"]

HALF_LASTS = 2000  # tokens of a text; of half of their uses the next text has the same
# Of a trace that is replayed: shares of the experts that have a slot, the tokens that fill the
# cache, and the most tokens, and tokens times experts: they take about three seconds.
RUNGS, FILLING, MOST_TOKENS, MOST_LOOKED_AT = (1 / 8, 1 / 4, 1 / 2), 50, 2000, 16_000_000


@dataclass(frozen=True)
class HitCurve:
    """Gives the hit rate for each share of experts that are held, linear between its points."""

    shares: tuple[float, ...]  # of a layer's experts, rising
    rates: tuple[float, ...]  # hits per use at these shares
    reason: str  # where the curve is from, in a few words

    def rate(self, share: float) -> float:
        """Return the hit rate where `share` of the experts are held; both from 0 to 1."""
        return float(np.interp(share, (0.0, *self.shares, 1.0), (0.0, *self.rates, 1.0)))

    def of_slots(self, slots: Sequence[int], n_experts: int) -> float:
        """Return the hits per use of all layers where each has its own number of slots."""
        alike = Counter(slots).items()  # few numbers, in many layers
        return sum(n * self.rate(n_slots / n_experts) for n_slots, n in alike) / len(slots)


# The demo model (32 experts, 4 used, 6 layers) on three texts of bench/prompts: prompts of 500
# tokens and replies of 400; hits in the replies from token 50 on, by the default settings with two
# landing slots, replayed by `experts/study/replay.py`. Means of the three.
MEAN_CURVE = HitCurve(
    tuple(n / 32 for n in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 30)),
    (0.137, 0.241, 0.332, 0.412, 0.534, 0.631, 0.712, 0.775, 0.872, 0.926, 0.960, 0.985, 0.994),
    "the mean of recorded traces",
)


def known_curve(
    path: Path, spec: ModelSpec, layers: Sequence[Sequence[TensorInfo]]
) -> HitCurve | None:
    """Return the curve by the file that `--expert-profile` names; None where it tells nothing.

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
) -> HitCurve | None:
    """Make the curve of a file once for each `state` of it: a plan is made several times."""
    if is_trace_file(path):
        return curve_of_trace(trace_of_model(path, model))
    history = load_profile(path, model, n_vocab)
    if history is None or not history.counts.any():
        return None
    counts = history.counts.reshape(model.n_moe_layers, model.n_experts)
    if is_importance_file(path):
        return curve_of_counts(counts, inf)
    if history.tokens is not None and len(history.tokens.ids):  # more text than is in the counts
        counts = _uses_of_tokens(history.tokens, counts.shape)
    return curve_of_counts(counts, float(counts.sum(axis=1).max()) / model.n_used)


def _uses_of_tokens(tokens: TokenRows, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Add up what is known of all tokens by their ids: uses [n_layers, n_experts]."""
    _, seen, experts, shares = tokens
    uses, each = np.zeros(shape), seen[:, None, None] * (shares / np.iinfo(shares.dtype).max)
    np.add.at(uses, (np.arange(shape[0])[None, :, None], experts), each)
    return uses


def curve_of_counts(counts: NDArray[np.float64], n_tokens: float) -> HitCurve:
    """Make the curve where experts have these uses [n_layers, n_experts] by `n_tokens`.

    It has no fewer hits than if the most used experts always had the slots. Which ones are used
    most is another matter in the next text, so that only a part of what is counted is believed.
    """
    n_experts, sums = counts.shape[1], counts.sum(axis=1, keepdims=True)
    alike = HALF_LASTS / (n_tokens + HALF_LASTS)  # the share of the uses that is of all experts
    shares = (1 - alike) * counts / np.where(sums > 0, sums, 1.0) + alike / n_experts
    most_used = np.cumsum(-np.sort(-shares, axis=1), axis=1).mean(axis=0)
    kept = np.interp(MEAN_CURVE.shares, np.arange(1, n_experts + 1) / n_experts, most_used)
    rates = np.maximum(MEAN_CURVE.rates, kept)
    return HitCurve(MEAN_CURVE.shares, tuple(rates.tolist()), "the uses in --expert-profile")


def curve_of_trace(trace: Trace) -> HitCurve | None:
    """Replay the last tokens of a trace through a cache by default; None where they are too few.

    Each token counts as one that was drawn. The odds of a hit are those of the mean curve times
    what was found beside it.
    """
    header, most = trace.header, min(MOST_TOKENS, MOST_LOOKED_AT // trace.space.n_keys)
    n_tokens = min(trace.n_tokens, max(ENOUGH_TOKENS, most))
    if n_tokens < ENOUGH_TOKENS:
        return None
    ids = None if trace.ids is None else trace.ids[-n_tokens:]
    drawn = np.zeros(n_tokens, np.bool_)
    part = replace(trace, routing=trace.routing[-n_tokens:], is_prompt=drawn, starts=(0,), ids=ids)
    settings = CacheSettings("forecast", lag=2)
    transfers, shifts = Transfers(late=True, n_landing=MOST_LANDING), []
    for n_slots in sorted({max(1, round(share * header.n_experts)) for share in RUNGS}):
        slots = [n_slots] * header.n_layers
        pools = make_pools(slots, header.span_bytes, header.n_used, "layer")
        hits = simulate(part, settings, pools, transfers=transfers).hits[FILLING:]
        usual = MEAN_CURVE.rate(n_slots / header.n_experts)
        shifts.append(_logit(hits.mean() / header.n_used) - _logit(usual))
    odds = _logit(np.array(MEAN_CURVE.rates)) + np.mean(shifts)
    rates = 1 / (1 + np.exp(-odds))
    return HitCurve(MEAN_CURVE.shares, tuple(rates.tolist()), "a replay of --expert-profile")


def _logit(rates: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return the logarithm of odds; of what is never or always as of what hardly is."""
    inside = np.clip(rates, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(inside / (1 - inside)), np.float64)
