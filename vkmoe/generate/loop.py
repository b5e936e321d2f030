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
from vkmoe.generate.reply import MarkFinder
from vkmoe.generate.sampler import Sampler, random_seed
from vkmoe.generate.tokenizer import StreamDetokenizer, Tokenizer

__all__ = [
    "CachedSequence",
    "FinishReason",
    "Generation",
    "GenerationStatistics",
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


class CachedSequence:
    """Runs the tokens of one sequence, and knows which of them are in the KV cache."""

    def __init__(self, runner: TokenRunner) -> None:
        self.runner = runner
        self.tokens: list[int] = []  # those in the cache
        self.after_run: Callable[[TokenBatch, RunResult], None] | None = None

    def go_back(self, tokens: Sequence[int]) -> int:
        """Forget what does not begin `tokens`. Returns how many need not be run again."""
        n_common = 0
        for ours, theirs in zip(tokens, self.tokens, strict=False):
            if ours != theirs:
                break
            n_common += 1
        n_kept = self.runner.rewind(n_common)
        del self.tokens[n_kept:]
        return n_kept

    def run(self, token: int, with_logits: bool = True) -> TopLogits | None:
        """Run the next token; after a failure nothing is known to be in the cache."""
        batch = TokenBatch.one(token, len(self.tokens), with_logits)
        try:
            result = self.runner.run(batch)
        except VkmoeError:
            self.tokens.clear()
            raise
        self.tokens.append(token)
        if self.after_run is not None:
            self.after_run(batch, result)
        return result.top


class Generation:
    """Runs the loop once."""

    def __init__(
        self,
        sequence: CachedSequence,
        tokenizer: Tokenizer,
        tokens: list[int],
        sampling: SamplingConfig,
        max_tokens: int | None,
        stop: Sequence[str],
        ignore_eos: bool,
    ) -> None:
        self._sequence = sequence
        self._tokens = tokens
        self._seed = sampling.seed if sampling.seed is not None else random_seed()
        end_ids = tokenizer.end_ids
        self._sampler = Sampler(sampling, self._seed, banned=end_ids if ignore_eos else ())
        self._sampler.accept(tokens)
        self._end_ids = frozenset() if ignore_eos else end_ids
        self._stops = MarkFinder(stop)
        self._text = StreamDetokenizer(tokenizer)
        # The last token's own state need not fit.
        room = sequence.runner.ctx_size - len(tokens) + 1
        self._limit = room if max_tokens is None else min(max_tokens, room)
        self._reason: FinishReason = "interrupt"
        self._n_reused = self._n_generated = 0
        self._started = self._prompt_done = self._first_token = 0.0

    def pieces(self, done: Callable[[Generation], None]) -> Iterator[Piece]:
        """Run the loop. `done` is called when it ends, is closed or is interrupted."""
        self._started = self._prompt_done = self._first_token = time.perf_counter()
        try:
            self._n_reused = self._sequence.go_back(self._tokens[:-1])
            for token in self._tokens[self._n_reused : -1]:
                self._sequence.run(token, with_logits=False)
            top = self._run(self._tokens[-1])
            self._prompt_done = self._first_token = time.perf_counter()
            yield from self._decode(top)
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
            seed=self._seed,
            finish_reason=self._reason,
        )

    def _decode(self, top: TopLogits) -> Iterator[Piece]:
        """Choose, hand out, process: until an end token, a stop string or the limit."""
        while self._n_generated < self._limit:
            token = self._sampler.sample(top, self._sequence.runner.full_logits)
            self._sampler.accept([token])
            self._n_generated += 1
            if self._n_generated == 1:
                self._first_token = time.perf_counter()
            if token in self._end_ids:
                self._reason = "stop"
                break
            text, stop = self._stops.feed(self._text.feed(token))
            yield Piece(token, text)
            if stop is not None:
                self._reason = "stop"
                return
            if self._n_generated < self._limit:
                top = self._run(token)
        else:
            self._reason = "length"
        # What was held back: an unfinished character, and what might have become a stop string.
        text, stop = self._stops.feed(self._text.finish())
        rest = text if stop is not None else text + self._stops.finish()
        if rest:
            yield Piece(-1, rest)

    def _run(self, token: int) -> TopLogits:
        top = self._sequence.run(token)
        assert top is not None
        if top.has_nan:
            raise VkmoeError(
                "the model produced NaN logits",
                "the file's weights are damaged, or the driver computes wrongly: "
                "run `vkmoe selftest`",
            )
        return top
