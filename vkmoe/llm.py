"""This module has the public class `LLM`: text in, text out, on a Vulkan device.

Owns the engine, the tokenizer and the scheduler of replies. Options are the fields of
`EngineConfig` and `SamplingConfig` (vkmoe/config.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.resources import files
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, overload

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import Phase
from vkmoe.catalogue import find_model
from vkmoe.catalogue.choose import best_quant
from vkmoe.choices import DraftWay
from vkmoe.closing import Closing
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.engine import Engine
from vkmoe.errors import GpuError, ModelFileError, PromptError, UsageError
from vkmoe.experts.records.keeper import RecordKeeper
from vkmoe.experts.records.report import ExpertReport, make_report, setup_of
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.generate.checks import (
    check_choice,
    check_kind,
    check_path,
    check_prompts,
    check_text,
    checked_options,
    shortened,
    token_ids,
)
from vkmoe.generate.constraint import Constraint, Constraints
from vkmoe.generate.logprobs import LogProbs
from vkmoe.generate.loop import (
    FinishReason,
    Generation,
    GenerationStatistics,
    Piece,
    Request,
)
from vkmoe.generate.perplexity import Estimate, Windows, estimates, run_tokens
from vkmoe.generate.regions import Regions
from vkmoe.generate.runner import BatchRunner
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.interrupts import acquired, at_checkpoints
from vkmoe.mode_trial import choose_mode
from vkmoe.models import ModelFile, open_model
from vkmoe.models.ahead_file import with_ahead
from vkmoe.weights.placer import Progress

if TYPE_CHECKING:
    from vkmoe.generate.chat.template import ChatTemplate

__all__ = [
    "LLM",
    "FinishReason",
    "GenerationResult",
    "GenerationStatistics",
    "Piece",
    "Request",
    "demo_model_path",
    "read_tokenizer",
]

Prompt = str | Sequence[int]
Prompts = list[str] | list[list[int]] | list[Request]
Config = TypeVar("Config", EngineConfig, SamplingConfig)


def demo_model_path() -> Path:
    """Return the path of the small model that comes with vkmoe."""
    return Path(str(files("vkmoe") / "data" / "demo.gguf"))


def _file_of(model: str | os.PathLike[str] | None, config: EngineConfig) -> Path:
    """Find the file of a model; None: the demo model's."""
    if model is None:
        return demo_model_path()
    return find_model(os.fspath(model), partial(best_quant, config=config))


