"""Says how far replies are, what they took, how likely their tokens are, as llama-server does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from vkmoe.generate.loop import Generation, GenerationStatistics, Piece, Request
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.llm.following import News
from vkmoe.server.replies import Reply

Object = dict[str, Any]
_NAMES = {"temp": "temperature"}  # of options, where llama-server has others


def timings(found: GenerationStatistics, n_read: int | None = None) -> Object:
    """Say what a reply took: counts, and milliseconds. `n_read` tokens of its prompt are read."""
    n_prompt = (found.n_prompt_tokens if n_read is None else n_read) - found.n_reused_tokens
    prompt_seconds = found.prompt_seconds if n_prompt else 0.0
    n_reply, n_steps = found.n_generated_tokens, max(found.n_generated_tokens - 1, 0)
    decode_seconds = found.decode_seconds if n_reply else 0.0
    return {
        "cache_n": found.n_reused_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": 1e3 * prompt_seconds,
        "prompt_per_token_ms": 1e3 * prompt_seconds / n_prompt if n_prompt else 0.0,
        "prompt_per_second": n_prompt / prompt_seconds if prompt_seconds else 0.0,
        "predicted_n": n_reply,
        "predicted_ms": 1e3 * decode_seconds,
        "predicted_per_token_ms": 1e3 * decode_seconds / n_steps if n_steps else 0.0,
        "predicted_per_second": found.decode_rate,
    }


class ReadingNews:
    """Says how much of a reply's prompt has been read: before it begins, and whenever that grew."""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._n_told = reply, -1

    def more(self, news: News) -> Iterator[Object]:
        """Yield what a stream says of this. Mutates."""
        found = self._reply.statistics
        if news.n_read < found.n_reused_tokens:
            return
        first = [found.n_reused_tokens] if self._n_told < 0 else []
        for n_read in (*first, news.n_read):
            if n_read > self._n_told:
                self._n_told = n_read
                figures = timings(found, n_read)
                progress = {
                    "total": found.n_prompt_tokens,
                    "cache": found.n_reused_tokens,
                    "processed": n_read,
                    "time_ms": figures["prompt_ms"],
                }
                yield {"prompt_progress": progress, "timings": figures}


def token_figures(
    tokenizer: Tokenizer, pieces: Iterable[Piece], as_drawn: bool = False
) -> list[Object]:
    """Say how likely tokens were, each beside the likeliest ones.

    With `as_drawn` as probabilities, else as their logarithms.
    """

    def figure(token: int, logprob: float) -> Object:
        data = tokenizer.token_bytes(token, after_special=False)
        named = {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data)}
        return named | ({"prob": math.exp(logprob)} if as_drawn else {"logprob": logprob})

    top = "top_probs" if as_drawn else "top_logprobs"
    return [
        {
            **figure(piece.token_id, piece.logprob or 0.0),
            top: [figure(*x) for x in piece.top_logprobs],
        }
        for piece in pieces
        if piece.token_id >= 0
    ]


def ending(tokenizer: Tokenizer, reply: Reply) -> Object:
    """Say how a reply was made, and how it ended."""
    found = reply.generation
    most = found.request.max_tokens
    is_limit = _stop_type(found) == "limit"
    return {
        "stop": True,
        "generation_settings": _settings(tokenizer, found.request),
        "prompt": tokenizer.decode(found.request.tokens),
        "truncated": is_limit and (most is None or found.n_generated < most),
        "stop_type": _stop_type(found),
        "stopping_word": found.stop_text or "",
        "tokens_cached": len(found.tokens),
        "timings": timings(reply.statistics),
    }


def _settings(tokenizer: Tokenizer, request: Request) -> Object:
    """Say how a reply was made."""
    sampling = {_NAMES.get(name, name): value for name, value in vars(request.sampling).items()}
    ends = sorted(tokenizer.end_ids) if request.ignore_eos else ()
    pairs = (*request.logit_bias, *((token, -math.inf) for token in ends))
    biases = [{"token": token, "bias": _json_number(bias)} for token, bias in pairs]
    n = -1 if request.max_tokens is None else request.max_tokens
    return {
        **sampling,
        "n_predict": n,
        "max_tokens": n,
        "stop": list(request.stop),
        "ignore_eos": request.ignore_eos,
        "logit_bias": biases,
        "n_probs": request.n_logprobs or 0,
        "post_sampling_probs": request.logprobs_as_drawn,
    }


def _stop_type(reply: Generation) -> str:
    if reply.stop_text is not None:
        return "word"
    return "limit" if reply.finish_reason == "length" else "eos"


def _json_number(bias: float) -> float | None:
    return bias if math.isfinite(bias) else None
