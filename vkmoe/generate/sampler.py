"""This module chooses the next token from logits, on one path for every option.

It owns the order of the steps (penalties, biases, top-k, top-p, min-p, temperature, draw) and the
random generator. The best few logits decide where they hold all that top-k or min-p leaves; under
penalties and biases, and where top-p needs the whole vocabulary, the full logits are fetched.
It does not own where logits come from, nor why a generation ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vkmoe.batch import TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError

__all__ = ["Sampler", "random_seed"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FetchLogits = Callable[[], npt.NDArray[np.float32]]


class _Kept(NamedTuple):
    """Holds the tokens that the options leave, the likeliest first."""

    ids: Ids
    logits: Floats


def random_seed() -> int:
    """Make a seed from the operating system, short enough to type again."""
    return int(np.random.SeedSequence().generate_state(1)[0])


class Sampler:
    """Draws tokens for one generation; the same seed and logits give the same tokens.

    `banned` tokens are never chosen (end tokens under --ignore-eos); a bias is added to a token's
    logit.
    """

    def __init__(
        self,
        config: SamplingConfig,
        seed: int,
        banned: Iterable[int] = (),
        biases: Mapping[int, float] | None = None,
    ) -> None:
        self._config = c = config
        self._random = np.random.default_rng(seed)
        self._banned = np.array(sorted(set(banned)), dtype=np.int64)
        self._biased = np.fromiter(biases or (), np.int64)
        self._biases = np.fromiter((biases or {}).values(), np.float64)
        has_penalty = c.repeat_penalty != 1 or c.presence_penalty != 0 or c.frequency_penalty != 0
        self._penalises = has_penalty and c.repeat_last_n != 0
        self._history: list[int] = []  # stays empty where nothing is penalised

    def accept(self, token_ids: Sequence[int]) -> None:
        """Note tokens of the prompt or of the reply for the penalties, oldest first. Mutates."""
        if self._penalises:
            self._history += token_ids

    def sample(
        self,
        candidates: TopLogits | None,
        fetch_logits: FetchLogits,
        allowed: Mask | None = None,
    ) -> int:
        """Choose a token. Calls `fetch_logits` -> float32 [n_vocab] only if it has to.

        `allowed` are the tokens that may be chosen, [n_vocab] or shorter: no id behind its end may.
        Mutates the random generator: one draw per call, none at temperature 0. The caller gives
        `accept` what it kept. Raises VkmoeError for logits that are NaN or infinite.
        """
        kept = self._keep_of_candidates(candidates, allowed) if candidates is not None else None
        if kept is None:
            kept = self._keep_of_all(_checked(fetch_logits()), allowed)
        return self._draw(kept)

    def _keep_of_candidates(self, candidates: TopLogits, allowed: Mask | None) -> _Kept | None:
        """Return what the options leave; None where tokens that are not listed may matter."""
        c, raw, n_vocab = self._config, _checked(candidates.logits), candidates.n_vocab
        if not math.isfinite(candidates.log_sum_exp):
            raise _bad_logits()
        is_left = ~np.isin(candidates.ids, self._banned)
        has_all = raw.size == n_vocab
        if allowed is not None:
            is_left &= (candidates.ids < allowed.size) & allowed.take(candidates.ids, mode="clip")
        ids, logits = candidates.ids[is_left].astype(np.int64), raw[is_left]
        if self._history or self._biased.size or not ids.size:
            return None  # a penalty may lift any token, or leave none of these the best
        has_all |= allowed is not None and ids.size == np.count_nonzero(allowed)
        top_k = min(c.top_k or n_vocab, n_vocab)
        is_cut_off = top_k > ids.size and not has_all
        # Top-p then needs the sum of all that top-k leaves. Without it, what is not listed is out
        # if min-p drops the last that is.
        if c.temp != 0 and is_cut_off and (c.top_p < 1 or logits[-1] >= self._limit(logits[0])):
            return None
        return self._keep(ids, logits, logits[:top_k])

    def _keep_of_all(self, raw: Floats, allowed: Mask | None) -> _Kept:
        """Return what the options leave of the whole vocabulary, `raw` [n_vocab]."""
        logits = self._penalised(raw)
        if allowed is not None:
            logits[: allowed.size][~allowed[: raw.size]] = -np.inf
            logits[allowed.size :] = -np.inf
        # Many equal logits, such as those of what is forbidden, make a partition slow.
        ids = np.flatnonzero(logits > -np.inf)
        if not ids.size:
            raise _no_token()
        logits = logits[ids]
        top_k = min(self._config.top_k or ids.size, ids.size)
        left = logits
        if top_k < ids.size:
            left = np.sort(np.partition(logits, ids.size - top_k)[ids.size - top_k :])[::-1]
        reach = np.flatnonzero(logits >= max(self._limit(float(np.max(logits))), float(left.min())))
        order = reach[np.lexsort((reach, -logits[reach]))]
        return self._keep(ids[order], logits[order], left)

    def _penalised(self, raw: Floats) -> Floats:
        """Return all logits [n_vocab] after penalties, which count the last tokens, and biases.

        Those of banned tokens are minus infinity.
        """
        c, logits = self._config, raw.copy()
        counted = Counter(
            self._history if c.repeat_last_n < 0 else self._history[-c.repeat_last_n :]
        )
        ids = np.fromiter(counted, np.int64)
        counts = np.fromiter(counted.values(), np.float64)
        scaled = np.where(raw[ids] > 0, raw[ids] / c.repeat_penalty, raw[ids] * c.repeat_penalty)
        logits[ids] = scaled - c.presence_penalty - counts * c.frequency_penalty
        logits[self._biased] += self._biases
        logits[self._banned[self._banned < raw.size]] = -np.inf
        return logits

    def _keep(self, ids: Ids, logits: Floats, left: Floats) -> _Kept:
        """Cut tokens in order by top-k, top-p and min-p; `left` are all logits that top-k leaves.

        Each of the three keeps a prefix of the order, so together they keep the shortest.
        """
        top = float(logits[0])
        if top == -np.inf:
            raise _no_token()
        n = 1
        if self._config.temp != 0:
            n = min(left.size, int(np.count_nonzero(logits >= self._limit(top))))
            if self._config.top_p < 1:
                cumulative = np.cumsum(np.exp(logits - top))
                total = float(np.sum(np.exp(left - top)))
                n = min(n, int(np.searchsorted(cumulative, self._config.top_p * total)) + 1)
        return _Kept(ids[:n], logits[:n])

    def _limit(self, top: float) -> float:
        """Return the logit below which min-p drops tokens, given the best one."""
        if self._config.temp == 0:
            return top
        return top + math.log(self._config.min_p) if self._config.min_p > 0 else -np.inf

    def _draw(self, kept: _Kept) -> int:
        """Draw one token by the softmax of logits / temperature."""
        if self._config.temp == 0:
            return int(kept.ids[0])
        scale = 1 / max(self._config.temp, 1e-9)  # below, only the best token has any weight
        weights = np.cumsum(np.exp((kept.logits - kept.logits[0]) * scale))
        place = int(np.searchsorted(weights, self._random.random() * weights[-1], side="right"))
        return int(kept.ids[min(place, kept.ids.size - 1)])


def _checked(logits: npt.NDArray[np.float32]) -> Floats:
    """Return the logits in float64. Raises VkmoeError for NaN and plus infinity."""
    result = logits.astype(np.float64)
    if not (result < np.inf).all():  # false for NaN too
        raise _bad_logits()
    return result


def _no_token() -> VkmoeError:
    return VkmoeError(
        "no token can be chosen: every logit is minus infinity",
        "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
    )


def _bad_logits() -> VkmoeError:
    return VkmoeError(
        "the model computed logits that are not numbers (NaN or infinite)",
        "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
    )
