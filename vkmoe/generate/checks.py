"""This module checks what a Python program asks of a reply, before anything is made of it.

It owns types and bounds of the arguments that are no fields of a config (config.py checks fields).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, TypeGuard

from vkmoe.errors import PromptError, UsageError

MAX_LOGPROBS = 20
MAX_BIAS = 100
_NO_IDS = (str, bytes, bytearray, memoryview, Mapping)  # have items, but these are no token ids


def token_ids(prompt: Any) -> list[int]:
    """Return the ids of a prompt that is no text. Raises PromptError for anything else."""
    is_sequence = all(hasattr(type(prompt), name) for name in ("__getitem__", "__len__"))
    if is_sequence and not isinstance(prompt, _NO_IDS):
        with suppress(TypeError):  # an array without dimensions has no items
            ids = [int(token) for token in prompt if _is_whole(token)]
            if len(ids) == len(prompt):
                return ids
    raise PromptError(
        f"the prompt is {shortened(prompt)}, neither a text nor token ids",
        "several prompts go in a list",
    )


def check_prompts(prompts: object) -> None:
    """Raise PromptError for what is not several prompts."""
    if isinstance(prompts, str):
        raise PromptError("a text is one prompt, not several", "put it into a list")
    if isinstance(prompts, _NO_IDS) or not isinstance(prompts, Iterable):
        raise PromptError(f"prompts is {shortened(prompts)}", "give a list of texts, or of ids")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError for what is none of `choices`."""
    if value not in choices:
        raise UsageError(f"{name} is {shortened(value)}", f"use {' or '.join(choices)}")


def check_kind(name: str, value: object, kind: Any, hint: str) -> None:
    """Raise UsageError for what is not of a type, or of a union of types."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {shortened(value)}", hint)


def checked_options(options: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    """Return fields of a Request, without its tokens and its sampling. Raises UsageError."""
    found = dict(options)
    for name in ("ignore_eos", "with_routing", "scores_prompt", "logprobs_as_drawn"):
        check_kind(name, found.get(name, False), bool, "use true or false")
    hint = "use a whole number from 0, or None for no limit"
    _check_count("max_tokens", found.get("max_tokens"), sys.maxsize, hint)
    hint = f"use 0 to {MAX_LOGPROBS}, or None for none at all"
    _check_count("n_logprobs", found.get("n_logprobs"), MAX_LOGPROBS, hint)
    check_kind("shown", found.get("shown", frozenset()), Set, "give a set of token ids")
    if "stop" in found:
        found["stop"] = _stop_texts(found["stop"])
    if "logit_bias" in found:
        found["logit_bias"] = _biases(
            {} if found["logit_bias"] is None else found["logit_bias"], n_vocab
        )
    return found


def _check_count(name: str, value: object, most: int, hint: str) -> None:
    if value is not None and not (_is_whole(value) and 0 <= value <= most):
        raise UsageError(f"{name} is {shortened(value)}", hint)


def _stop_texts(stop: object) -> tuple[str, ...]:
    """Return the texts that end a reply, given one or several. Raises UsageError for others."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) for text in stops):
        raise UsageError(f"stop is {shortened(stop)}", "use a text, or a list of texts")
    if not all(stops):
        raise UsageError("a stop string is empty", "leave the option out for no stop string")
    return tuple(stops)


def _biases(logit_bias: object, n_vocab: int) -> tuple[tuple[int, float], ...]:
    """Return what is added to logits, by rising token. Raises UsageError."""
    if not isinstance(logit_bias, Mapping):
        raise UsageError(f"logit_bias is {shortened(logit_bias)}", "use a dict: {token id: bias}")
    for token, bias in logit_bias.items():
        if not (_is_whole(token) and 0 <= token < n_vocab):
            raise UsageError(
                f"logit_bias names token {shortened(token)}, which is not one of the model's "
                f"{n_vocab}",
                "use ids of this model's tokenizer",
            )
        is_ban = bias == -math.inf
        if not (isinstance(bias, Real) and (is_ban or abs(float(bias)) <= MAX_BIAS)):
            raise UsageError(
                f"logit_bias of token {token} is {shortened(bias)}",
                f"use -{MAX_BIAS} to {MAX_BIAS}, or minus infinity for never",
            )
    return tuple(sorted((int(token), float(bias)) for token, bias in logit_bias.items()))


def check_names(options: Mapping[str, Any], known: Set[str]) -> None:
    """Raise UsageError for options that are not among `known`."""
    if unknown := sorted(options.keys() - known):
        raise UsageError(
            f"unknown option {', '.join(unknown)}", f"known are {', '.join(sorted(known))}"
        )


def check_text(name: str, value: object) -> None:
    """Raise UsageError for what is no text."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is {shortened(value)}, not text", "decode bytes first")


def check_path(name: str, value: object) -> None:
    """Raise UsageError for what is neither a path nor None."""
    if not isinstance(value, str | os.PathLike | None):
        raise UsageError(f"{name} is {shortened(value)}, not a path", "give a text or a Path")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def shortened(value: object) -> str:
    """Write a value in one line."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= 60 else text[:57] + "..."
