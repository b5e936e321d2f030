"""Makes answers of one or several replies, which OpenAI's older APIs call choices.

What a choice holds is the subject of each API (chat.py, completions.py).
"""

from __future__ import annotations

import io
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

from vkmoe import __version__
from vkmoe.generate.loop import Piece
from vkmoe.llm import LLM
from vkmoe.llm.following import News
from vkmoe.server.api.figures import ending, timings
from vkmoe.server.fields import ChoiceFields
from vkmoe.server.replies import Reply, merged
from vkmoe.server.service import PATIENCE, Service, new_id
from vkmoe.server.transport.sse import COMMENT, event

Object = dict[str, Any]


class Choices(ABC):
    """Makes the answer of replies to `n_prompts` prompts, at once or as a stream."""

    id_kind, name, chunk_name = "", "", ""  # of the API

    def __init__(
        self, service: Service, llm: LLM, asked: ChoiceFields, replies: list[Reply], n_prompts: int
    ) -> None:
        self._llm, self._asked, self._replies = llm, asked, replies
        self._n_prompts = n_prompts
        self._is_verbose = asked.verbose or service.settings.verbose
        common = {
            "created": int(time.time()),
            "model": service.alias,
            "system_fingerprint": f"build-{__version__}",
        }
        self._base = {"id": new_id(self.id_kind), **common}

    # ----- what an API says of a reply -----

    @abstractmethod
    def _whole(self, index: int, pieces: Sequence[Piece]) -> Object:
        """Return the choice that a whole reply is."""

    @abstractmethod
    def _more(self, index: int, news: News) -> Iterator[bytes]:
        """Yield the events for what is new of a reply."""

    @abstractmethod
    def _rest(self, index: int) -> Iterator[Object]:
        """Yield choices with what is left of a reply that is over; the last says why it ended."""

    # ----- the same for all -----

    async def whole(self) -> Object:
        """Wait for all replies, and return the answer."""
        pieces: list[list[Piece]] = [[] for _ in self._replies]
        async for index, news in merged(self._replies, None):
            pieces[index] += news.pieces
        choices = [
            {**self._whole(index, found), **self._routing(index)}
            for index, found in enumerate(pieces)
        ]
        return {**self._base, "object": self.name, "choices": choices, **self._end()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream: reasons to end come last."""
        async for index, news in merged(self._replies, PATIENCE):
            if news.is_silent:
                yield COMMENT
            for data in self._more(index, news):
                yield data
        with_usage = bool(self._asked.stream_options and self._asked.stream_options.include_usage)
        for index in range(len(self._replies)):
            *choices, last = self._rest(index)
            for choice in choices:
                yield self._chunk([choice])
            is_end = index + 1 == len(self._replies) and not with_usage
            more = self._timings(-1) if is_end else {}
            yield self._chunk([{**last, **self._routing(index)}], **more)
        if with_usage:
            yield self._chunk([], **self._end())
        yield event("[DONE]")

    def _chunk(self, choices: list[Object], **more: Any) -> bytes:
        return event({**self._base, "object": self.chunk_name, "choices": choices, **more})

    def _reason(self, index: int) -> str:
        is_cut = self._replies[index].generation.finish_reason == "length"
        return "length" if is_cut else "stop"

    def _end(self) -> Object:
        verbose = {"__verbose": ending(self._llm.tokenizer, self._replies[-1])}
        return {
            "usage": self._usage(),
            **self._timings(-1),
            **(verbose if self._is_verbose else {}),
        }

    def _usage(self) -> Object:
        """Count the tokens of all replies; a prompt with several is counted once."""
        each = [reply.generation for reply in self._replies]
        prompts = each[:: len(each) // self._n_prompts]
        n_prompt, n_reply = sum(g.n_prompt for g in prompts), sum(g.n_generated for g in each)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_reply,
            "total_tokens": n_prompt + n_reply,
            "prompt_tokens_details": {"cached_tokens": sum(g.n_reused for g in prompts)},
        }

    def _timings(self, index: int) -> Object:
        """Say what a reply took."""
        return {"timings": timings(self._replies[index].statistics)}

    def _routing(self, index: int) -> dict[str, str]:
        """Say which experts a reply's tokens used, if that was asked for, as vLLM does.

        It is the base64 of a file of NumPy: [n_tokens, n_moe_layers, n_used].
        """
        generation, experts = self._replies[index].generation, self._llm.spec.experts
        if not generation.request.with_routing or experts is None:
            return {}
        kind = np.uint8 if experts.n_experts <= 256 else np.uint16
        file = io.BytesIO()
        np.save(file, generation.routing.astype(kind), allow_pickle=False)
        return {"routed_experts": b64encode(file.getvalue()).decode("ascii")}
