"""This module runs the token loop: the prompt, then one token at a time, until something ends it.

It owns the order of events, the reasons a generation ends, its statistics, and which tokens are in
the KV cache. It does not own the model: it talks to a `TokenRunner`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import RunResult, TokenBatch, TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.generate.detokenizer import StopMatcher, StreamDetokenizer
from vkmoe.generate.sampler import Sampler, random_seed
from vkmoe.generate.tokenizer import Tokenizer

__all__ = [
    "FinishReason",
    "Generation",
    "GenerationStatistics",
    "ObservedRunner",
    "Piece",
    "TokenRunner",
]

FinishReason = Literal["stop", "length", "interrupt"]


class TokenRunner(Protocol):
    """Describes what the loop needs of a model."""

    @property
    def ctx_size(self) -> int: ...

    def run(self, batch: TokenBatch) -> RunResult:
        """Process a batch; its result has the largest logits where it wants logits."""

    def rewind(self, position: int) -> int:
        """Go back to `position`, or further where the state cannot stop just there.

        Returns the position from which tokens have to be run (again): at most `position`.
        """

    def full_logits(self) -> NDArray[np.float32]:
        """Return all logits of the last token run with logits: float32 [n_vocab]."""


@dataclass(frozen=True)
class Piece:
    """Holds a generated token and the text that became certain with it (often part of a word).

    The last piece may have no token (-1): text that was held back for a stop string.
    """

    token_id: int
    text: str


@dataclass(frozen=True)
class GenerationStatistics:
    """Holds what a generation took; seconds. `prompt_seconds` ends with the prompt's last token."""

    load_seconds: float
    n_prompt_tokens: int
    n_reused_tokens: int  # of the prompt, found in the KV cache
    n_generated_tokens: int
    ttft_seconds: float
    prompt_seconds: float
    decode_seconds: float
    seed: int
    finish_reason: FinishReason

    @property
    def prompt_rate(self) -> float:
        """Return the prompt tokens per second (pp)."""
        n_tokens = self.n_prompt_tokens - self.n_reused_tokens
        return n_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Return the generated tokens per second after the first one (tg)."""
        n_tokens = self.n_generated_tokens - 1
        return n_tokens / self.decode_seconds if n_tokens > 0 and self.decode_seconds else 0.0


class Generation:
    """Runs the loop once. `cached` lists the tokens in the KV cache; it is kept true."""

    def __init__(
        self,
        runner: TokenRunner,
        tokenizer: Tokenizer,
        cached: list[int],
        tokens: list[int],
        sampling: SamplingConfig,
        max_tokens: int | None,
        stop: Sequence[str],
        ignore_eos: bool,
    ) -> None:
        self._runner = runner
        self._cached = cached
        self._tokens = tokens
        self.seed = sampling.seed if sampling.seed is not None else random_seed()
        end_ids = tokenizer.end_ids
        self._sampler = Sampler(sampling, self.seed, banned=end_ids if ignore_eos else ())
        self._sampler.accept(tokens)
        self._end_ids = frozenset() if ignore_eos else end_ids
        self._stops = StopMatcher(stop)
        self._text = StreamDetokenizer(tokenizer)
        room = runner.ctx_size - len(tokens) + 1  # the last token's own state need not fit
        self._limit = room if max_tokens is None else min(max_tokens, room)
        self._reason: FinishReason = "interrupt"
        self._n_reused = self._n_generated = 0
        self._started = self._prompt_done = self._first_token = 0.0

    def pieces(self, done: Callable[[Generation], None]) -> Iterator[Piece]:
        """Run the loop. `done` is called when it ends, is closed or is interrupted."""
        self._started = self._prompt_done = self._first_token = time.perf_counter()
        try:
            top = self._run_prompt()
            self._prompt_done = self._first_token = time.perf_counter()
            yield from self._decode(top)
            rest = self._rest()
            if rest:
                yield Piece(-1, rest)
        finally:
            done(self)

    def statistics(self, load_seconds: float) -> GenerationStatistics:
        """Return what the run took until now."""
        return GenerationStatistics(
            load_seconds=load_seconds,
            n_prompt_tokens=len(self._tokens),
            n_reused_tokens=self._n_reused,
            n_generated_tokens=self._n_generated,
            ttft_seconds=self._first_token - self._started,
            prompt_seconds=self._prompt_done - self._started,
            decode_seconds=time.perf_counter() - self._first_token,
            seed=self.seed,
            finish_reason=self._reason,
        )

    def _decode(self, top: TopLogits) -> Iterator[Piece]:
        """Choose, hand out, process: until an end token, a stop string or the limit."""
        while self._n_generated < self._limit:
            token = self._choose(top)
            self._n_generated += 1
            if self._n_generated == 1:
                self._first_token = time.perf_counter()
            if token in self._end_ids:
                self._reason = "stop"
                return
            yield Piece(token, self._stops.feed(self._text.feed(token)))
            if self._stops.stopped:
                self._reason = "stop"
                return
            if self._n_generated < self._limit:
                top = self._run(token, len(self._cached))
        self._reason = "length"

    def _rest(self) -> str:
        """Return the text held back for a stop string or an unfinished character."""
        if self._stops.stopped:
            return ""
        return self._stops.feed(self._text.finish()) + self._stops.finish()

    def _run_prompt(self) -> TopLogits:
        """Process the part of the prompt that is not in the KV cache already."""
        n_common = 0
        for ours, theirs in zip(self._tokens[:-1], self._cached, strict=False):
            if ours != theirs:
                break
            n_common += 1
        n_kept = self._runner.rewind(n_common)
        del self._cached[n_kept:]
        self._n_reused = n_kept
        for token in self._tokens[n_kept:-1]:
            self._process(token, len(self._cached), with_logits=False)
        return self._run(self._tokens[-1], len(self._tokens) - 1)

    def _run(self, token: int, position: int) -> TopLogits:
        top = self._process(token, position, with_logits=True)
        assert top is not None
        if top.has_nan:
            raise VkmoeError(
                "the model produced NaN logits",
                "the file's weights are damaged, or the driver computes wrongly: "
                "run `vkmoe selftest`",
            )
        return top

    def _process(self, token: int, position: int, with_logits: bool) -> TopLogits | None:
        """Run one token and note it in the cache; after a failure nothing is known to be there."""
        try:
            top = self._runner.run(TokenBatch.one(token, position, with_logits)).top
        except VkmoeError:
            self._cached.clear()
            raise
        self._cached.append(token)
        return top

    def _choose(self, top: TopLogits) -> int:
        token = self._sampler.sample(top, self._runner.full_logits)
        self._sampler.accept([token])
        return token


class ObservedRunner:
    """Wraps a `TokenRunner`, and calls `after(batch, result)` when a batch was run."""

    def __init__(self, runner: TokenRunner, after: Callable[[TokenBatch, RunResult], None]) -> None:
        self._runner, self._after = runner, after

    @property
    def ctx_size(self) -> int:
        return self._runner.ctx_size

    def run(self, batch: TokenBatch) -> RunResult:
        result = self._runner.run(batch)
        self._after(batch, result)
        return result

    def rewind(self, position: int) -> int:
        return self._runner.rewind(position)

    def full_logits(self) -> NDArray[np.float32]:
        return self._runner.full_logits()
