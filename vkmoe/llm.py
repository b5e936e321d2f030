"""The public class `LLM`: text in, text out, on a Vulkan device.

Owns the engine, the tokenizer and what is in the KV cache. Options are the fields of `EngineConfig`
and `SamplingConfig` (vkmoe/config.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.engine import Engine, TopLogits
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.generate.chat_template import ChatTemplate
from vkmoe.generate.detokenizer import StopMatcher, StreamDetokenizer
from vkmoe.generate.sampler import Candidates, Sampler, random_seed
from vkmoe.generate.tokenizer import Tokenizer
from vkmoe.placement.loader import Progress

__all__ = ["LLM", "FinishReason", "GenerationResult", "GenerationStatistics", "Piece",
           "demo_model_path"]

FinishReason = Literal["stop", "length", "interrupt"]
Prompt = str | Sequence[int]
Config = TypeVar("Config", EngineConfig, SamplingConfig)


def demo_model_path() -> Path:
    """The small model that comes with vkmoe."""
    return Path(str(files("vkmoe") / "data" / "demo.gguf"))


@dataclass(frozen=True)
class Piece:
    """One generated token and the text that became certain with it (often part of a word)."""

    token_id: int
    text: str


@dataclass(frozen=True)
class GenerationStatistics:
    """What a generation took; seconds. `prompt_seconds` ends with the first token."""

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
        """Prompt tokens per second (pp)."""
        n_tokens = self.n_prompt_tokens - self.n_reused_tokens
        return n_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second after the first one (tg)."""
        n_tokens = self.n_generated_tokens - 1
        return n_tokens / self.decode_seconds if n_tokens > 0 and self.decode_seconds else 0.0


@dataclass(frozen=True)
class GenerationResult:
    """A whole reply."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    statistics: GenerationStatistics


class LLM:
    """A language model on a Vulkan device.

        with LLM("model.gguf") as llm:
            print(llm.generate("def fib(n):", max_tokens=64).text)

    Without a model the small demo model is used. Options are those of `EngineConfig`. One thread
    at a time. Raises VkmoeError subclasses only, each with a hint.
    """

    def __init__(self, model: str | Path | None = None, config: EngineConfig | None = None, *,
                 progress: Progress | None = None, **options: Any) -> None:
        """`progress(done, total)` is called with bytes while the weights load."""
        started = time.perf_counter()
        config = _with_options(config or EngineConfig(), options)
        self.path = Path(model) if model is not None else demo_model_path()
        self.engine = Engine(self.path, config, progress)
        try:
            self.tokenizer = Tokenizer.from_metadata(self.engine.file.metadata)
            if self.tokenizer.n_vocab > self.spec.n_vocab:
                raise VkmoeError(
                    f"{self.path}: the tokenizer has {self.tokenizer.n_vocab} tokens, the model "
                    f"{self.spec.n_vocab}", "the file was converted wrongly or is damaged")
        except BaseException:
            self.engine.close()
            raise
        self.load_seconds = time.perf_counter() - started
        self.last_statistics: GenerationStatistics | None = None
        self._in_cache: list[int] = []  # tokens whose keys and values are in the KV cache

    # ----- facts -----

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def plan(self) -> MemoryPlan:
        return self.engine.plan

    @property
    def device_info(self) -> DeviceInfo:
        return self.engine.device.info

    @property
    def memory(self) -> dict[str, int]:
        """Bytes planned by place: "device" and "host"."""
        return self.engine.memory()

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises UnsupportedModelError if it has none."""
        return ChatTemplate.from_metadata(self.engine.file.metadata, self.tokenizer)

    # ----- generation -----

    def stream(self, prompt: Prompt, sampling: SamplingConfig | None = None, *,
               max_tokens: int | None = None, stop: Sequence[str] = (), ignore_eos: bool = False,
               **options: Any) -> Iterator[Piece]:
        """Generate token by token. `options` are fields of SamplingConfig.

        `last_statistics` is set when the iterator ends, is closed, or is interrupted (Ctrl-C is
        passed on). Raises PromptError for a prompt that is empty or does not fit.
        """
        sampling = _with_options(sampling or SamplingConfig(), options)
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens is {max_tokens}", "use 0 or more, or None for no limit")
        tokens = self._prompt_tokens(prompt)
        generation = _Generation(self, tokens, sampling, max_tokens, stop, ignore_eos)
        return generation.pieces()

    def generate(self, prompt: Prompt, sampling: SamplingConfig | None = None, *,
                 max_tokens: int | None = None, stop: Sequence[str] = (), ignore_eos: bool = False,
                 **options: Any) -> GenerationResult:
        """Generate a whole reply; see `stream`."""
        pieces = list(self.stream(prompt, sampling, max_tokens=max_tokens, stop=stop,
                                  ignore_eos=ignore_eos, **options))
        statistics = self.last_statistics
        assert statistics is not None
        token_ids = [piece.token_id for piece in pieces if piece.token_id >= 0]
        return GenerationResult("".join(piece.text for piece in pieces), token_ids,
                                statistics.finish_reason, statistics)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each token of a sequence: float32 [n_tokens, n_vocab]."""
        ids = self._prompt_tokens(tokens)
        self._in_cache = []
        rows = np.empty((len(ids), self.spec.n_vocab), np.float32)
        for position, token in enumerate(ids):
            self.engine.run_token(token, position)
            rows[position] = self.engine.full_logits()
        self._in_cache = list(ids)
        return rows

    def close(self) -> None:
        """Free the device. May be called twice."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    # ----- inside -----

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Check a prompt and turn it into ids."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens or prompt == "":
            raise PromptError("the prompt is empty", "give some text to continue")
        if len(tokens) > self.engine.ctx_size:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.engine.ctx_size}",
                f"shorten it, or raise --ctx-size (this model: at most {self.spec.context_length})")
        bad = [token for token in tokens if not 0 <= token < self.spec.n_vocab]
        if bad:
            raise PromptError(f"token id {bad[0]} is not one of the model's {self.spec.n_vocab}",
                              "use ids of this model's tokenizer")
        return [int(token) for token in tokens]

    @contextmanager
    def _writing_cache(self) -> Iterator[list[int]]:
        """The tokens in the KV cache; forgotten if the device fails meanwhile."""
        try:
            yield self._in_cache
        except VkmoeError:
            self._in_cache = []
            raise


