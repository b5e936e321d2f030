"""This module chooses the next token from logits, on one path for every option.

It owns the order of the steps (penalties, top-k, top-p, min-p, temperature, draw) and the random
generator. The best few logits decide where they hold all that top-k or min-p leaves; under
penalties, and where top-p needs the whole vocabulary, the full logits are fetched.
It does not own where logits come from, nor why a generation ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vkmoe.batch import TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError

__all__ = ["Sampler", "random_seed"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_Kept = tuple[Ids, Floats]  # descending
FetchLogits = Callable[[], npt.NDArray[np.float32]]


def random_seed() -> int:
    """Make a seed from the operating system, short enough to type again."""
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
        """Note tokens of the prompt or of the reply for the penalties, oldest first. Mutates."""
        self._penalties.accept(token_ids)

    def sample(self, candidates: TopLogits | None, fetch_logits: FetchLogits) -> int:
        """Choose a token. Calls `fetch_logits` -> float32 [n_vocab] only if it has to.

        Mutates the random generator: one draw per call, none at temperature 0. The caller gives
        `accept` what it kept. Raises VkmoeError for logits that are NaN or infinite.
        """
        kept = self._keep_of_candidates(candidates) if candidates is not None else None
        if kept is None:
            self.n_fetches += 1
            kept = self._keep_of_all(_checked(fetch_logits()))
        ids, logits = kept
        return self._draw(ids, logits)

    def _keep_of_candidates(self, candidates: TopLogits) -> _Kept | None:
        """Return what the options leave; None where tokens that are not listed may matter."""
        c, raw, n_vocab = self._config, _checked(candidates.logits), candidates.n_vocab
        if not math.isfinite(candidates.log_sum_exp):
            raise _bad_logits()
        listed = candidates.ids.astype(np.int64)
        allowed = ~self._penalties.is_banned(listed)
        ids, logits = listed[allowed], raw[allowed]
        if self._penalties.are_on or not ids.size:
            return None
        top_k = min(c.top_k or n_vocab, n_vocab)
        is_cut_off = top_k > ids.size and raw.size < n_vocab
        if c.temp != 0 and is_cut_off and (c.top_p < 1 or logits[-1] >= self._limit(logits[0])):
            return None
        return self._keep(ids, logits, logits[:top_k])

    def _keep_of_all(self, raw: Floats) -> _Kept:
        """Return what the options leave of the whole vocabulary, `raw` [n_vocab]."""
        logits = self._penalties.applied(raw)
        top_k = min(self._config.top_k or raw.size, raw.size)
        left = logits
        if top_k < raw.size:
            left = np.sort(np.partition(logits, raw.size - top_k)[raw.size - top_k :])[::-1]
        reach = np.flatnonzero(logits >= max(self._limit(float(np.max(logits))), float(left.min())))
        order = reach[np.lexsort((reach, -logits[reach]))]
        return self._keep(order, logits[order], left)

    def _keep(self, ids: Ids, logits: Floats, left: Floats) -> _Kept:
        """Cut tokens in order by top-k, top-p and min-p; `left` are all logits that top-k leaves.

        Each of the three keeps a prefix of the order, so together they keep the shortest.
        """
        top = float(logits[0])
        if top == -np.inf:
            raise VkmoeError(
                "no token can be chosen: every logit is minus infinity",
                "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
            )
        n = 1
        if self._config.temp != 0:
            n = min(left.size, int(np.count_nonzero(logits >= self._limit(top))))
            if self._config.top_p < 1:
                cumulative = np.cumsum(np.exp(logits - top))
                total = float(np.sum(np.exp(left - top)))
                n = min(n, int(np.searchsorted(cumulative, self._config.top_p * total)) + 1)
        return ids[:n], logits[:n]

    def _limit(self, top: float) -> float:
        """Return the logit below which min-p drops tokens, given the best one."""
        if self._config.temp == 0:
            return top
        return top + math.log(self._config.min_p) if self._config.min_p > 0 else -np.inf

    def _draw(self, ids: Ids, logits: Floats) -> int:
        """Draw one token by the softmax of logits / temperature."""
        if self._config.temp == 0:
            return int(ids[0])
        scale = 1 / max(self._config.temp, 1e-9)  # below, only the best token has any weight
        weights = np.cumsum(np.exp((logits - logits[0]) * scale))
        place = int(np.searchsorted(weights, self._random.random() * weights[-1], side="right"))
        return int(ids[min(place, ids.size - 1)])


class _Penalties:
    """Applies the penalties of one generation. `banned` tokens are never chosen."""

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

    @property
    def are_on(self) -> bool:
        """Return whether any token may have a penalty now; bans are none."""
        return bool(self._history)

    def is_banned(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of `ids` [n] are never chosen."""
        return np.isin(ids, self._banned)

    def applied(self, logits: Floats) -> Floats:
        """Return all logits [n_vocab] after penalties and bans."""
        result, last_n = logits.copy(), self._config.repeat_last_n
        window = self._history if last_n < 0 else self._history[-last_n:]
        counted = Counter(window)
        ids = np.fromiter(counted, np.int64, len(counted))
        counts = np.fromiter(counted.values(), np.float64, len(counted))
        result[ids] = self._penalised(logits[ids], counts)
        result[self._banned[self._banned < logits.size]] = -np.inf
        return result

    def _penalised(self, logits: Floats, counts: Floats) -> Floats:
        c = self._config
        scaled = np.where(logits > 0, logits / c.repeat_penalty, logits * c.repeat_penalty)
        return scaled - c.presence_penalty - counts * c.frequency_penalty


def _checked(logits: npt.NDArray[np.float32]) -> Floats:
    """Return the logits in float64. Raises VkmoeError for NaN and plus infinity."""
    result = logits.astype(np.float64)
    if not (result < np.inf).all():  # false for NaN too
        raise _bad_logits()
    return result


def _bad_logits() -> VkmoeError:
    return VkmoeError(
        "the model computed logits that are not numbers (NaN or infinite)",
        "the file may be damaged, or the driver wrong: try `vkmoe selftest`",
    )
