"""This module holds one reply on its way: what was asked, its tokens, its text, why it ends.

It owns the order of events of a sequence and its statistics. It runs no model: when its rows run,
and beside which others, is the subject of scheduler.py.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TopLogits
from vkmoe.choices import Pooling
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.generate.constraint import Constraint
from vkmoe.generate.dry import Dry
from vkmoe.generate.logprobs import LogProbs, log_probs, of_shares
from vkmoe.generate.pooling import Pool
from vkmoe.generate.reply import MarkFinder
from vkmoe.generate.runner import FetchLogits, bad_logits
from vkmoe.generate.sampler import Sampler, random_seed
from vkmoe.generate.text.tokenizer import StreamDetokenizer, Tokenizer

FinishReason = Literal["stop", "length", "interrupt"]


@dataclass(frozen=True)
class Request:
    """Says what to generate. `LLM.request` makes one and checks it."""

    tokens: tuple[int, ...]  # of the prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_tokens: int | None = None  # None: until the context is full
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    n_logprobs: int | None = None  # of the likeliest tokens; None: not even the chosen one's
    logprobs_as_drawn: bool = False  # after temperature, penalties and all else had their say
    constraint: Constraint | None = None  # the form that the reply is kept to
    shown: frozenset[int] = frozenset()  # control tokens that the text shows
    with_routing: bool = False  # the experts that each token uses are kept
    scores_prompt: bool = False  # how likely the prompt's tokens are is kept; needs n_logprobs
    pooling: Pooling | None = None  # the prompt's embedding is wanted, and no reply; None: a reply

    @property
    def reads_all(self) -> bool:
        """Say whether all rows of the prompt are computed, also those that were before."""
        return self.with_routing or self.scores_prompt or self.pooling is not None


@dataclass(frozen=True)
class Piece:
    """Holds a generated token and the text that became certain with it (often part of a word).

    The last piece may have no token (-1): text that was held back for a stop string. Where the
    request wants them, log-probabilities are those of the model's raw logits: temperature,
    penalties, biases and constraints do not count, unless it wants those of the draw.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # of the likeliest, in order; see logprobs.py


@dataclass(frozen=True)
class GenerationStatistics:
    """Holds what a generation took; seconds.

    `ttft_seconds` begins when it was asked for, `prompt_seconds` when it got a place among the
    sequences that run; that ends with the prompt's last token.
    """

    load_seconds: float
    n_prompt_tokens: int
    n_reused_tokens: int  # of the prompt, not computed again
    n_generated_tokens: int
    ttft_seconds: float
    prompt_seconds: float
    decode_seconds: float
    seed: int
    finish_reason: FinishReason
    n_decode_steps: int = 0  # runs of the model after the prompt
    n_drafted_tokens: int = 0  # guesses that these verified
    n_accepted_tokens: int = 0  # guesses that were right

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

    @property
    def accepted_per_step(self) -> float:
        """Return how many guesses a run of the model made good, on average."""
        return self.n_accepted_tokens / self.n_decode_steps if self.n_decode_steps else 0.0


