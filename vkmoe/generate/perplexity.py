"""This module runs given tokens through a model and says how well it predicts each of them.

The definition of perplexity is that of llama.cpp's `llama-perplexity`, so that figures compare:
windows of a fixed length, each begun anew with BOS where the model wants one, of which only the
last tokens count. It owns windows and sums, not the text nor its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.batch import MAX_LATER, Phase, TokenBatch, TopLogits
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.generate.logprobs import log_probs
from vkmoe.generate.regions.regions import Regions
from vkmoe.generate.runner import BatchRunner, FetchLogits, bad_logits, heads

MOST_EXPONENT = 709.0  # of e in a float


class ScoredRow(NamedTuple):
    """Holds the logits after one of the tokens that were run; `fetch` returns them all [n_vocab].

    `fetch` may be called until the next row is asked for.
    """

    position: int
    top: TopLogits
    fetch: FetchLogits

    def surprise(self, token: int) -> float:
        """Return minus the log of the probability that `token` comes next; in nats.

        Raises VkmoeError for logits that are not numbers.
        """
        if self.top.has_nan or not math.isfinite(self.top.log_sum_exp):
            raise bad_logits()
        return -log_probs(token, 0, self.top, self.fetch).chosen


def run_tokens(
    runner: BatchRunner, regions: Regions, tokens: Sequence[int], first: int, phase: Phase
) -> Iterator[ScoredRow]:
    """Run tokens from an empty context on; yield the rows from position `first` on.

    Raises UsageError where all regions are in use, and errors of the model.
    """
    if not regions.n_free:
        raise UsageError("a reply is under way", "finish or close its stream first")
    region = regions.take(())
    try:
        start = regions.keep(region, ())
        while start < len(tokens):
            end = start + (runner.prompt_rows if phase == "prompt" else runner.max_decode_rows)
            if phase == "decode" and start < first:
                end = min(end, first)  # rows to decode want logits, all or none
            rows = range(start, min(end, len(tokens)))
            wanted = rows[max(0, first - start) :]
            batch = TokenBatch(
                tuple(tokens[start : rows.stop]),
                tuple(rows),
                (region,) * len(rows),
                tuple(row in wanted for row in rows),
                phase,
                tuple(tokens[rows.stop : rows.stop + MAX_LATER]),
            )
            result = runner.run(batch)
            regions.note(batch)
            found = heads(runner, result, len(wanted))
            for position, (top, fetch) in zip(wanted, found, strict=True):
                yield ScoredRow(position, top, fetch)
            start = rows.stop
    except VkmoeError:
        regions.go_back(region, 0)
        regions.forget()
        raise
    finally:
        regions.release(region)


@dataclass(frozen=True)
class Windows:
    """Says which tokens of a text are predicted, and from which: windows of `length` tokens.

    Without a stride they follow each other, and the second half of each counts but its first token;
    with one, each begins `stride` tokens behind the last, and its last `stride` tokens count.
    """

    length: int
    stride: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for windows in which nothing is predicted."""
        if self.length < 3:
            raise UsageError(f"a window of {self.length} tokens predicts none", "use 3 or more")
        if self.stride is not None and not 0 < self.stride < self.length:
            raise UsageError(
                f"--stride {self.stride} does not fit in a window of {self.length} tokens",
                f"use 1 to {self.length - 1}",
            )

    @property
    def first(self) -> int:
        """Return the position of a window whose logits are the first to count."""
        return self.length // 2 if self.stride is None else self.length - self.stride - 1

    def starts(self, n_tokens: int) -> range:
        """Return where the windows of a text begin. Raises PromptError for too short a text."""
        least = self.length + (self.stride is not None)  # the token behind a window counts then
        if n_tokens < least:
            raise PromptError(
                f"the text has {n_tokens} tokens, a window of {self.length} needs {least}",
                "give a longer text, or a smaller --ctx-size",
            )
        if self.stride is None:
            return range(0, n_tokens - self.length + 1, self.length)
        return range(0, n_tokens - self.length, self.stride)


@dataclass(frozen=True)
class Estimate:
    """Holds how well tokens were predicted so far; logarithms are natural."""

    n_windows: int
    n_planned: int  # windows that the text has
    n_tokens: int  # that were predicted
    mean: float  # of minus the log of their probabilities
    variance: float  # likewise, of the population

    @property
    def perplexity(self) -> float:
        """Return e to the mean; infinity where that is too large."""
        return math.exp(self.mean) if self.mean < MOST_EXPONENT else math.inf

    @property
    def standard_error(self) -> float:
        """Return that of the perplexity, as if tokens were independent; 0 for one token."""
        return self.perplexity * math.sqrt(self.variance / max(1, self.n_tokens - 1))


def estimates(
    runner: BatchRunner,
    regions: Regions,
    tokens: Sequence[int],
    windows: Windows,
    bos: Sequence[int],
) -> Iterator[Estimate]:
    """Yield the estimate after each window. `bos`: what the model wants first, one token or none.

    Raises PromptError for too short a text, and errors of the model.
    """
    n_tokens, mean, squares = 0, 0.0, 0.0  # squares: of distances to the mean, added up
    starts = windows.starts(len(tokens))
    for n_windows, start in enumerate(starts, 1):
        window = [*bos, *tokens[start + len(bos) : start + windows.length]]
        for row in run_tokens(runner, regions, window[:-1], windows.first, "prompt"):
            n_tokens += 1
            distance = row.surprise(window[row.position + 1]) - mean
            mean += distance / n_tokens
            squares += distance * distance * (n_tokens - 1) / n_tokens
        yield Estimate(n_windows, len(starts), n_tokens, mean, squares / n_tokens)