class _Generation:
    """One run of the token loop."""

    def __init__(self, llm: LLM, tokens: list[int], sampling: SamplingConfig,
                 max_tokens: int | None, stop: Sequence[str], ignore_eos: bool) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._tokens = tokens
        end_ids = llm.tokenizer.end_ids
        seed = sampling.seed if sampling.seed is not None else random_seed()
        self._sampler = Sampler(sampling, seed, banned=end_ids if ignore_eos else ())
        self._sampler.accept(tokens)
        self._end_ids = frozenset() if ignore_eos else end_ids
        self._stops = StopMatcher(stop)
        self._text = StreamDetokenizer(llm.tokenizer)
        room = self._engine.ctx_size - len(tokens) + 1
        self._limit = room if max_tokens is None else min(max_tokens, room)
        self._seed = seed
        self._n_reused = self._n_generated = 0
        self._prompt_seconds = 0.0

    def pieces(self) -> Iterator[Piece]:
        """The generator behind `LLM.stream`: prompt, then a token a step."""
        started = time.perf_counter()
        reason: FinishReason = "interrupt"
        first_token_at = started
        try:
            top = self._run_prompt()
            self._prompt_seconds = time.perf_counter() - started
            first_token_at = time.perf_counter()
            reason = "length"
            while self._n_generated < self._limit:
                token = self._choose(top)
                self._n_generated += 1
                if self._n_generated == 1:
                    first_token_at = time.perf_counter()
                if token in self._end_ids:
                    reason = "stop"
                    break
                reason = "interrupt"
                yield Piece(token, self._stops.feed(self._text.feed(token)))
                if self._stops.stopped:
                    reason = "stop"
                    break
                reason = "length"
                if self._n_generated < self._limit:
                    reason = "interrupt"
                    top = self._run(token, len(self._llm._in_cache))
                    reason = "length"
            rest = self._rest()
            if rest:
                yield Piece(-1, rest)
        finally:
            self._llm.last_statistics = self._statistics(started, first_token_at, reason)

    def _rest(self) -> str:
        """Text held back for a stop string or an unfinished character."""
        return "" if self._stops.stopped else (
            self._stops.feed(self._text.finish()) + self._stops.finish())

    def _run_prompt(self) -> TopLogits:
        """Process the part of the prompt that is not in the KV cache already."""
        cached = self._llm._in_cache
        n_common = 0
        for ours, theirs in zip(self._tokens[:-1], cached, strict=False):
            if ours != theirs:
                break
            n_common += 1
        del cached[n_common:]
        self._n_reused = n_common
        for token in self._tokens[n_common:-1]:
            with self._llm._writing_cache() as in_cache:
                self._engine.run_token(token, len(in_cache), with_logits=False)
                in_cache.append(token)
        return self._run(self._tokens[-1], len(self._tokens) - 1)

    def _run(self, token: int, position: int) -> TopLogits:
        with self._llm._writing_cache() as in_cache:
            top = self._engine.run_token(token, position)
            in_cache.append(token)
        assert top is not None
        if top.has_nan:
            raise VkmoeError("the model produced NaN logits",
                             "the file's weights are damaged, or the driver computes wrongly: "
                             "run `vkmoe selftest`")
        return top

    def _choose(self, top: TopLogits) -> int:
        candidates = Candidates(top.ids, top.logits, self._llm.spec.n_vocab, top.log_sum_exp)
        token = self._sampler.sample(candidates, self._engine.full_logits)
        self._sampler.accept([token])
        return token

    def _statistics(self, started: float, first_token_at: float, reason: FinishReason,
                    ) -> GenerationStatistics:
        return GenerationStatistics(
            load_seconds=self._llm.load_seconds,
            n_prompt_tokens=len(self._tokens),
            n_reused_tokens=self._n_reused,
            n_generated_tokens=self._n_generated,
            ttft_seconds=first_token_at - started,
            prompt_seconds=self._prompt_seconds,
            decode_seconds=time.perf_counter() - first_token_at,
            seed=self._seed,
            finish_reason=reason,
        )


def _with_options(config: Config, options: dict[str, Any]) -> Config:
    """`config` with fields replaced; an unknown option is an error that names it."""
    known = {item.name for item in fields(config)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(f"unknown option {', '.join(unknown)}",
                         f"known are {', '.join(sorted(known))}")
    return replace(config, **options)
