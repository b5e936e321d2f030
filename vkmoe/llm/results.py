"""This module holds what a call gives back when a reply is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkmoe.generate.logprobs import LogProbs
from vkmoe.generate.loop import FinishReason, Generation, GenerationStatistics, Piece


@dataclass(frozen=True)
class GenerationResult:
    """Holds a whole reply; `logprobs` has an entry for each token if `n_logprobs` asked for it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    statistics: GenerationStatistics
    logprobs: list[LogProbs]


def result_of(
    generation: Generation, pieces: Sequence[Piece], load_seconds: float
) -> GenerationResult:
    """Put the pieces of a reply that is over together."""
    statistics = generation.statistics(load_seconds)
    token_ids = [piece.token_id for piece in pieces if piece.token_id >= 0]
    text = "".join(piece.text for piece in pieces)
    logprobs = [LogProbs(p.logprob, p.top_logprobs) for p in pieces if p.logprob is not None]
    return GenerationResult(text, token_ids, statistics.finish_reason, statistics, logprobs)
