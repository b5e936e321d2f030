"""This module has the public class `LLM`: text in, text out, on a Vulkan device.

Owns the engine, the tokenizer and the scheduler of replies. Options are the fields of
`EngineConfig` and `SamplingConfig` (vkmoe/config.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, get_args, overload

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import Phase
from vkmoe.catalogue import fetcher
from vkmoe.choices import DraftWay, Pooling
from vkmoe.closing import Closing
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.engine import Engine
from vkmoe.errors import PromptError, UsageError
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
    token_ids,
)
from vkmoe.generate.constraint import Constraints
from vkmoe.generate.loop import Generation, GenerationStatistics, Piece, Request
from vkmoe.generate.perplexity import Estimate, Windows, estimates, run_tokens
from vkmoe.generate.regions.state_files import StateCounts
from vkmoe.generate.runner import BatchRunner
from vkmoe.generate.scheduler import Scheduler
from vkmoe.llm.chats import ChatCall, ChatReader, chat_call, template_text
from vkmoe.llm.embeddings import chosen_pooling, embedding_of, embedding_request
from vkmoe.llm.files import file_of, read_tokenizer
from vkmoe.llm.messages import Messages
from vkmoe.llm.options import (
    ChatOptions,
    RequestOptions,
    SamplingOptions,
    TemplateOptions,
)
from vkmoe.llm.requests import (
    Prompt,
    Prompts,
    check_request,
    is_list_of_prompts,
    prompt_tokens,
    with_options,
)
from vkmoe.llm.results import ChatEnd, ChatEvent, ChatResult, GenerationResult, result_of
from vkmoe.llm.turns import CallNews, Turns
from vkmoe.mode_trial import choose_mode
from vkmoe.models import ModelFile, open_model
from vkmoe.models.ahead_file import with_ahead
from vkmoe.weights.placer import Progress


class LLM(Closing):
    """Runs a language model on a Vulkan device.

        with LLM("model.gguf") as llm:
            print(llm.generate("def fib(n):", max_tokens=64).text)

    Without a model the small demo model is used. Options are those of `EngineConfig`. Any thread
    may call it: replies that are asked for while others are generated run together with them, as
    many as `parallel` allows, and each is the one of a call made alone. `load_seconds` is how long
    loading took, `last_statistics` what the last reply took. Raises VkmoeError and its subclasses
    only, each with a hint; and KeyboardInterrupt, after which it may be used as before.
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
        with ExitStack() as unless_loaded:
            if isinstance(model, ModelFile):
                unless_loaded.callback(model.close)
            config = with_options(EngineConfig, config, options)
            check_kind("chat_template", chat_template, str | None, "give a text")
            check_kind("progress", progress, Callable | None, "give a function of two numbers")
            model = _opened(model, config, progress)
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
        way: DraftWay = "lookup" if config.draft == "lookup" else guesses
        self._turns = Turns(Scheduler(self.runner, way), self.engine.settle)
        self.load_seconds = time.perf_counter() - started
        self.last_statistics: GenerationStatistics | None = None

    @property
    def scheduler(self) -> Scheduler:
        """Return what decides which replies run next. Must hold: no other thread uses it."""
        return self._turns.scheduler

    # ----- facts -----

    @property
    def spec(self) -> ModelSpec:
        """Return what the model's file says of it: sizes, layers, experts."""
        return self.engine.spec

    @property
    def plan(self) -> MemoryPlan:
        """Return where everything lies, and how experts are served."""
        return self.engine.plan

    @property
    def device_info(self) -> DeviceInfo:
        """Return the name and the memory of the device."""
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
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Check what is to be generated, so that it can be given in place of a prompt.

        Raises UsageError, and PromptError for a prompt that is empty or does not fit.
        """
        given: dict[str, Any] = {**options}
        known = RequestOptions.__optional_keys__ - SamplingOptions.__optional_keys__
        asked = {name: given.pop(name) for name in known & given.keys()}
        sampling = with_options(SamplingConfig, sampling, given)
        asked = checked_options(asked, self.spec.n_vocab)
        request = Request(tuple(self._prompt_tokens(prompt)), sampling, **asked)
        check_request(request, self.tokenizer, self.spec)
        return request

    def stream(
        self,
        prompt: Prompt | Request,
        sampling: SamplingConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[RequestOptions],
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
        self,
        prompts: Prompts,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[tuple[int, Piece]]:
        """Generate replies to several prompts together; yield the pieces of all as they come.

        Each comes with the index of its prompt. Options are those of `request`, for every prompt
        but those that are a Request. An error ends all.
        """
        return self._pieces_of_all(self._requests(prompts, sampling, options))

    def generate_many(
        self,
        prompts: Prompts,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Generate replies to several prompts together; yield each when it is finished."""
        return self._results(self._requests(prompts, sampling, options))

    @overload
    def generate(
        self,
        prompt: Prompt | Request,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Any,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Generate a whole reply, or those to a list of prompts, in its order.

        All options are those of `request`. `last_statistics` are those of the last prompt.
        """
        if is_list_of_prompts(prompt):
            found = dict(self.generate_many(prompt, sampling, **options))
            return [found[index] for index in range(len(prompt))]
        ((_, result),) = self.generate_many([prompt], sampling, **options)
        return result

    def chat(
        self,
        messages: Messages,
        sampling: SamplingConfig | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatResult:
        """Reply to a conversation, by the model's chat template.

        `messages` are dicts with "role" and "content", and earlier calls of tools and their
        results, as in OpenAI's API. Raises PromptError for messages that the template does not
        take or that do not fit, UsageError for wrong options, and VkmoeError without `llguidance`
        where the reply is to have a form or must be a call.
        """
        call = chat_call(self, messages, sampling, options)
        *_, end = self._chat_events(call, streams=False)
        assert isinstance(end, ChatEnd)
        return end.result

    def chat_stream(
        self,
        messages: Messages,
        sampling: SamplingConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[ChatEvent]:
        """Reply to a conversation, event by event; the last one is a ChatEnd with the whole reply.

        Content and Thought have texts, ToolCallBegin, ToolCallArguments and ToolCallEnd calls of
        tools. Options are those of `chat`, `progress` is that of `stream`. Raises what `chat`
        raises: wrong options and messages now, errors of the model later.
        """
        check_kind("progress", progress, Callable | None, "give a function of two numbers")
        call = chat_call(self, messages, sampling, options)
        return self._chat_events(call, streams=True, progress=progress)

    def forget(self) -> None:
        """Empty the KV cache, so that nothing of earlier prompts is used again."""
        with self._turns.taken() as scheduler:
            scheduler.regions.forget()
            scheduler.regions.kept.forget()

    def save_state(self, path: str | os.PathLike[str], region: int = 0) -> StateCounts:
        """Write the state of the conversation that was generated last to a file.

        `region` says which one of `parallel` conversations it is. A file that was saved before is
        replaced. Returns how many tokens and bytes were written. Raises StateFileError where there
        is no conversation, or the file cannot be written; UsageError while a reply is under way.
        """
        given = _checked_path(path, region)
        with self._turns.taken() as scheduler:
            return scheduler.save(region, given)

    def restore_state(self, path: str | os.PathLike[str], region: int = 0) -> StateCounts:
        """Read a conversation's state from a file, so that prompts go on from there.

        The next prompt that begins with its tokens computes only what comes behind them. Its bits
        are those that another device computed, if the file is from there. Returns how many tokens
        and bytes were read. Raises StateFileError where the file cannot be read, is damaged, or was
        saved with another model or other types of KV caches; UsageError while a reply is under way.
        """
        given = _checked_path(path, region)
        with self._turns.taken() as scheduler:
            return scheduler.restore(region, given)

    # ----- embeddings -----

    @overload
    def embed(
        self, texts: Prompt, *, pooling: Pooling | None = None, normalize: bool = True
    ) -> NDArray[np.float32]: ...

    @overload
    def embed(
        self,
        texts: list[str] | list[list[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> list[NDArray[np.float32]]: ...

    def embed(
        self, texts: Any, *, pooling: Pooling | None = None, normalize: bool = True
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Compute the embedding of a text, float32 [width], or of each text of a list.

        It is made from the state that the last norm leaves of each token. `pooling`: "mean" of all
        tokens, that of the first ("cls") or the "last" one, or "none": all [n_tokens, width].
        Without it the model's file decides, or else it is "last". `normalize`: each vector has
        length 1. Raises PromptError for a text that is empty or does not fit, and UsageError.
        """
        check_kind("normalize", normalize, bool, "use true or false")
        chosen = chosen_pooling(self, pooling)
        given = texts if is_list_of_prompts(texts) else [texts]
        requests = [embedding_request(self, text, chosen) for text in given]
        found = dict[int, NDArray[np.float32]]()
        with closing(self._run(requests)) as news:
            for index, generation, _, is_whole in news:
                if is_whole:
                    found[index] = embedding_of(generation, normalize)
        embeddings = [found[index] for index in range(len(requests))]
        return embeddings if given is texts else embeddings[0]

    # ----- texts and tokens -----

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Turn a text into token ids, as `generate` does.

        `add_special`: with the tokens that begin and end every text of this model. `parse_special`:
        control tokens that the text spells out count as such. Raises PromptError for a text that
        the vocabulary cannot spell.
        """
        check_text("text", text)
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Turn token ids into a text; bytes that are no UTF-8 become the replacement character.

        Raises PromptError for what are no ids of this model's tokenizer.
        """
        ids, n_vocab = token_ids(tokens), self.tokenizer.n_vocab
        if bad := [token for token in ids if not 0 <= token < n_vocab]:
            raise PromptError(
                f"token id {bad[0]} is not one of the tokenizer's {n_vocab}",
                "use ids of this model's tokenizer",
            )
        return self.tokenizer.decode(ids)

    def apply_template(self, messages: Messages, **options: Unpack[TemplateOptions]) -> str:
        """Write a conversation as the text of a prompt, by the model's chat template.

        Raises PromptError for messages that the template does not take, UsageError for options.
        """
        return template_text(self, messages, options)

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
        self, prompts: Sequence[Any], sampling: SamplingConfig | None, options: RequestOptions
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
        with closing(self._run([request], progress)) as news:
            for each in news:
                yield from each.pieces

    def _pieces_of_all(self, requests: Sequence[Request]) -> Iterator[tuple[int, Piece]]:
        with closing(self._run(requests)) as news:
            for each in news:
                for piece in each.pieces:
                    yield each.number, piece

    def _results(self, requests: Sequence[Request]) -> Iterator[tuple[int, GenerationResult]]:
        replies: list[list[Piece]] = [[] for _ in requests]
        with closing(self._run(requests)) as news:
            for index, generation, pieces, is_whole in news:
                replies[index] += pieces
                if is_whole:
                    yield index, result_of(generation, replies[index], self.load_seconds)

    def _chat_events(
        self,
        call: ChatCall,
        streams: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[ChatEvent]:
        reader: ChatReader | None = None
        with closing(self._run([call.request], progress)) as news:
            for _, generation, pieces, is_whole in news:
                reader = reader or call.reader(generation, streams)
                yield from reader.feed(pieces)
                if is_whole:
                    yield from reader.finish()
                    yield ChatEnd(reader.result(self.load_seconds))

    def _run(
        self,
        requests: Sequence[Request],
        progress: Callable[[int, int], None] | None = None,
    ) -> Generator[CallNews, None, None]:
        """Generate all replies; yield what is new of each. Raises the first error of any.

        `progress` is called while prompts are read.
        """
        ctx_size = self.engine.ctx_size
        generations = [Generation(request, self.tokenizer, ctx_size) for request in requests]
        try:
            with closing(self._turns.run(generations)) as news:
                for each in news:
                    if progress is not None:
                        progress(each.generation.n_read, each.generation.n_prompt)
                        if each.generation.n_read == each.generation.n_prompt:
                            progress = None
                    yield each
        finally:
            if generations:
                self.last_statistics = generations[-1].statistics(self.load_seconds)


def _opened(
    model: str | Path | ModelFile | None, config: EngineConfig, progress: Progress | None
) -> ModelFile:
    """Open a model that is named, download it if need be. Raises VkmoeError."""
    if isinstance(model, ModelFile):
        return model
    check_path("model", model)
    return open_model(file_of(model, config, fetcher(config, progress)))


def _checked_path(path: str | os.PathLike[str], region: int) -> Path:
    """Check the arguments of files with states, and return the path. Raises UsageError."""
    check_kind("region", region, int, "give the number of a region, from 0 on")
    check_kind("path", path, str | os.PathLike, "give the name of a file")
    return Path(path)
