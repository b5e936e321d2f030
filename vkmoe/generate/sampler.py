"""This module chooses the next token from logits, on one path for every option.

It owns the order of the steps (penalties, DRY, biases, top-k, typical-p, top-p, min-p, XTC,
temperature, draw; with Mirostat biases, temperature, Mirostat's own draw) and the random generator.
The best few logits decide where they hold all that top-k or min-p leaves; under penalties, biases
and Mirostat, and where top-p or typical-p need the whole vocabulary, the full logits are fetched.
It does not own where logits come from, nor why a generation ends; what DRY computes is in dry.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vkmoe.batch import TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.generate.dry import Dry
from vkmoe.generate.runner import FetchLogits, bad_logits

Ids = npt.NDArray[np.signedinteger]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_N_ESTIMATED = 100  # tokens by which Mirostat 1 estimates how fast probabilities fall


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
    logit. `dry` knows the vocabulary; without it, repeats cost nothing.
    """

    def __init__(
        self,
        config: SamplingConfig,
        seed: int,
        banned: Iterable[int] = (),
        biases: Mapping[int, float] | None = None,
        dry: Dry | None = None,
    ) -> None:
        self._config = c = config
        self._random = np.random.default_rng(seed)
        self._banned = np.array(sorted(set(banned)), dtype=np.int64)
        self._biased = np.fromiter(biases or (), np.int64)
        self._biases = np.fromiter((biases or {}).values(), np.float64)
        self._mirostat = _Mirostat(c) if c.mirostat else None
        has_penalty = c.repeat_penalty != 1 or c.presence_penalty != 0 or c.frequency_penalty != 0
        self._penalises = has_penalty and c.repeat_last_n != 0 and not c.mirostat
        self._dry = dry if dry is not None and dry.is_on and not c.mirostat else None
        self._has_xtc = c.xtc_probability > 0 and c.xtc_threshold <= 0.5
        # Only the best token counts.
        self._is_greedy = c.temp == 0 and c.typical_p >= 1 and not self._has_xtc
        self._history: list[int] = []  # stays empty where nothing is penalised
        self._drawn: tuple[Ids, Floats] | None = None  # the last draw's tokens and their weights

    def accept(self, token_ids: Sequence[int]) -> None:
        """Note tokens of the prompt or of the reply for the penalties, oldest first. Mutates."""
        if self._penalises or self._dry is not None:
            self._history += token_ids

    def sample(
        self,
        candidates: TopLogits | None,
        fetch_logits: FetchLogits,
        allowed: Mask | None = None,
    ) -> int:
        """Choose a token. Calls `fetch_logits` -> float32 [n_vocab] only if it has to.

        `allowed` are the tokens that may be chosen, [n_vocab] or shorter: no id behind its end may.
        Mutates the random generator: one draw per call, none at temperature 0, and one before for
        XTC; and what Mirostat knows. The caller gives `accept` what it kept. Raises VkmoeError for
        logits that are NaN or infinite.
        """
        if self._mirostat is not None:
            return self._draw_by_mirostat(self._mirostat, _checked(fetch_logits()), allowed)
        kept = self._keep_of_candidates(candidates, allowed) if candidates is not None else None
        if kept is None:
            kept = self._keep_of_all(_checked(fetch_logits()), allowed)
        return self._draw(self._without_top(kept) if self._has_xtc else kept)

    def shares(self, n: int) -> list[tuple[int, float]]:
        """Return the `n` tokens that were likeliest at the last draw, and their probabilities.

        All options have had their say; tokens that they dropped are not listed.
        """
        assert self._drawn is not None, "nothing was drawn yet"
        ids, weights = self._drawn
        pairs = zip(ids[:n].tolist(), (weights[:n] / weights.sum()).tolist(), strict=True)
        return [(token, share) for token, share in pairs if share > 0]

    def _keep_of_candidates(self, candidates: TopLogits, allowed: Mask | None) -> _Kept | None:
        """Return what the options leave; None where tokens that are not listed may matter."""
        c, raw, n_vocab = self._config, _checked(candidates.logits), candidates.n_vocab
        if not math.isfinite(candidates.log_sum_exp):
            raise bad_logits()
        ids, logits, last = candidates.ids, raw, raw.item(-1)
        has_all = raw.size == n_vocab or last == -np.inf
        if allowed is not None or self._banned.size or not last > -np.inf:
            is_left = ~np.isin(ids, self._banned) & (raw > -np.inf)
            if allowed is not None:
                is_left &= (ids < allowed.size) & allowed.take(ids, mode="clip")
            ids, logits = ids[is_left], raw[is_left]
        if self._history or self._biased.size or not ids.size:
            return None  # a penalty may lift any token, or leave none of these the best
        has_all |= allowed is not None and ids.size == np.count_nonzero(allowed)
        top_k = min(c.top_k or n_vocab, n_vocab)
        is_cut_off = top_k > ids.size and not has_all
        # Top-p and typical-p then need all that top-k leaves. Without them, what is not listed is
        # out if min-p drops the last that is.
        needs_all = c.top_p < 1 or c.typical_p < 1
        may_matter = needs_all or logits[-1] >= self._limit(logits[0])
        if is_cut_off and may_matter and not self._is_greedy:
            return None
        return self._keep(ids, logits, logits[:top_k])

    def _keep_of_all(self, raw: Floats, allowed: Mask | None) -> _Kept:
        """Return what the options leave of the whole vocabulary, `raw` [n_vocab]."""
        ids, logits = self._possible(raw, allowed)
        top_k = min(self._config.top_k or ids.size, ids.size)
        left = logits
        if top_k < ids.size:
            left = np.sort(np.partition(logits, ids.size - top_k)[ids.size - top_k :])[::-1]
        limit = self._limit(float(np.max(logits))) if self._config.typical_p >= 1 else -np.inf
        reach = np.flatnonzero(logits >= max(limit, float(left.min())))
        order = reach[np.lexsort((reach, -logits[reach]))]
        return self._keep(ids[order], logits[order], left)

    def _possible(self, raw: Floats, allowed: Mask | None) -> _Kept:
        """Return the tokens that can be chosen by rising id, after penalties and biases.

        Many equal logits, such as those of what is forbidden, would make a partition slow.
        """
        logits = self._penalised(raw)
        if allowed is not None:
            logits[: allowed.size][~allowed[: raw.size]] = -np.inf
            logits[allowed.size :] = -np.inf
        ids = np.flatnonzero(logits > -np.inf)
        if not ids.size:
            raise _no_token()
        return _Kept(ids, logits[ids])

    def _penalised(self, raw: Floats) -> Floats:
        """Return all logits [n_vocab] after penalties, which count the last tokens, and biases.

        Those of banned tokens are minus infinity.
        """
        c, logits = self._config, raw.copy()
        if self._penalises:
            last = self._history if c.repeat_last_n < 0 else self._history[-c.repeat_last_n :]
            counted = Counter(last)
            ids = np.fromiter(counted, np.int64)
            counts = np.fromiter(counted.values(), np.float64)
            own = raw[ids]
            scaled = np.where(own > 0, own / c.repeat_penalty, own * c.repeat_penalty)
            logits[ids] = scaled - c.presence_penalty - counts * c.frequency_penalty
        if self._dry is not None:
            for token, penalty in self._dry.penalties(self._history).items():
                logits[token] -= penalty
        logits[self._biased] += self._biases
        logits[self._banned[self._banned < raw.size]] = -np.inf
        return logits

    def _keep(self, ids: Ids, logits: Floats, left: Floats) -> _Kept:
        """Cut tokens in order by top-k, typical-p, top-p and min-p.

        `left` are all logits that top-k leaves. It, top-p and min-p each keep a prefix of the
        order, so together they keep the shortest.
        """
        if logits[0] == -np.inf:
            raise _no_token()
        if self._config.typical_p < 1:
            typical = _typical(logits[: left.size], self._config.typical_p)
            ids, logits = ids[typical], logits[typical]
            left = logits
        top, n = float(logits[0]), 1
        if not self._is_greedy:
            n = min(left.size, int(np.count_nonzero(logits >= self._limit(top))))
            if self._config.top_p < 1:
                cumulative = np.exp(logits[:n] - top).cumsum()
                total = float(np.exp(left - top).sum())
                n = min(n, int(cumulative.searchsorted(self._config.top_p * total)) + 1)
        return _Kept(ids[:n], logits[:n])

    def _limit(self, top: float) -> float:
        """Return the logit below which min-p drops tokens, given the best one."""
        if self._is_greedy:
            return top
        return top + math.log(self._config.min_p) if self._config.min_p > 0 else -np.inf

    def _without_top(self, kept: _Kept) -> _Kept:
        """Return what XTC leaves: now and then, not the tokens above the last that is likely.

        Likely are those that reach the threshold. Mutates the random generator.
        """
        c = self._config
        if kept.ids.size < 2 or self._random.random() > c.xtc_probability:
            return kept
        n_likely = int(np.count_nonzero(_shares(kept.logits) >= c.xtc_threshold))
        first = max(0, n_likely - 1)
        return _Kept(kept.ids[first:], kept.logits[first:])

    def _draw(self, kept: _Kept) -> int:
        """Draw one token by the softmax of logits / temperature."""
        ids = kept.ids if self._config.temp else kept.ids[:1]
        return self._placed(ids, _weights(kept.logits[: ids.size], self._config.temp))

    def _draw_by_mirostat(self, mirostat: _Mirostat, raw: Floats, allowed: Mask | None) -> int:
        """Draw one of the tokens that Mirostat leaves, and let it learn from that."""
        ids, logits = self._possible(raw, allowed)
        order = np.lexsort((ids, -logits))
        ids = ids[order]
        if self._config.temp == 0:
            return self._placed(ids[:1], np.ones(1))
        shares = _shares(logits[order], self._config.temp)
        shares = shares[: mirostat.n_kept(shares, raw.size)]
        token = self._placed(ids[: shares.size], shares)
        mirostat.learn(float(shares[ids[: shares.size] == token][0] / shares.sum()))
        return token

    def _placed(self, ids: Ids, weights: Floats) -> int:
        """Draw a token, as likely as its share of all weights; at temperature 0 without a draw."""
        self._drawn = ids, weights
        if self._config.temp == 0:
            return int(ids[0])
        reached = weights.cumsum()
        place = int(reached.searchsorted(self._random.random() * reached[-1], side="right"))
        return int(ids[min(place, weights.size - 1)])


