"""Says what becomes of each field of a request that vkmoe does not do.

A field is done where the body of its API has it; else it is here: refused where it would change an
answer, or without effect on one, with the reason. What no table has is left alone, as clients send
many. A path has the names of fields inside others behind points; lists are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple

from vkmoe.server.errors import ApiError

Api = Literal[
    "chat", "completions", "native", "responses", "messages", "count_tokens", "embeddings", "ollama"
]  # fmt: skip

MOST_ITEMS = 1 << 16  # of a list, token ids aside


class Refused(NamedTuple):
    """Says why a field is refused, and which of its values ask for nothing besides null and []."""

    reason: str
    harmless: tuple[Any, ...] = ()


_NO_AUDIO = "the model reads and writes text alone"
_NO_STORE = "nothing is kept between requests: send the whole conversation"
_NO_TOOLS_HERE = "the server runs no tools: offer functions, and answer their calls"
_NO_MODERATION = "nothing is moderated"
_FEWER_TOOLS = "offer the tools that are allowed, and no others"
_USE_TOOLS = "use tools and tool_choice"
_UNKNOWN_TO_MODEL = "nothing brings it to the model"
_ONE_REPLY = "this API has one reply"

# Those of vLLM and llama-server that clients send to any server of OpenAI's form.
_OF_OTHERS = {
    "adapters": Refused("there are no adapters"),
    "allowed_token_ids": Refused("use logit_bias, or a grammar"),
    "bad_words": Refused("use logit_bias"),
    "chat_template": Refused("the template is the model's own"),
    "documents": Refused("put documents into the messages"),
    "dynatemp_range": Refused("use temperature", (0,)),
    "early_stopping": Refused("there is no beam search", (False,)),
    "grammar_lazy": Refused("a grammar holds from the first token on", (False,)),
    "grammar_triggers": Refused("a grammar holds from the first token on"),
    "guided_whitespace_pattern": Refused("JSON has the blanks that its grammar has"),
    "include_reasoning": Refused("thoughts are shown as they are", (True,)),
    "include_stop_str_in_output": Refused("a reply ends before a stop text", (False,)),
    "length_penalty": Refused("there is no beam search", (1,)),
    "logits_processors": Refused("use logit_bias"),
    "lora": Refused("there are no adapters"),
    "min_keep": Refused("samplers keep one token at least", (0,)),
    "min_tokens": Refused("use ignore_eos and max_tokens", (0,)),
    "n_indent": Refused("use a grammar", (0,)),
    "n_probs": Refused("use logprobs", (0,)),
    "prompt_embeds": Refused("prompts are texts or token ids"),
    "prompt_logprobs": Refused("use echo and logprobs of /v1/completions", (False,)),
    "reasoning_format": Refused("thoughts come beside the answer", ("auto", "deepseek")),
    "repetition_penalty": Refused("use repeat_penalty and repeat_last_n", (1,)),
    "return_token_ids": Refused("use /tokenize", (False,)),
    "return_tokens_as_token_ids": Refused("use /tokenize", (False,)),
    "samplers": Refused("the order of samplers is fixed"),
    "skip_special_tokens": Refused("special tokens do not show", (True,)),
    "stop_token_ids": Refused("use stop"),
    "structured_outputs.disable_additional_properties": Refused("say so in the schema", (False,)),
    "structured_outputs.disable_any_whitespace": Refused(
        "JSON has the blanks that its grammar has", (False,)
    ),
    "structured_outputs.structural_tag": Refused("use tools, or a grammar"),
    "structured_outputs.whitespace_pattern": Refused("JSON has the blanks that its grammar has"),
    "t_max_predict_ms": Refused("use max_tokens", (0, -1)),
    "top_n_sigma": Refused("use min_p", (0, -1)),
    "truncate_prompt_tokens": Refused("nothing is cut off from a prompt"),
    "use_beam_search": Refused("there is no beam search", (False,)),
}
_OF_ONE_REPLY = {
    "n": Refused(_ONE_REPLY, (1,)),
    "return_progress": Refused("this API has no event for it", (False,)),
    "return_routed_experts": Refused("use /v1/completions or chats", (False,)),
    "timings_per_token": Refused("this API has no place for it", (False,)),
}


def _forms(where: str) -> dict[str, Refused]:
    """Refuse the names that a form of the reply has in other APIs (forms.py)."""
    names = ("json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    refused = Refused(f"use {where}, or /v1/chat/completions for forms that are no JSON")
    return {
        **dict.fromkeys((*names, "structured_outputs"), refused),
        "grammar": refused._replace(harmless=("",)),
        "response_format": refused._replace(harmless=({"type": "text"},)),
    }


_OF_MESSAGES = {
    "compaction": Refused("nothing is summarised here"),
    "context_management.edits": Refused(
        "nothing is cleared from a conversation",
        ({"type": "clear_thinking_20251015", "keep": "all"},),
    ),
    "fallbacks": Refused("there is one model"),
    "mcp_servers": Refused(_NO_TOOLS_HERE),
    "messages.clear_at": Refused("nothing is cleared from a conversation"),
    "messages.output_config": Refused("use output_config of the request"),
    "output_config.task_budget": Refused(_UNKNOWN_TO_MODEL),
    "thinking.display": Refused("thoughts are shown as they are", ("summarized",)),
    "thread": Refused(_NO_STORE),
    "tools.allowed_callers": Refused(_NO_TOOLS_HERE, ("direct",)),
    "tools.defer_loading": Refused("every tool is shown to the model", (False,)),
    "tools.input_examples": Refused("put them into the description"),
    "tools.type": Refused(_NO_TOOLS_HERE, ("custom",)),
}
REFUSED: Mapping[Api, Mapping[str, Refused]] = {
    "chat": {
        **_OF_OTHERS,
        "add_special_tokens": Refused("the template adds them", (False,)),
        "audio": Refused(_NO_AUDIO),
        "echo": Refused("use continue_final_message", (False,)),
        "function_call": Refused(_USE_TOOLS, ("none", "auto")),
        "functions": Refused(_USE_TOOLS),
        "messages.audio": Refused(_NO_AUDIO),
        "messages.function_call": Refused("use tool_calls"),
        "messages.refusal": Refused("send it as content", ("",)),
        "modalities": Refused(_NO_AUDIO, ("text",)),
        "moderation": Refused(_NO_MODERATION),
        "tool_choice.allowed_tools": Refused(_FEWER_TOOLS),
        "tool_choice.custom": Refused(_NO_TOOLS_HERE),
        "verbosity": Refused(_UNKNOWN_TO_MODEL, ("medium",)),
        "web_search_options": Refused(_NO_TOOLS_HERE),
    },
    "completions": {
        **_OF_OTHERS,
        "add_special_tokens": Refused("send token ids for a prompt without them", (True,)),
        "best_of": Refused("use n", (1,)),
        "suffix": Refused("texts go on at their end alone", ("",)),
    },
    "native": {
        **{name: refused for name, refused in _OF_OTHERS.items() if name != "n_probs"},
        "image_data": Refused(_NO_AUDIO),
    },
    "responses": {
        **_OF_OTHERS,
        **_OF_ONE_REPLY,
        **_forms("text.format"),
        "background": Refused(_NO_STORE, (False,)),
        "background_options": Refused(_NO_STORE),
        "context_management": Refused("nothing is cleared from a conversation"),
        "conversation": Refused(_NO_STORE),
        "image": Refused(_NO_AUDIO),
        "include": Refused(
            "use /v1/chat/completions for logprobs",
            (  # of tools that the server has not, and of thoughts that are sent as they are
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ),
        ),
        "moderation": Refused(_NO_MODERATION),
        "previous_response_id": Refused(_NO_STORE),
        "prompt": Refused("no prompts are kept: send its text as input"),
        "reasoning.context": Refused("the model's template chooses among thoughts", ("auto",)),
        "reasoning.generate_summary": Refused("thoughts are shown as they are", ("auto",)),
        "reasoning.mode": Refused(_UNKNOWN_TO_MODEL, ("standard",)),
        "reasoning.summary": Refused("thoughts are shown as they are", ("auto",)),
        "text.verbosity": Refused(_UNKNOWN_TO_MODEL, ("medium",)),
        "tool_choice.mode": Refused(_FEWER_TOOLS),
        "tool_choice.server_label": Refused(_NO_TOOLS_HERE),
        "tool_choice.tools": Refused(_FEWER_TOOLS),
        "top_logprobs": Refused("use /v1/chat/completions for logprobs", (0,)),
        "truncation": Refused("nothing is cut off from a conversation", ("disabled",)),
    },
    "messages": {
        **_OF_OTHERS,
        **_OF_ONE_REPLY,
        **_forms("output_config.format"),
        **_OF_MESSAGES,
        "container": Refused(_NO_TOOLS_HERE),
    },
    "count_tokens": _OF_MESSAGES,
    "ollama": {"images": Refused(_NO_AUDIO), "messages.images": Refused(_NO_AUDIO)},
    "embeddings": {
        "add_special_tokens": Refused("send token ids for a text without them", (True,)),
        "truncate_prompt_tokens": Refused("nothing is cut off from a text"),
    },
}

_OPENAI = {
    *("safety_identifier", "user"),  # for accounts and bills, which this server has none of
    # What was read before is found again without these.
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    "service_tier",  # says how fast an answer is made, not which
    "store",  # asks to keep the answer, which is the same
    "stream_options.include_obfuscation",  # pads events against eavesdroppers
}
_ANTHROPIC = {
    "betas",  # is a header
    # For accounts and bills, which this server has none of.
    *("billing_policy", "fallback_credit_token", "metadata", "user_profile_id", "workspace_id"),
    *("cache_control", "tools.cache_control"),  # what was read before is found again without it
    "diagnostics",  # asks why a cache missed
    *("inference_geo", "service_tier", "speed"),  # how fast or where an answer is made, not which
    "thinking.block_binding",  # thoughts that are sent back are taken as they are
    "thinking.budget_tokens",  # is a target, not a limit; max_tokens limits a thought too
    "tools.eager_input_streaming",  # arguments are sent as they come
    "tools.strict",  # calls that are demanded keep to their schema, others are the model's
}
# Of a schema, which always holds.
_SCHEMA = ("description", "name", "strict")
NO_EFFECT: Mapping[Api, Set[str]] = {
    "chat": {
        *_OPENAI,
        "metadata",  # of what is kept
        "prediction",  # says how fast an answer is made, not which
        *(f"response_format.json_schema.{name}" for name in _SCHEMA),
    },
    "completions": _OPENAI,
    "native": {"cache_prompt", "id_slot", "n_keep", "backend_sampling"},  # how, not what
    "responses": {
        *_OPENAI,
        "access_programs",  # for bills
        "max_tool_calls",  # limits tools that the server runs, which are none
    },
    "messages": _ANTHROPIC,
    "count_tokens": {*_ANTHROPIC, "model"},  # there is one
    "ollama": {
        *("shift", "truncate"),  # nothing is cut off from a text
        # How a model is loaded, which options of the server say.
        *(f"options.{name}" for name in ("num_batch", "num_ctx", "num_gpu", "num_thread")),
        *("options.main_gpu", "options.num_keep", "options.use_mmap"),
    },
    "embeddings": {"user"},
}


def refuse_unsupported(api: Api, body: Mapping[str, Any]) -> None:
    """Raise ApiError for the first field that asks for something that vkmoe does not do."""
    for path, refused in REFUSED[api].items():
        for place, value in _found(body, path.split(".")):
            if _asks(value, refused.harmless):
                raise ApiError(
                    400,
                    f"{place} is not supported: {refused.reason}",
                    param=place,
                    code="unsupported_parameter",
                )


def _asks(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Say whether a value asks for anything; a list does where one of its items does."""
    if isinstance(value, list):
        return any(_asks(each, harmless) for each in value)
    return value is not None and value not in harmless


def _found(value: Any, names: list[str], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a body has at a path, once for each item of the lists on the way."""
    if not names:
        yield place, value
    elif isinstance(value, list):
        for index, each in enumerate(value[:MOST_ITEMS]):  # a longer one is refused
            yield from _found(each, names, f"{place}.{index}")
    elif isinstance(value, dict) and names[0] in value:
        inner = f"{place}.{names[0]}" if place else names[0]
        yield from _found(value[names[0]], names[1:], inner)
