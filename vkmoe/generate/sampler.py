"""This module chooses the next token from logits, on one path for every option.

It owns the order of the steps (penalties, top-k, top-p, min-p, temperature, draw), the random
generator, and the proof obligation when only the best few logits are known: the choice is made from
them where the whole vocabulary could not change it, else the full logits are fetched.
It does not own where logits come from, nor why a generation ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vkmoe.batch import TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError

__all__ = ["Sampler", "random_seed"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FetchLogits = Callable[[], npt.NDArray[np.float32]]

# Trust in a log_sum_exp computed elsewhere in float32: relative error of the sum itself.
_SUM_TOLERANCE = 1e-3
# Sums of the same numbers in another order agree this well in float64.
_ORDER_TOLERANCE = 1e-9


class _Seen(NamedTuple):
    """The tokens that penalties apply to now."""

    ids: Ids  # [n] rising
    counts: Floats  # [n]: how often each occurred


class _Head(NamedTuple):
    """The best tokens after penalties, in order, as far as their order is certain."""

    ids: Ids  # [n]
    logits: Floats  # [n] descending
    n_rest: int  # tokens that are not listed; none has a logit above `bound`
    bound: float
    total: tuple[float, float]  # bounds of sum(exp(logit - best)) over what top-k leaves


def random_seed() -> int:
    """A seed from the operating system, short enough to type again."""
    return int(np.random.SeedSequence().generate_state(1)[0])


class Sampler:
    """Draws tokens for one generation; the same seed and logits give the same tokens.

    `banned` tokens are never chosen (end tokens under --ignore-eos).
    """

    def __init__(self, config: SamplingConfig, seed: int, banned: Iterable[int] = ()) -> None:
        self._config = config
        self._random = np.random.default_rng(seed)
        self._penalties = _Penalties(config, banned)
        self.n_fetches = 0  # how often the candidates could not decide

    def accept(self, token_ids: Sequence[int]) -> None:
        """Tell the penalties about tokens of the prompt or of the reply, oldest first. Mutates."""
        self._penalties.accept(token_ids)

    def sample(self, candidates: TopLogits | None, fetch_logits: FetchLogits) -> int:
        """Choose a token. Calls `fetch_logits` -> float32 [n_vocab] only if it has to.

        Mutates the random generator: one draw per call, none at temperature 0. The caller tells
        `accept` what it kept. Raises VkmoeError for logits that are NaN or infinite.
        """
        seen = self._penalties.seen()
        if candidates is not None:
            kept = self._keep(self._head_of_candidates(candidates, seen))
            if kept is not None:
                return self._draw(*kept)
        self.n_fetches += 1
        kept = self._keep(self._head_of_all(fetch_logits(), seen))
        assert kept is not None, "the whole vocabulary always decides"
        return self._draw(*kept)

    def _head_of_candidates(self, candidates: TopLogits, seen: _Seen) -> _Head:
        """The certain order after penalties, from the candidates alone."""
        raw, ids = _checked(candidates.logits), candidates.ids.astype(np.int64)
        log_sum_exp = candidates.log_sum_exp
        if not math.isfinite(log_sum_exp):
            raise _bad_logits()
        n_rest = candidates.n_vocab - ids.size
        if n_rest and self._penalties.may_raise(seen):  # an unlisted token may now be the best
            return _Head(ids[:0], raw[:0], candidates.n_vocab, np.inf, (0.0, np.inf))
        bound = float(raw[-1]) if n_rest else -np.inf
        lowered = self._penalties.may_lower(seen)
        logits = self._penalties.adjusted(ids, raw, seen) if lowered else raw
        if lowered and not np.array_equal(logits, raw):
            # A lowered candidate may have met, or fallen behind, tokens that are not listed.
            n_certain = int(np.count_nonzero(logits > bound)) if n_rest else ids.size
            order = np.lexsort((ids, -logits))[:n_certain]
            ids, logits = ids[order], logits[order]
        total = self._bound_total(logits, bound, candidates, lowered)
        return _Head(ids, logits, candidates.n_vocab - ids.size, bound, total)

    def _bound_total(
        self, logits: Floats, bound: float, candidates: TopLogits, lowered: bool
    ) -> tuple[float, float]:
        """Bounds of the sum over what top-k leaves, given its certain part `logits`, descending.

        `lowered`: some logits may be below those that `log_sum_exp` was computed from.
        """
        if self._config.top_p == 1 or not logits.size or logits[0] == -np.inf:
            return 0.0, np.inf  # not needed, or nothing can be chosen
        weights = np.exp(logits - logits[0])
        top_k = min(self._config.top_k or candidates.n_vocab, candidates.n_vocab)
        if top_k <= logits.size:
            low = high = float(np.sum(weights[:top_k]))
        else:
            low = float(np.sum(weights))
            high = low + (top_k - logits.size) * float(np.exp(bound - logits[0]))
            if top_k == candidates.n_vocab:
                with np.errstate(over="ignore"):
                    stated = float(np.exp(candidates.log_sum_exp - logits[0]))
                high = min(high, stated * (1 + _SUM_TOLERANCE))
                low = low if lowered else max(low, stated * (1 - _SUM_TOLERANCE))
        return low * (1 - _ORDER_TOLERANCE), high * (1 + _ORDER_TOLERANCE)

    def _head_of_all(self, full_logits: npt.NDArray[np.float32], seen: _Seen) -> _Head:
        """The order of the whole vocabulary, as far down as the options can reach."""
        raw = _checked(full_logits)
        logits = self._penalties.adjusted(np.arange(raw.size), raw, seen)
        top = float(np.max(logits))
        _check_choice(top)
        top_k = min(self._config.top_k or raw.size, raw.size)
        left = np.partition(logits, raw.size - top_k)[raw.size - top_k :]  # [top_k]
        total = float(np.sum(np.exp(left - top)))
        limit = max(self._limit(top), float(left[0]))
        reach = np.flatnonzero(logits >= limit)
        order = reach[np.lexsort((reach, -logits[reach]))]
        bound = float(np.nextafter(limit, -np.inf))
        return _Head(order, logits[order], raw.size - order.size, bound, (total, total))

    def _limit(self, top: float) -> float:
        """Logits below this are dropped whatever top-k and top-p say, given the best one."""
        if self._config.temp == 0:
            return top
        return top + math.log(self._config.min_p) if self._config.min_p > 0 else -np.inf

    def _keep(self, head: _Head) -> tuple[Ids, Floats] | None:
        """Ids and logits that top-k, top-p and min-p leave; None if the head cannot tell.

        Each of the three keeps a prefix of the order, so together they keep the shortest.
        """
        c, n = self._config, head.ids.size
        if not n:
            return None
        _check_choice(float(head.logits[0]))
        if c.temp == 0:
            return head.ids[:1], head.logits[:1]
        n_all = n + head.n_rest
        least = most = min(c.top_k or n_all, n_all)
        limit = self._limit(float(head.logits[0]))
        within = int(np.count_nonzero(head.logits >= limit))
        least = min(least, within)
        if within < n or head.bound < limit:
            most = min(most, within)
        if c.top_p < 1:
            cumulative = np.cumsum(np.exp(head.logits - head.logits[0]))
            shortest, longest = (
                int(np.searchsorted(cumulative, c.top_p * total)) + 1 for total in head.total
            )
            least = min(least, shortest)
            most = min(most, longest) if longest <= n else most
        if least != most or least > n:
            return None
        return head.ids[:least], head.logits[:least]

    def _draw(self, ids: Ids, logits: Floats) -> int:
        """One token by the softmax of logits / temperature."""
        if self._config.temp == 0:
            return int(ids[0])
        scale = 1 / max(self._config.temp, 1e-9)  # below, only the best token has any weight
        weights = np.cumsum(np.exp((logits - logits[0]) * scale))
        place = int(np.searchsorted(weights, self._random.random() * weights[-1], side="right"))
        return int(ids[min(place, ids.size - 1)])


class _Penalties:
    """The penalties of one generation. `banned` tokens are never chosen."""

    def __init__(self, config: SamplingConfig, banned: Iterable[int] = ()) -> None:
        self._config = config
        self._banned = np.array(sorted(set(banned)), dtype=np.int64)
        self._history: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> None:
        """Note tokens of the prompt or of the reply, oldest first. Mutates."""
        c = self._config
        active = c.repeat_penalty != 1 or c.presence_penalty != 0 or c.frequency_penalty != 0
        if active and c.repeat_last_n != 0:
            self._history.extend(token_ids)

    def seen(self) -> _Seen:
        """What is in the window of the last tokens."""
        last_n = self._config.repeat_last_n
        window = self._history if last_n < 0 else self._history[-last_n:] if last_n else []
        counted = sorted(Counter(window).items())
        ids = np.array([token_id for token_id, _ in counted], dtype=np.int64)
        return _Seen(ids, np.array([count for _, count in counted], dtype=np.float64))

    def may_lower(self, seen: _Seen) -> bool:
        """Whether any logit may come out lower than it went in."""
        return bool(seen.ids.size or self._banned.size)

    def may_raise(self, seen: _Seen) -> bool:
        """Whether any logit may come out higher than it went in."""
        c = self._config
        raises = c.repeat_penalty < 1 or c.presence_penalty < 0 or c.frequency_penalty < 0
        return raises and seen.ids.size > 0

    def adjusted(self, ids: Ids, logits: Floats, seen: _Seen) -> Floats:
        """Logits [n] of `ids` [n] after penalties and bans."""
        result = logits.copy()
        if seen.ids.size:
            place = np.minimum(np.searchsorted(seen.ids, ids), seen.ids.size - 1)
            hit = seen.ids[place] == ids
            result[hit] = self._penalised(logits[hit], seen.counts[place[hit]])
        if self._banned.size:
            result[np.isin(ids, self._banned)] = -np.inf
        return result

    def _penalised(self, logits: Floats, counts: Floats) -> Floats:
        c = self._config
        scaled = np.where(logits > 0, logits / c.repeat_penalty, logits * c.repeat_penalty)
        return scaled - c.presence_penalty - counts * c.frequency_penalty


def _checked(logits: npt.NDArray[np.float32]) -> Floats:
    """The logits in float64. Raises VkmoeError for NaN and plus infinity."""
    result = logits.astype(np.float64)
    if not (result < np.inf).all():  # false for NaN too
        raise _bad_logits()
    return result


def _check_choice(top: float) -> None:
    if top == -np.inf:
        raise VkmoeError(
            "no token can be chosen: every logit is minus infinity",
            "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
        )


def _bad_logits() -> VkmoeError:
    return VkmoeError(
        "the model computed logits that are not numbers (NaN or infinite)",
        "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
    )
