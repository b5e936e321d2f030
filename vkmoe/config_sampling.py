"""The options of sampling; config.py hands them on with those of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.config_checks import check_fields
from vkmoe.config_fields import option

__all__ = ["SamplingConfig"]


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. Order: penalties, top-k, top-p, min-p, temperature, draw."""

    temp: float = option(
        0.8, "Temperature; 0 always takes the most likely token.", "--temp", minimum=0
    )
    top_k: int = option(
        40, "Keep only the k most likely tokens; 0 keeps all.", "--top-k", minimum=0
    )
    top_p: float = option(
        0.95,
        "Keep the smallest set of tokens whose probability reaches p; 1 keeps all.",
        "--top-p",
        minimum=0,
        maximum=1,
    )
    min_p: float = option(
        0.05,
        "Drop tokens less likely than this times the most likely one; 0 drops none.",
        "--min-p",
        minimum=0,
        maximum=1,
    )
    repeat_penalty: float = option(
        1.0,
        "Divide the logits of recent tokens by this (multiply negative ones); 1 is off.",
        "--repeat-penalty",
        minimum=0.01,
    )
    repeat_last_n: int = option(
        64,
        "How many recent tokens the penalties look at; -1 means all.",
        "--repeat-last-n",
        minimum=-1,
    )
    presence_penalty: float = option(
        0.0, "Subtract this from the logit of every recent token once.", "--presence-penalty"
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from the logit of a recent token for each time it occurred.",
        "--frequency-penalty",
    )
    seed: int | None = option(
        None,
        "Seed of the random draw. Default: a random one, printed at the end.",
        "--seed",
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
