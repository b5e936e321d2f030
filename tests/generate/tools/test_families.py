"""Which family a real template has, and what it writes read back as a reply."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.generate.conftest import with_tokens
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.tools import ToolFamily, family_of
from vkmoe.generate.tools.families import FamilyName
from vkmoe.generate.tools.marked import DEEPSEEK

from .replies import ADD, NOW, THINK, events_of, in_pieces, joined

NAMES: dict[str, FamilyName] = {
    "Qwen-Qwen3-0.6B.jinja": "hermes",
    "Qwen3-Coder.jinja": "qwen-coder",
    "Qwen3.5-4B.jinja": "qwen-coder",
    "deepseek-ai-DeepSeek-V3.1.jinja": "deepseek-v3.1",
    "meta-llama-Llama-3.1-8B-Instruct.jinja": "llama",
    "mistralai-Mistral-Nemo-Instruct-2407.jinja": "mistral",
    "openai-gpt-oss-120b.jinja": "harmony",
}
ONE_CALL_ONLY = ("llama", "harmony")  # their templates write no more
CALLS = [
    ("add", {"a": 1, "b": -2.5, "note": 'é </tool_call> <|end|> "x"\n\n'}),
    ("now", {}),
]


@cache
def compiled(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})


def api_call(i: int, as_text: bool) -> dict[str, Any]:
    """A call as OpenAI's API has it, or with its arguments as an object."""
    name, arguments = CALLS[i]
    given = json.dumps(arguments) if as_text else arguments
    function = {"name": name, "arguments": given}
    return {"id": f"call_{i:024x}", "type": "function", "function": function}


def reply_by(chat: ChatTemplate, message: dict[str, Any], reply_end: str) -> tuple[str, str]:
    """The prompt for a question, and what the template writes of the answer `message`."""
    question = [{"role": "user", "content": "1+2?"}]
    prompt = chat.render(question, tools=[ADD, NOW])
    whole = chat.render([*question, message], tools=[ADD, NOW], add_generation_prompt=False)
    return prompt, whole[len(prompt) :].removesuffix("\n").removesuffix(reply_end)


@pytest.mark.shared
@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(
    ("template", "n_calls"),
    [(t, n) for t, name in NAMES.items() for n in (1, 2) if n == 1 or name not in ONE_CALL_ONLY],
)
def test_what_the_template_writes_is_read_back(
    shared: Path, template: str, n_calls: int, as_text: bool, tiny_tokenizer: Tokenizer
) -> None:
    chat = compiled(shared / "templates" / template)
    family = family_of(chat.source, tiny_tokenizer)
    assert family.name == NAMES[template]
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [api_call(i, as_text) for i in range(n_calls)],
    }
    end = "<|im_end|>" if "Qwen" in template else "</s>"
    for mark in ("<｜end▁of▁sentence｜>", "<|eot_id|>", "<|call|>"):
        end = mark if mark in chat.source else end
    prompt, text = reply_by(chat, message, end)
    in_thought = family.begins_in_thought(prompt)
    assert in_thought == (template == "Qwen3.5-4B.jinja")
    reply = joined(events_of(in_pieces(text, range(0, 999, 7)), family, in_thought=in_thought))
    assert reply[:2] == ("", "")
    found = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    assert found == CALLS[:n_calls]


@pytest.mark.shared
def test_thoughts_and_a_text_before_a_call_are_read_back(
    shared: Path, tiny_tokenizer: Tokenizer
) -> None:
    message = {"role": "assistant", "content": "I add.", "reasoning_content": "Why\n\nnot?"}
    for template in ("Qwen-Qwen3-0.6B.jinja", "Qwen3.5-4B.jinja", "openai-gpt-oss-120b.jinja"):
        chat = compiled(shared / "templates" / template)
        family = family_of(chat.source, tiny_tokenizer)
        prompt, text = reply_by(chat, {**message, "tool_calls": [api_call(0, True)]}, "<|im_end|>")
        in_thought = family.begins_in_thought(prompt)
        content, thought, calls = joined(events_of([text], family, in_thought=in_thought))
        # The template of gpt-oss has one place for both.
        parts = (content, thought) if content else tuple(reversed(thought.split("\n\n", 1)))
        assert (*parts, len(calls)) == (
            ("I add.", "Why\n\nnot?", 1) if content else ("not?\n\nI add.", "Why", 1)
        )


def test_a_template_without_calls_has_none(tiny_tokenizer: Tokenizer) -> None:
    assert family_of("{{ messages }}", tiny_tokenizer) == ToolFamily("none")
    assert family_of("<think> </think>", tiny_tokenizer) == ToolFamily(
        "none", THINK, {"<think>": 261}
    )


def test_newer_and_older_forms_are_told_apart(tiny_tokenizer: Tokenizer) -> None:
    names = {
        "[TOOL_CALLS] [ARGS] [THINK] [/THINK]": "mistral-args",
        f"{DEEPSEEK.calls} ```json": "deepseek-v3",
        "<|python_tag|>": "llama",
        "<tool_call> python_tag ipython": "hermes",
    }
    assert {source: family_of(source, tiny_tokenizer).name for source in names} == names


def test_marks_that_are_control_tokens_show(tiny_tokenizer: Tokenizer) -> None:
    tokenizer = with_tokens("[TOOL_CALLS]", "[INST]", "</think>")
    family = family_of("[TOOL_CALLS]</think>", tokenizer)
    assert family.mark_ids == {"[TOOL_CALLS]": 262, "<think>": 261, "</think>": 264}
    assert family.shown == {262, 264}
    visible = family_of("[TOOL_CALLS]", with_tokens("[TOOL_CALLS]", kind=4))
    assert (visible.mark_ids, visible.shown) == ({"[TOOL_CALLS]": 262}, frozenset())
    ends = with_tokens("<|channel|>", "<|message|>", "<|call|>", "<|return|>")
    marks = {"<|channel|>": 262, "<|message|>": 263}  # they show anyhow, ends never
    assert family_of("", ends) == ToolFamily("harmony", None, marks)
