"""This module names the options of calls, as types of their keyword arguments.

SamplingConfig (vkmoe/config.py) says what those of sampling mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from vkmoe.generate.constraint import Constraint
from vkmoe.llm.messages import Tool

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SamplingOptions(TypedDict, total=False):
    """Names the fields of `SamplingConfig`, one of which may be given as a whole (`sampling`)."""

    temp: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    seed: int | None


class ReplyOptions(SamplingOptions, total=False):
    """Says besides what ends a reply, and what is kept of it.

    - `max_tokens`: the most tokens of the reply; without it, until the context is full.
    - `stop`: a text, or several: the reply ends before the first of them.
    - `ignore_eos`: the model cannot end the reply.
    - `logit_bias`: maps tokens to what is added to their logits, -100 to 100.
    - `n_logprobs`: the result has log-probabilities of each token, and of that many likeliest ones.
    - `logprobs_as_drawn`: these count temperature, penalties and the like.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    logit_bias: Mapping[int, float] | None
    n_logprobs: int | None
    logprobs_as_drawn: bool


class RequestOptions(ReplyOptions, total=False):
    """Adds the options of a plain prompt.

    - `constraint`: the form of the reply, made by `LLM.constraints`.
    - `shown`: control tokens that the text of the reply shows.
    - `with_routing`: which experts each token uses is kept.
    - `scores_prompt`: how likely each of the prompt's tokens was is kept, with as many others as
      `n_logprobs` says.
    """

    constraint: Constraint | None
    shown: frozenset[int]
    with_routing: bool
    scores_prompt: bool


class TemplateOptions(TypedDict, total=False):
    """Says what a chat template is given beside the messages.

    - `tools`: the tools that the model may call, in the form of OpenAI's API.
    - `tool_choice`: "auto", "none" (no call), "required" (a call of any), or one tool's name, also
      as {"type": "function", "function": {"name": ...}}.
    - `reasoning_effort`: how much a model that thinks is to think; "none": not at all.
    - `chat_template_kwargs`: further names for the template, such as {"enable_thinking": False}.
    - `add_generation_prompt`: false: the prompt ends behind the last message.
    - `continue_final_message`: whether the reply goes on with the last message; without these two
      it does with a text of the assistant.
    """

    tools: Sequence[Tool] | Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    reasoning_effort: Effort | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class ChatOptions(ReplyOptions, TemplateOptions, total=False):
    """Adds the form that a chat's answer is kept to: at most one of `response_format` to `choice`.

    - `parallel_tool_calls`: false: at most one call where calls are demanded.
    - `response_format`: the form as OpenAI's API writes it.
    - `json_schema`: the answer is JSON that this schema describes; True: any JSON.
    - `regex`: a regular expression (of Rust's kind) matches the whole answer.
    - `grammar`: a grammar, GBNF or Lark.
    - `choice`: the answer is one of these texts.
    """

    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | None
    json_schema: Mapping[str, Any] | bool | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
