"""This module has the public class `LLM`: text in, text out, on a Vulkan device.

Owns the engine, the tokenizer and the scheduler of replies. Options are the fields of
`EngineConfig` and `SamplingConfig` (vkmoe/config.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, get_args, overload

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import Phase
from vkmoe.catalogue import fetcher
from vkmoe.choices import DraftWay
from vkmoe.closing import Closing
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.engine import Engine
from vkmoe.errors import UsageError
from vkmoe.experts.records.keeper import RecordKeeper
from vkmoe.experts.records.report import ExpertReport, make_report, setup_of
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.generate.chat.format import ChatFormat
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.checks import (
    check_choice,
    check_kind,
    check_path,
    check_prompts,
    check_text,
    checked_options,
)
from vkmoe.generate.constraint import Constraint, Constraints
from vkmoe.generate.loop import Generation, GenerationStatistics, Piece, Request
from vkmoe.generate.perplexity import Estimate, Windows, estimates, run_tokens
from vkmoe.generate.runner import BatchRunner
from vkmoe.generate.scheduler import Scheduler
from vkmoe.llm.files import file_of, read_tokenizer
from vkmoe.llm.requests import Prompt, Prompts, check_request, prompt_tokens, with_options
from vkmoe.llm.results import GenerationResult, result_of
from vkmoe.llm.turns import News, Turns
from vkmoe.mode_trial import choose_mode
from vkmoe.models import ModelFile, open_model
from vkmoe.models.ahead_file import with_ahead
from vkmoe.weights.placer import Progress


class LLM(Closing):
    """Runs a language model on a Vulkan device.

        with LLM("model.gguf") as llm:
            print(llm.generate("def fib(n):", max_tokens=64).text)

    Without a model the small demo model is used. Options are those of `EngineConfig`. Any thread
    may call it: calls take turns between two runs of the model, and a reply is the same whatever
    else is generated. Raises VkmoeError and its subclasses only, each with a hint; and
    KeyboardInterrupt, after which it may be used as before.
    """

    def __init__(
        self,
        model: str | Path | ModelFile | None = None,
        config: EngineConfig | None = None,
        *,
        chat_template: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Load `model`: a file, a folder with one, or a name, as `find_model` has them.

        What is not on this machine is downloaded. An open file is closed with this object, or when
        loading fails. `chat_template`, as Jinja, is used in place of the model's.
        `progress(done, total)` is called with bytes: of a download, then of weights.
        """
        started = time.perf_counter()
        config = with_options(EngineConfig, config, options)
        check_kind("chat_template", chat_template, str | None, "give a text")
        check_kind("progress", progress, Callable | None, "give a function of two numbers")
        if not isinstance(model, ModelFile):
            check_path("model", model)
            model = open_model(file_of(model, config, fetcher(config, progress)))
        with ExitStack() as unless_loaded:
            unless_loaded.callback(model.close)
            self._config, self._given_template = config, chat_template
            model = with_ahead(model, config)
            unless_loaded.callback(model.close)
            self.tokenizer = read_tokenizer(model)
            records = RecordKeeper(config, model.spec, model.expert_tensors)
            choice = choose_mode(model, config, self.tokenizer.encode, progress)
            self.engine = Engine(model, config, progress, choice=choice, seed=records.seed)
            unless_loaded.pop_all()
        self._records: RecordKeeper | None = records
        self.runner: BatchRunner = self.engine
        guesses: DraftWay = "mtp" if self.engine.n_guesses else "none"
        self.scheduler = Scheduler(self.runner, "lookup" if config.draft == "lookup" else guesses)
        self.load_seconds = time.perf_counter() - started
        self.last_statistics: GenerationStatistics | None = None
        self._turns = Turns(self.scheduler, self.engine.settle)

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
        """Report how often device memory served the experts' uses since the model was loaded.

        Raises UsageError once the model is closed.
        """
        with self._turns.taken():
            return self._report()

    def _report(self) -> ExpertReport:
        engine, cache = self.engine, self.engine.cache
        policy = cache.residency.settings.policy if cache is not None else None
        setup = setup_of(self.spec, self.plan, self.device_info, self._config, policy)
        if cache is None:
            return make_report(setup, engine.profiler)
        return make_report(
            setup,
            engine.profiler,
            cache.counters,
            pinned=cache.residency.pinned,
            pool=cache.pool_counters,
            overlap=engine.overlap,
            predictions=cache.residency.predictions,
        )

    @property
    def has_chat_template(self) -> bool:
        """Say whether the model has a chat template, in its file or given with it."""
        given = self._given_template or self.engine.model.file.get(
            "tokenizer.chat_template", str, ""
        )
        return bool(given)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template. Raises UnsupportedModelError if it has none."""
        file = self.engine.model.file
        return ChatTemplate.from_file(file, self.tokenizer, self._given_template)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Return how the model writes conversations; without a template, by one that joins texts.

        Raises VkmoeError for a template that cannot be used.
        """
        own = self.chat_template if self.has_chat_template else None
        return ChatFormat.of(own, self.tokenizer)

    @cached_property
    def constraints(self) -> Constraints:
        """Return the maker of constraints for this model. Any thread may call its methods."""
        return Constraints(self.tokenizer)

    # ----- generation -----

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingConfig | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logit_bias: Mapping[int, float] | None = None,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
        shown: frozenset[int] = frozenset(),
        with_routing: bool = False,
        scores_prompt: bool = False,
        logprobs_as_drawn: bool = False,
        **options: Any,
    ) -> Request:
        """Check what is to be generated. `options` are fields of SamplingConfig.

        The reply ends before the first text of `stop`, one or several. `logit_bias` maps tokens to
        what is added to their logits, -100 to 100; with `n_logprobs` pieces and results have
        log-probabilities, of each token and of that many of the likeliest ones; `constraint`, made
        by `constraints`, is the form of the reply; `shown` are control tokens that its text shows;
        `with_routing` keeps which experts each token uses, `scores_prompt` how likely each of the
        prompt's was, with as many others as `n_logprobs` says; `logprobs_as_drawn` counts
        temperature, penalties and the like in log-probabilities.
        Raises UsageError, and PromptError for a prompt that is empty or does not fit.
        """
        sampling = with_options(SamplingConfig, sampling, options)
        given = {
            "max_tokens": max_tokens,
            "stop": stop,
            "ignore_eos": ignore_eos,
            "logit_bias": logit_bias,
            "n_logprobs": n_logprobs,
            "constraint": constraint,
            "shown": shown,
            "with_routing": with_routing,
            "scores_prompt": scores_prompt,
            "logprobs_as_drawn": logprobs_as_drawn,
        }
        asked = checked_options(given, self.spec.n_vocab)
        request = Request(tuple(self._prompt_tokens(prompt)), sampling, **asked)
        check_request(request, self.tokenizer, self.spec)
        return request

    def stream(
        self,
        prompt: Prompt | Request,
        sampling: SamplingConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Iterator[Piece]:
        """Generate token by token; all options are those of `request`.

        `progress(done, in all)` is called with tokens while the prompt is read. `last_statistics`
        is set when the iterator ends, is closed, or is interrupted by Ctrl-C. Raises
        PromptError for a prompt that is empty or does not fit, now; errors of the model later.
        """
        check_kind("progress", progress, Callable | None, "give a function of two numbers")
        (request,) = self._requests([prompt], sampling, options)
        return self._pieces(request, progress)

    def stream_many(
        self, prompts: Prompts, sampling: SamplingConfig | None = None, **options: Any
    ) -> Iterator[tuple[int, Piece]]:
        """Generate replies to several prompts together; yield the pieces of all as they come.

        Each comes with the index of its prompt. Options are those of `request`, for every prompt
        but those that are a Request. An error ends all.
        """
        return self._pieces_of_all(self._requests(prompts, sampling, options))

    def generate_many(
        self, prompts: Prompts, sampling: SamplingConfig | None = None, **options: Any
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Generate replies to several prompts together; yield each when it is finished."""
        return self._results(self._requests(prompts, sampling, options))

    @overload
    def generate(
        self, prompt: Prompt | Request, sampling: SamplingConfig | None = None, **options: Any
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: Prompts, sampling: SamplingConfig | None = None, **options: Any
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompt: Any, sampling: SamplingConfig | None = None, **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        """Generate a whole reply, or those to a list of prompts, in its order.

        All options are those of `request`. `last_statistics` are those of the last prompt.
        """
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], Real):
            found = dict(self.generate_many(prompt, sampling, **options))
            return [found[index] for index in range(len(prompt))]
        ((_, result),) = self.generate_many([prompt], sampling, **options)
        return result

    def forget(self) -> None:
        """Empty the KV cache, so that nothing of earlier prompts is used again."""
        with self._turns.taken() as scheduler:
            scheduler.regions.forget()

    # ----- tokens that are given -----

    def logits(self, tokens: Sequence[int], phase: Phase = "decode") -> NDArray[np.float32]:
        """Compute the logits after each token of a sequence: float32 [n_tokens, n_vocab].

        They are run as tokens of a reply, or of a prompt, which may differ by rounding. Where
        replies use all regions of the KV cache, one of them goes on to its end first.
        """
        check_choice("phase", phase, get_args(Phase))
        ids = self._prompt_tokens(tokens)
        logits = np.empty((len(ids), self.spec.n_vocab), np.float32)
        with self._turns.free_region() as regions:
            for row in run_tokens(self.runner, regions, ids, 0, phase):
                logits[row.position] = row.fetch()
        return logits

    def perplexity(self, text: str, windows: Windows) -> Iterator[Estimate]:
        """Measure how well the model predicts a text; yield the estimate after each window.

        Raises PromptError for a text with fewer tokens than a window, UsageError for windows longer
        than the context. Other calls may come in between two windows.
        """
        check_kind("windows", windows, Windows, "see vkmoe.generate.perplexity")
        if windows.length > self.engine.ctx_size:
            raise UsageError(
                f"a window of {windows.length} tokens is longer than the context of "
                f"{self.engine.ctx_size}",
                "raise ctx_size",
            )
        check_text("text", text)
        tokens = self.tokenizer.encode(text, parse_special=False)
        windows.starts(len(tokens))
        bos = self.tokenizer.added_first
        found = estimates(self.runner, self.scheduler.regions, tokens, windows, bos)
        return self._turns.one_by_one(found)

    def close(self) -> None:
        """Write the statistics and the profile that options ask for, and free the device.

        Waits for the run of the model that is under way; replies that are not finished then raise
        UsageError where they are read. May be called twice. Raises VkmoeError if a file cannot be
        written; while another exception is on its way, that is logged instead.
        """
        with self._turns.closing():
            records, self._records = self._records, None
            try:
                if records is not None:
                    records.write(self._report(), self.engine.history())
            finally:
                self.engine.close()

    # ----- inside -----

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Check a prompt and turn it into ids."""
        self._turns.check_open()
        return prompt_tokens(prompt, self.tokenizer, self.spec, self.engine.ctx_size)

    def _requests(
        self, prompts: Sequence[Any], sampling: SamplingConfig | None, options: dict[str, Any]
    ) -> list[Request]:
        """Check each prompt that is not a Request yet. Raises what `request` raises."""
        check_prompts(prompts)
        return [
            prompt if isinstance(prompt, Request) else self.request(prompt, sampling, **options)
            for prompt in prompts
        ]

    def _pieces(
        self, request: Request, progress: Callable[[int, int], None] | None
    ) -> Iterator[Piece]:
        with closing(self._run([request])) as news:
            for _, generation, pieces, _ in news:
                if progress is not None:
                    progress(generation.n_read, generation.n_prompt)
                    progress = None if generation.n_read == generation.n_prompt else progress
                yield from pieces

    def _pieces_of_all(self, requests: Sequence[Request]) -> Iterator[tuple[int, Piece]]:
        with closing(self._run(requests)) as news:
            for index, _, pieces, _ in news:
                for piece in pieces:
                    yield index, piece

    def _results(self, requests: Sequence[Request]) -> Iterator[tuple[int, GenerationResult]]:
        replies: list[list[Piece]] = [[] for _ in requests]
        with closing(self._run(requests)) as news:
            for index, generation, pieces, are_last in news:
                replies[index] += pieces
                if are_last and generation.error is None:
                    yield index, result_of(generation, replies[index], self.load_seconds)

    def _run(self, requests: Sequence[Request]) -> Generator[News, None, None]:
        """Generate all replies; yield what is new of each. Raises the first error of any."""
        ctx_size = self.engine.ctx_size
        generations = [Generation(request, self.tokenizer, ctx_size) for request in requests]
        try:
            with closing(self._turns.run(generations)) as news:
                yield from news
        finally:
            if generations:
                self.last_statistics = generations[-1].statistics(self.load_seconds)