@dataclass(frozen=True)
class GenerationResult:
    """Holds a whole reply; `logprobs` has an entry for each token if `n_logprobs` asked for it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    statistics: GenerationStatistics
    logprobs: list[LogProbs]


class _News(NamedTuple):
    """Holds the new part of a reply."""

    number: int  # of its prompt
    generation: Generation
    pieces: list[Piece]
    are_last: bool


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
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Load `model`: a file, a folder with one, or a name, as `find_model` has them.

        An open file is closed with this object, or when loading fails. `progress(done, total)` is
        called with bytes while the weights load.
        """
        started = time.perf_counter()
        config = _with_options(EngineConfig, config, options)
        check_kind("progress", progress, Callable | None, "give a function of two numbers")
        if not isinstance(model, ModelFile):
            check_path("model", model)
            model = open_model(_file_of(model, config))
        with ExitStack() as unless_loaded:
            unless_loaded.callback(model.close)
            self._config = config
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
        self._turn = threading.Lock()  # its holder alone uses engine and scheduler
        self._next = threading.Lock()  # its holder has the turn after this one
        self._is_closed = False

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
        with self._in_turn():
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
        """Say whether the model's file has a chat template."""
        return bool(self.engine.model.file.get("tokenizer.chat_template", str, ""))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template. Raises UnsupportedModelError if it has none."""
        from vkmoe.generate.chat.template import (
            ChatTemplate,  # and with it Jinja, which few runs need
        )

        return ChatTemplate.from_file(self.engine.model.file, self.tokenizer)

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
        sampling = _with_options(SamplingConfig, sampling, options)
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
        return self._checked(Request(tuple(self._prompt_tokens(prompt)), sampling, **asked))

    def _checked(self, request: Request) -> Request:
        """Return a request that this model can serve. Raises UsageError for another."""
        constraint = request.constraint
        check_kind("constraint", constraint, Constraint | None, "see LLM.constraints")
        if constraint is not None and constraint.tokenizer is not self.tokenizer:
            raise UsageError(
                "the constraint was made for another model", "make it by this LLM's `constraints`"
            )
        if request.with_routing and self.spec.experts is None:
            raise UsageError("the model has no experts", "leave return_routed_experts out")
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
        with self._in_turn() as scheduler:
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
        with self._free_region() as regions:
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
        return self._one_by_one(found)

    def close(self) -> None:
        """Write the statistics and the profile that options ask for, and free the device.

        Waits for the run of the model that is under way; replies that are not finished then raise
        UsageError where they are read. May be called twice. Raises VkmoeError if a file cannot be
        written; while another exception is on its way, that is logged instead.
        """
        with self._in_turn(is_closing=True):
            self._is_closed = True
            records, self._records = self._records, None
            try:
                self.scheduler.end_all(_closed())
                if records is not None:
                    records.write(self._report(), self.engine.history())
            finally:
                self.engine.close()

    # ----- inside -----

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Check a prompt and turn it into ids."""
        if self._is_closed:
            raise _closed()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise PromptError("the prompt is empty", "give some text to continue")
        if len(tokens) > self.engine.ctx_size:
            most, ctx_size = self.spec.context_length, self.engine.ctx_size
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, the context holds {ctx_size}",
                f"shorten it, or raise --ctx-size (this model: at most {most})"
                if ctx_size < most
                else "shorten it: this model can take no more",
            )
        bad = [token for token in tokens if not 0 <= token < self.spec.n_vocab]
        if bad:
            raise PromptError(
                f"token id {bad[0]} is not one of the model's {self.spec.n_vocab}",
                "use ids of this model's tokenizer",
            )
        return tokens

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
                    yield index, self._result(generation, replies[index])

    def _result(self, generation: Generation, pieces: Sequence[Piece]) -> GenerationResult:
        statistics = generation.statistics(self.load_seconds)
        token_ids = [piece.token_id for piece in pieces if piece.token_id >= 0]
        text = "".join(piece.text for piece in pieces)
        logprobs = [LogProbs(p.logprob, p.top_logprobs) for p in pieces if p.logprob is not None]
        return GenerationResult(text, token_ids, statistics.finish_reason, statistics, logprobs)

    def _run(self, requests: Sequence[Request]) -> Generator[_News, None, None]:
        """Generate all replies; yield what is new of each.

        Raises the first error that ends one; however this ends, no reply is under way then.
        """
        ctx_size = self.engine.ctx_size
        generations = [Generation(request, self.tokenizer, ctx_size) for request in requests]
        try:
            with self._in_turn() as scheduler:
                for generation in generations:
                    scheduler.submit(generation)
            running = dict(enumerate(generations))
            while running:
                self._bring_on(running.values())
                for index, generation in tuple(running.items()):
                    is_done = generation.is_done  # first: another call may end it at any time
                    if is_done:
                        del running[index]
                    yield _News(index, generation, generation.take_pieces(), is_done)
                    if generation.error is not None:
                        raise generation.error
        finally:
            for generation in generations:
                generation.cancel()
            self._let_go()
            if generations:
                self.last_statistics = generations[-1].statistics(self.load_seconds)

    # ----- threads -----

    @contextmanager
    def _in_turn(self, is_closing: bool = False) -> Iterator[Scheduler]:
        """Keep other threads from engine and scheduler. Raises UsageError once this is closed.

        A lock alone may be taken by the same thread again and again while others wait for it.
        """
        with at_checkpoints(), ExitStack() as turn:
            with acquired(self._next):
                turn.enter_context(acquired(self._turn))
            if self._is_closed and not is_closing:
                raise _closed()
            yield self.scheduler

    @contextmanager
    def _free_region(self) -> Iterator[Regions]:
        """Do as `_in_turn`, once a region of the KV cache is free; until then replies go on."""
        with self._in_turn() as scheduler:
            while not scheduler.regions.n_free:
                scheduler.step()
            yield scheduler.regions

    def _one_by_one(self, found: Iterator[Estimate]) -> Iterator[Estimate]:
        """Take estimates, each in a turn of its own."""
        while True:
            with self._free_region():
                estimate = next(found, None)
            if estimate is None:
                return
            yield estimate

    def _bring_on(self, generations: Collection[Generation]) -> None:
        """Run the model once, unless one of these has news, which another call's run may bring."""

        def has_news() -> bool:
            return any(each.is_done or each.pieces for each in generations)

        if not has_news():
            with self._in_turn() as scheduler:
                if not has_news():
                    assert scheduler.has_work, "replies were lost"
                    scheduler.step()

    def _let_go(self) -> None:
        """Free what cancelled replies have, unless another call is at it, which does so after.

        A dropped stream comes here from wherever Python collects it, even amid another call of the
        same thread: so this waits for no call of its own thread.
        """
        if self._turn.locked():
            return
        with at_checkpoints(), self._turn:
            if self._is_closed:
                return
            self.scheduler.sweep()
            if not self.scheduler.has_work:
                with suppress(GpuError):  # an error of the generation is the one to raise
                    self.engine.settle()


def _closed() -> UsageError:
    return UsageError("the model is closed", "load it again, or close it after its last use")


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


def _with_options(kind: type[Config], config: Config | None, options: dict[str, Any]) -> Config:
    """Return `config`, or a default, with fields replaced. Raises UsageError for unknown ones."""
    known = {item.name for item in fields(kind)}
    if config is not None and not isinstance(config, kind):
        raise UsageError(
            f"{shortened(config)} is no {kind.__name__}", "give options by their names"
        )
    if unknown := sorted(set(options) - known):
        raise UsageError(
            f"unknown option {', '.join(unknown)}", f"known are {', '.join(sorted(known))}"
        )
    return replace(config or kind(), **options)
