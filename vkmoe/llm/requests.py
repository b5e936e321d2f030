"""This module checks prompts and options before anything is asked of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any, TypeGuard, TypeVar

from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import PromptError, UsageError
from vkmoe.facts import ModelSpec
from vkmoe.generate.checks import check_kind, check_names, shortened, token_ids
from vkmoe.generate.constraint import Constraint
from vkmoe.generate.loop import Request
from vkmoe.generate.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = list[str] | list[list[int]] | list[Request]
Config = TypeVar("Config", EngineConfig, SamplingConfig)


def with_options(kind: type[Config], config: Config | None, options: dict[str, Any]) -> Config:
    """Return `config`, or a default, with fields replaced. Raises UsageError for unknown ones."""
    known = {item.name for item in fields(kind)}
    if config is not None and not isinstance(config, kind):
        raise UsageError(
            f"{shortened(config)} is no {kind.__name__}", "give options by their names"
        )
    check_names(options, known)
    return replace(config or kind(), **options)


def is_list_of_prompts(given: object) -> TypeGuard[list[Any]]:
    """Say whether a call was given several prompts, and not a text or the ids of one."""
    return isinstance(given, list) and bool(given) and not isinstance(given[0], Real)


def prompt_tokens(
    prompt: Prompt, tokenizer: Tokenizer, spec: ModelSpec, ctx_size: int
) -> list[int]:
    """Turn a prompt into ids. Raises PromptError for one that is empty or does not fit."""
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
    if not tokens or (isinstance(prompt, str) and not prompt):
        raise PromptError("the prompt is empty", "give some text to continue")
    if len(tokens) > ctx_size:
        most = spec.context_length
        raise PromptError(
            f"the prompt has {len(tokens)} tokens, the context holds {ctx_size}",
            f"shorten it, or raise --ctx-size (this model: at most {most})"
            if ctx_size < most
            else "shorten it: this model can take no more",
        )
    bad = [token for token in tokens if not 0 <= token < spec.n_vocab]
    if bad:
        raise PromptError(
            f"token id {bad[0]} is not one of the model's {spec.n_vocab}",
            "use ids of this model's tokenizer",
        )
    return tokens


def check_request(request: Request, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raise UsageError for a request that this model cannot serve."""
    constraint = request.constraint
    check_kind("constraint", constraint, Constraint | None, "see LLM.constraints")
    if constraint is not None and constraint.tokenizer is not tokenizer:
        raise UsageError(
            "the constraint was made for another model", "make it by this LLM's `constraints`"
        )
    if request.with_routing and spec.experts is None:
        raise UsageError("the model has no experts", "leave return_routed_experts out")
