"""Holds what all answers need: the model's thread, how the server was started, and its counts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from vkmoe.config import SamplingConfig
from vkmoe.errors import UnavailableError, VkmoeError
from vkmoe.generate.chat.conversation import ChatPrompt, Conversation
from vkmoe.generate.loop import Request
from vkmoe.llm import LLM
from vkmoe.llm.engine_thread import EngineThread
from vkmoe.server.errors import api_error, context_exceeded
from vkmoe.server.facts import ModelFacts
from vkmoe.server.fields import ReplyFields
from vkmoe.server.metrics import Metrics
from vkmoe.server.replies import Reply
from vkmoe.server.settings import ServerSettings
from vkmoe.view.experts import ExpertView

Result = TypeVar("Result")

PATIENCE = 10.0  # seconds of silence until a stream has a sign of life
LONG_TEXT = 1 << 16  # characters from which encoding takes long
_LONG_THREADS = 2


@dataclass
class Service:
    """Makes replies of checked requests."""

    engine: EngineThread
    name: str  # of the model, unless `settings` has another
    settings: ServerSettings = field(default_factory=ServerSettings)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    started: int = field(default_factory=lambda: int(time.time()))
    aliases: Sequence[str] = ()  # what clients call it; without any, those of `settings`

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)
        self.aliases = sorted(self.aliases) or self.settings.aliases
        # Of the model that is loaded now; that of another one is forgotten.
        self.view_of = lru_cache(1)(lambda llm: ExpertView(llm.engine))
        self._facts_of = lru_cache(1)(ModelFacts.of)
        self._facts: ModelFacts | None = None
        self._for_long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="long")

    def learn_facts(self) -> ModelFacts:
        """Return what there is to say of the model, and keep it for when it sleeps. Mutates.

        Raises UnavailableError for a model that was never loaded.
        """
        try:
            self._facts = self._facts_of(self.engine.llm)
        except UnavailableError:
            if self._facts is None or self.engine.state != "asleep":
                raise
        return self._facts

    @property
    def alias(self) -> str:
        """Return the name of the model that answers have."""
        names = self.aliases
        return self.name if not names or self.name in names else names[0]

    async def off_loop(self, work: Callable[[], Result], is_long: bool = False) -> Result:
        """Do what may take long on another thread. Raises ApiError for a VkmoeError.

        Compiling the form of a reply or encoding a long text may take seconds: `is_long` has
        threads of its own, so that what other requests need done does not wait for it.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._for_long if is_long else None, work)
        except VkmoeError as error:
            raise api_error(error) from error

    async def encode(self, llm: LLM, text: str, add_special: bool = True) -> list[int]:
        """Encode a text on another thread.

        Raises ApiError for one that cannot be encoded, or cannot fit whatever its tokens are.
        """
        self.check_length(llm, text)
        is_long = len(text) > LONG_TEXT
        return await self.off_loop(lambda: llm.tokenizer.encode(text, add_special), is_long)

    def check_length(self, llm: LLM, text: str) -> None:
        """Refuse a text that cannot fit in the context, before it is encoded. Raises ApiError."""
        n_tokens = llm.tokenizer.least_tokens(text)
        if n_tokens > llm.engine.ctx_size:
            raise context_exceeded(n_tokens, llm.engine.ctx_size, is_least=True)

    def fitting(self, llm: LLM, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a prompt. Raises ApiError for more than fit."""
        if len(tokens) > llm.engine.ctx_size:
            raise context_exceeded(len(tokens), llm.engine.ctx_size)
        return tokens

    def prompt(self, llm: LLM, conversation: Conversation) -> ChatPrompt:
        """Write a conversation as a prompt, with the names that the server has for its template.

        Raises VkmoeError.
        """
        names = self.settings.template_names | conversation.names
        prompt = replace(conversation, names=names).prompt(llm.chat_format)
        if self.settings.reasoning_format == "none":
            prompt = replace(prompt, format=prompt.format.without_thoughts)
        return prompt

    def requests(
        self, llm: LLM, prompts: Sequence[Sequence[int]], asked: ReplyFields, **more: Any
    ) -> list[Request]:
        """Make the requests for `n` replies to each prompt. `more` are options of LLM.request.

        Raises ApiError.
        """
        try:
            return [
                llm.request(
                    list(prompt),
                    asked.sampling(self.sampling, index),
                    max_tokens=asked.most_tokens(self.settings.max_tokens),
                    stop=asked.stop or (),
                    ignore_eos=bool(asked.ignore_eos),
                    logit_bias=asked.biases(llm.tokenizer),
                    **more,
                )
                for prompt in prompts
                for index in range(asked.n_replies)
            ]
        except VkmoeError as error:
            _ = self.engine.llm  # says so if the model was lost meanwhile
            raise api_error(error) from error

    def begin(self, requests: Sequence[Request]) -> list[Reply]:
        """Let replies begin: all of them, or none. Raises ApiError."""
        replies: list[Reply] = []
        try:
            for request in requests:
                replies.append(
                    Reply(self.engine, self.metrics, request, self.settings.timeout or None)
                )
        except VkmoeError as error:
            for reply in replies:
                reply.cancel()
            raise api_error(error) from error
        self.metrics.begun(len(replies))
        return replies


def new_id(kind: str) -> str:
    """Make the name of an answer, such as chatcmpl-... or resp_..., as OpenAI's are."""
    return f"{kind}{'-' if kind.endswith('cmpl') else '_'}{secrets.token_hex(12)}"