class _Mirostat:
    """Holds how much surprise the next token may have, in both versions of Mirostat.

    The method is Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls
    Perplexity", 2021, in the form of llama.cpp's `llama_sampler_mirostat` and `_v2`.
    """

    def __init__(self, config: SamplingConfig) -> None:
        self._config = config
        self._mu = 2 * config.mirostat_tau  # bits

    def n_kept(self, shares: Floats, n_vocab: int) -> int:
        """Return how many tokens are left, at least one.

        `shares` are the probabilities of tokens, descending; `n_vocab` counts all tokens there are.
        """
        if self._config.mirostat == 2:
            surprising = np.flatnonzero(shares < 2.0**-self._mu)
            return max(1, int(surprising[0])) if surprising.size else shares.size
        first = shares[:_N_ESTIMATED]
        first = first[first > 0]
        if first.size < 2:
            return 1
        steps = np.log(np.arange(2, first.size + 1) / np.arange(1, first.size))
        slope = float(steps @ np.log(first[:-1] / first[1:]) / (steps @ steps))
        return max(1, min(shares.size, self._n_zipf(slope, n_vocab)))

    def learn(self, share: float) -> None:
        """Note the probability of the chosen token among those that were left. Mutates."""
        surprise = -math.log2(max(share, 1e-300))  # a rounded draw may reach a share of 0
        self._mu -= self._config.mirostat_eta * (surprise - self._config.mirostat_tau)

    def _n_zipf(self, slope: float, n_vocab: int) -> int:
        """Return how many tokens have the surprise mu where probabilities fall by rank^-slope."""
        rest = slope - 1
        with np.errstate(all="ignore"):
            ratio = np.float64(rest) * np.exp2(self._mu) / (1 - np.power(float(n_vocab), -rest))
            n = float(np.power(ratio, np.float64(1) / slope))
        return 1 if math.isnan(n) else int(min(n, n_vocab))


