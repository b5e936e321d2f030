"""This module has the public class `LLM`: text in, text out, on a Vulkan device.

Owns the engine, the tokenizer and the sequence in the KV cache. Options are the fields of
`EngineConfig` and `SamplingConfig` (vkmoe/config.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.engine import Engine
from vkmoe.errors import GpuError, ModelFileError, PromptError, UsageError
from vkmoe.experts.records.keeper import RecordKeeper
from vkmoe.experts.records.report import ExpertReport, make_report, setup_of
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.generate.loop import (
    CachedSequence,
    FinishReason,
    Generation,
    GenerationStatistics,
    Piece,
)
from vkmoe.generate.tokenizer import Tokenizer
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.loader import Progress

if TYPE_CHECKING:
    from vkmoe.generate.chat import ChatTemplate

__all__ = [
    "LLM",
    "FinishReason",
    "GenerationResult",
    "GenerationStatistics",
    "Piece",
    "demo_model_path",
    "read_tokenizer",
]

Prompt = str | Sequence[int]
Config = TypeVar("Config", EngineConfig, SamplingConfig)


def demo_model_path() -> Path:
    """Return the path of the small model that comes with vkmoe."""
    return Path(str(files("vkmoe") / "data" / "demo.gguf"))


@dataclass(frozen=True)
class GenerationResult:
    """Holds a whole reply."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    statistics: GenerationStatistics


class LLM(Closing):
    """Runs a language model on a Vulkan device.

        with LLM("model.gguf") as llm:
            print(llm.generate("def fib(n):", max_tokens=64).text)

    Without a model the small demo model is used. Options are those of `EngineConfig`. One thread
    at a time. Raises VkmoeError and its subclasses only, each with a hint.
    """

    def __init__(
        self,
        model: str | Path | ModelFile | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Load `model`; one that is open already is closed with this, or when loading fails.

        `progress(done, total)` is called with bytes while the weights load.
        """
        started = time.perf_counter()
        config = _with_options(config or EngineConfig(), options)
        if not isinstance(model, ModelFile):
            model = open_model(model if model is not None else demo_model_path())
        with ExitStack() as unless_loaded:
            unless_loaded.callback(model.close)
            self._config = config
            self.tokenizer = read_tokenizer(model)
            records = RecordKeeper(config, model.spec, model.expert_tensors)
            self.engine = Engine(model, config, progress, seed=records.seed)
            unless_loaded.pop_all()
        self._records: RecordKeeper | None = records
        self.sequence = CachedSequence(self.engine)
        self.load_seconds = time.perf_counter() - started
        self.last_statistics: GenerationStatistics | None = None

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
        """Count the bytes planned by place: "device" and "host"."""
        return {place: self.plan.total(place) for place in ("device", "host")}

    @property
    def expert_statistics(self) -> ExpertReport:
        """Report how often device memory served the experts' uses since the model was loaded."""
        engine, cache = self.engine, self.engine.cache
        predictor = cache.residency.settings.predictor if cache is not None else "none"
        setup = setup_of(self.spec, self.plan, self.device_info, self._config, predictor)
        if cache is None:
            return make_report(setup, engine.profiler)
        return make_report(
            setup,
            engine.profiler,
            cache.counters,
            pinned=cache.residency.pinned,
            pool=cache.pool.counters if cache.pool else None,
            overlap=engine.overlap,
            predictions=cache.residency.predictions,
        )

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template. Raises UnsupportedModelError if it has none."""
        from vkmoe.generate.chat import ChatTemplate  # and with it Jinja, which few runs need

        return ChatTemplate.from_file(self.engine.model.file, self.tokenizer)

    # ----- generation -----

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingConfig | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        **options: Any,
    ) -> Iterator[Piece]:
        """Generate token by token. `options` are fields of SamplingConfig.

        `last_statistics` is set when the iterator ends, is closed, or is interrupted (Ctrl-C is
        passed on). Raises PromptError for a prompt that is empty or does not fit.
        """
        sampling = _with_options(sampling or SamplingConfig(), options)
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens is {max_tokens}", "use 0 or more, or None for no limit")
        if not all(stop):
            raise UsageError("a stop string is empty", "leave the option out for no stop string")
        tokens = self._prompt_tokens(prompt)
        generation = Generation(
            self.sequence, self.tokenizer, tokens, sampling, max_tokens, stop, ignore_eos
        )
        return generation.pieces(self._note_statistics)

    def generate(
        self, prompt: Prompt, sampling: SamplingConfig | None = None, **options: Any
    ) -> GenerationResult:
        """Generate a whole reply; all options are those of `stream`."""
        pieces = list(self.stream(prompt, sampling, **options))
        statistics = self.last_statistics
        assert statistics is not None
        token_ids = [piece.token_id for piece in pieces if piece.token_id >= 0]
        return GenerationResult(
            "".join(piece.text for piece in pieces), token_ids, statistics.finish_reason, statistics
        )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute the logits after each token of a sequence: float32 [n_tokens, n_vocab]."""
        ids = self._prompt_tokens(tokens)
        rows = np.empty((len(ids), self.spec.n_vocab), np.float32)
        self.sequence.tokens.clear()
        for row, token in zip(rows, ids, strict=True):
            self.sequence.run(token)
            row[:] = self.engine.full_logits()
        return rows

    def close(self) -> None:
        """Write what `expert_stats` and `expert_profile` ask for, and free the device.

        May be called twice. Raises VkmoeError if a file cannot be written; while another exception
        is on its way, that is logged instead.
        """
        records, self._records = self._records, None
        try:
            if records is not None:
                records.write(self.expert_statistics, self.engine.expert_counts())
        finally:
            self.engine.close()

    # ----- inside -----

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Check a prompt and turn it into ids."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise PromptError("the prompt is empty", "give some text to continue")
        if len(tokens) > self.engine.ctx_size:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.engine.ctx_size}",
                f"shorten it, or raise --ctx-size (this model: at most {self.spec.context_length})",
            )
        bad = [token for token in tokens if not 0 <= token < self.spec.n_vocab]
        if bad:
            raise PromptError(
                f"token id {bad[0]} is not one of the model's {self.spec.n_vocab}",
                "use ids of this model's tokenizer",
            )
        return [int(token) for token in tokens]

    def _note_statistics(self, generation: Generation) -> None:
        self.last_statistics = generation.statistics(self.load_seconds)
        with suppress(GpuError):  # an error of the generation is the one to tell
            self.engine.settle()


def read_tokenizer(model: ModelFile) -> Tokenizer:
    """Read a model's tokenizer, before its weights are loaded, which may take minutes.

    Raises ModelFileError, UnsupportedModelError; also for a tokenizer that knows tokens the model
    does not have.
    """
    tokenizer = Tokenizer.from_file(model.file)
    if tokenizer.n_vocab > model.spec.n_vocab:
        raise ModelFileError(
            f"{model.file.path}: the tokenizer has {tokenizer.n_vocab} tokens, the model "
            f"{model.spec.n_vocab}",
            "the file was converted wrongly or is damaged",
        )
    return tokenizer


def _with_options(config: Config, options: dict[str, Any]) -> Config:
    """Return `config` with fields replaced; an unknown option is an error that names it."""
    known = {item.name for item in fields(config)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(
            f"unknown option {', '.join(unknown)}", f"known are {', '.join(sorted(known))}"
        )
    return replace(config, **options)