class Generation:
    """Holds the state of one reply. The scheduler fills `pieces`, a reader takes from them.

    `cancel` and `take_pieces` may be called on any thread.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, ctx_size: int) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens = list(request.tokens)  # of the prompt, then of the reply
        self.n_prompt = len(self.tokens)
        self.n_read = 0  # tokens of the prompt that are in the KV cache
        self.pieces: deque[Piece] = deque()
        self.finish_reason: FinishReason | None = None
        self.error: VkmoeError | None = None  # what ended it, where that was no wish
        self.stop_text: str | None = None  # which of the asked texts ended it
        self.is_cancelled = False
        self.n_reused = self.n_decode_steps = self.n_drafted = self.n_accepted = 0
        self.n_generated = 0  # tokens, one that ends the reply included
        self.prompt_logprobs: list[LogProbs] = []  # of its second token on, if it is scored
        pooling = request.pooling
        self.pool = Pool(pooling, self.n_prompt) if pooling is not None else None
        self._routing: list[NDArray[np.uint16]] = []  # of each row [n_moe_layers, n_used]
        self._seed = sampling.seed if sampling.seed is not None else random_seed()
        banned = tokenizer.end_ids if request.ignore_eos else ()
        biases, dry = dict(request.logit_bias), Dry(sampling, tokenizer)
        self._sampler = Sampler(sampling, self._seed, banned, biases, dry)
        self._n_logprobs = request.n_logprobs
        self._form = request.constraint.begin() if request.constraint is not None else None
        self._sampler.accept(self.tokens)
        self._end_ids = frozenset() if request.ignore_eos else tokenizer.end_ids
        self._stops = MarkFinder(request.stop)
        # A form knows the blank of every token.
        keeps_blanks = self._form is not None
        self._text = StreamDetokenizer(tokenizer, keeps_blanks=keeps_blanks, shown=request.shown)
        # The last token's own state need not fit.
        room = ctx_size - self.n_prompt + 1
        self._limit = room if request.max_tokens is None else min(request.max_tokens, room)
        self._submitted = self._began = self._prompt_done = self._first_token = 0.0
        self._ended: float | None = None

    @property
    def is_done(self) -> bool:
        """Say whether all pieces are there: it ended, failed or was cancelled."""
        return self.finish_reason is not None

    @property
    def n_left(self) -> int:
        """Return how many tokens the reply may still have."""
        return self._limit - self.n_generated

    @property
    def routing(self) -> NDArray[np.uint16]:
        """Return the experts that its tokens used: [n_tokens, n_moe_layers, n_used].

        The last token that was chosen has no row, as it never runs. Must hold: it was asked for,
        and something ran.
        """
        n_rows = self.n_prompt + max(0, self.n_generated - 1)
        return np.stack(self._routing[:n_rows])

    # ----- what happens to it, in order -----

    def submitted(self) -> None:
        """Note that it waits for a region. Mutates."""
        now = time.perf_counter()
        self._submitted = self._began = self._prompt_done = self._first_token = now

    def begin(self) -> None:
        """Note that its prompt begins to run. Mutates."""
        self._began = self._prompt_done = self._first_token = time.perf_counter()

    def note_routing(self, position: int, routing: NDArray[np.uint32]) -> None:
        """Note which experts the rows from `position` on used, if that was asked for. Mutates.

        Rows that ran before at these positions or behind them count no more.
        """
        if self.request.with_routing:
            del self._routing[position:]
            self._routing.extend(routing.astype(np.uint16))

    def choose(self, top: TopLogits, fetch_logits: FetchLogits) -> int | None:
        """Choose the next token by the logits after the last one. Mutates.

        Returns it; None where there is none to choose. Raises VkmoeError for logits that are not
        numbers.
        """
        if top.has_nan:
            raise bad_logits()
        if self.n_generated == 0:
            self._prompt_done = self._first_token = time.perf_counter()
        if self.n_left <= 0:
            self._finish("length")
            return None
        allowed = None
        if self._form is not None:
            allowed = self._form.allowed()
            if allowed is None:
                self._finish("stop")
                return None
        fetch = cache(fetch_logits)
        token = self._sampler.sample(top, fetch, allowed)
        likely = None
        if self._n_logprobs is not None and self.request.logprobs_as_drawn:
            likely = of_shares(token, self._n_logprobs, self._sampler.shares)
        elif self._n_logprobs is not None:
            likely = log_probs(token, self._n_logprobs, top, fetch)
        self.n_generated += 1
        if self.n_generated == 1:
            self._first_token = time.perf_counter()
        self._accept(token, likely)
        return token

    def score(self, top: TopLogits, fetch_logits: FetchLogits) -> None:
        """Note how likely the next token of the prompt is, by the logits before it. Mutates.

        Raises VkmoeError for logits that are not numbers.
        """
        if top.has_nan:
            raise bad_logits()
        token = self.tokens[len(self.prompt_logprobs) + 1]
        found = log_probs(token, self._n_logprobs or 0, top, cache(fetch_logits))
        self.prompt_logprobs.append(found)

    def take_states(self, states: NDArray[np.float32]) -> None:
        """Note the states of the prompt's next tokens [n_tokens, width]. Mutates.

        It ends with the last that its embedding needs. Raises VkmoeError for what is no number.
        """
        assert self.pool is not None
        self.pool.add(states)
        if self.pool.is_whole:
            self._prompt_done = self._first_token = time.perf_counter()
            self.end("stop")

    def take_pieces(self) -> list[Piece]:
        """Return the pieces that came since the last call. Mutates."""
        return [self.pieces.popleft() for _ in range(len(self.pieces))]

    def cancel(self) -> None:
        """Ask for its end, which the scheduler's next step brings. Mutates."""
        self.is_cancelled = True

    def end_for_room(self) -> None:
        """End it, with all its text, as there is no room for another token. Mutates."""
        self._finish("length")

    def end(self, reason: FinishReason, error: VkmoeError | None = None) -> None:
        """End it now, without the text that is held back, unless it has ended. Mutates."""
        if not self.is_done:
            if self._form is not None:
                self._form.close()
                self._form = None
            self.error, self._ended = error, time.perf_counter()
            self.finish_reason = reason  # last: from here on a reader needs no more steps

    def statistics(self, load_seconds: float) -> GenerationStatistics:
        """Return what the run took until now, or until it ended."""
        ended = time.perf_counter() if self._ended is None else self._ended
        read = self._prompt_done if self.n_generated or self._ended is not None else ended
        return GenerationStatistics(
            load_seconds=load_seconds,
            n_prompt_tokens=self.n_prompt,
            n_reused_tokens=self.n_reused,
            n_generated_tokens=self.n_generated,
            ttft_seconds=self._first_token - self._submitted,
            prompt_seconds=read - self._began,
            decode_seconds=ended - self._first_token,
            seed=self._seed,
            finish_reason=self.finish_reason or "interrupt",
            n_decode_steps=self.n_decode_steps,
            n_drafted_tokens=self.n_drafted,
            n_accepted_tokens=self.n_accepted,
        )

    # ----- inside -----

    def _accept(self, token: int, likely: LogProbs | None) -> None:
        """Take a token into the reply, and see whether that ends it. Mutates."""
        self._sampler.accept([token])
        if token in self._end_ids:
            self._finish("stop")
            return
        self.tokens.append(token)
        text, stop = self._stops.feed(self._text.feed(token))
        self.pieces.append(Piece(token, text, *(likely or ())))
        if stop is not None:
            self.stop_text = stop
            self.end("stop")
        elif self._form is not None and not self._form.accept(token):
            self._finish("stop")
        elif self.n_left == 0:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        """End it with what was held back: an unfinished character, what might be a stop string."""
        text, stop = self._stops.feed(self._text.finish())
        rest = text if stop is not None else text + self._stops.finish()
        if rest:
            self.pieces.append(Piece(-1, rest))
        self.end(reason)