def _weights(logits: Floats, temp: float) -> Floats:
    """Return what the softmax of logits / temperature is proportional to; the first is the best."""
    scale = 1 / max(temp, 1e-9)  # below, only the best token has any weight
    weights: Floats = np.exp((logits - logits[0]) * scale)
    return weights


def _shares(logits: Floats, temp: float = 1.0) -> Floats:
    """Return the softmax of logits / temperature; the first is the best."""
    weights = _weights(logits, temp)
    shares: Floats = weights / weights.sum()
    return shares


def _typical(logits: Floats, share: float) -> Ids:
    """Return the places of locally typical tokens, in order; `logits` are all, descending.

    Those whose surprise is nearest to the entropy come first, until they have more than `share`
    (Meister et al., "Locally Typical Sampling", 2022).
    """
    shares = _shares(logits)
    shares = shares[shares > 0]
    surprise = -np.log(shares)
    nearest = np.argsort(np.abs(surprise - shares @ surprise), kind="stable")
    n = int(np.searchsorted(np.cumsum(shares[nearest]), share, side="right")) + 1
    return np.sort(nearest[:n])


def _checked(logits: npt.NDArray[np.float32]) -> Floats:
    """Return the logits in float64. Raises VkmoeError for NaN and plus infinity."""
    result = logits.astype(np.float64)
    if not result.max() < np.inf:  # false for NaN too
        raise bad_logits()
    return result


def _no_token() -> VkmoeError:
    return VkmoeError(
        "no token can be chosen: every logit is minus infinity",
        "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
    )
