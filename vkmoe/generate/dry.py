"""This module finds what DRY subtracts from logits, so that a reply does not repeat long passages.

It owns how long a repeat each token would go on with, and where breakers end one. The method is
p-e-w's "Don't Repeat Yourself", in the form of llama.cpp's `llama_sampler_dry`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np

from vkmoe.config import SamplingConfig
from vkmoe.errors import PromptError
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.option_fields import parse_breakers

Tail = tuple[int, ...]
Breakers = Mapping[int, set[Tail]]

_MAX_LOG = 88.7228391  # of the largest penalty before its multiplier: that of a 32-bit float
_LONGEST_TAIL = 20  # tokens of a breaker behind its first


class Dry:
    """Says which tokens would go on with a repeat, and how much that costs them."""

    def __init__(self, config: SamplingConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._most: float = math.inf  # tokens of a repeat: longer ones cost no more
        if config.dry_base > 1.000001:
            self._most = config.dry_allowed_length + int(_MAX_LOG / math.log(config.dry_base))

    @property
    def is_on(self) -> bool:
        """Say whether it ever subtracts anything."""
        return self._config.dry_multiplier != 0 and self._config.dry_penalty_last_n != 0

    def penalties(self, history: Sequence[int]) -> dict[int, float]:
        """Return what is subtracted from the logits of tokens, by the tokens before, oldest first.

        The penalty is multiplier * base^(n - allowed length), where the last n tokens stood before
        and the token stood behind them.
        """
        c = self._config
        window = history if c.dry_penalty_last_n < 0 else history[-c.dry_penalty_last_n :]
        longest = self._repeats(window, self._since_breaker(window))
        return {
            token: c.dry_multiplier * c.dry_base ** (n - c.dry_allowed_length)
            for token, n in longest.items()
            if () not in self._breakers.get(token, ())
        }

    def _repeats(self, window: Sequence[int], most: int) -> dict[int, int]:
        """Return how many tokens a token would go on with a repeat of, if they are enough.

        Repeats are counted up to `most` tokens.
        """
        least, most = self._config.dry_allowed_length, int(min(most, self._most))
        if len(window) <= least or most < least:
            return {}
        found: dict[int, int] = {}
        tokens = np.array(window, np.int64)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of earlier texts like the last `n`
        for n in range(1, most + 1):
            goes_on = ends >= n
            goes_on[goes_on] = tokens[ends[goes_on] - n] == tokens[-1 - n]
            done = ends if n == most else ends[~goes_on]
            if n >= least:  # what is longer comes later, and counts
                found |= dict.fromkeys(tokens[done + 1].tolist(), n)
            ends = ends[goes_on]
            if not ends.size:
                break
        return found

    def _since_breaker(self, window: Sequence[int]) -> int:
        """Count the tokens behind the last breaker."""
        for n_behind, token in enumerate(reversed(window)):
            tails = self._breakers.get(token, ())
            start = len(window) - n_behind
            held = [len(tail) for tail in tails if tuple(window[start : start + len(tail)]) == tail]
            if held:
                return n_behind - max(held)
        return len(window)

    @cached_property
    def _breakers(self) -> Breakers:
        return _breakers(self._tokenizer, self._config.dry_sequence_breakers)


@lru_cache(maxsize=4)  # it takes a while with a large vocabulary
def _breakers(tokenizer: Tokenizer, texts: str) -> Breakers:
    """Return the tokens with which breakers begin, each with the tokens that may follow."""
    found: defaultdict[int, set[Tail]] = defaultdict(set)
    for text in parse_breakers(texts):
        breaker = text.encode("utf-8", "replace")
        for token in [i for i, word in enumerate(tokenizer.words) if breaker in word]:
            found[token].add(())
        starts: defaultdict[int, list[int]] = defaultdict(list)  # lengths, by their last byte
        for n in range(1, len(breaker)):
            starts[breaker[n - 1]].append(n)
        tails = {n: _tail(tokenizer, breaker[n:]) for n in range(1, len(breaker))}
        for token, word in enumerate(tokenizer.words) if starts else ():
            for n in starts.get(word[-1], ()) if word and breaker not in word else ():
                if word.endswith(breaker[:n]):
                    found[token] |= tails[n]
    return dict(found)


def _tail(tokenizer: Tokenizer, rest: bytes) -> set[Tail]:
    """Return the tokens of the rest of a breaker; none where it has half a character."""
    try:
        return {tuple(tokenizer.encode_plain(rest.decode()))[:_LONGEST_TAIL]}
    except (UnicodeDecodeError, PromptError):
        return set()
