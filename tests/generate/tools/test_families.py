"""Which family a template and a vocabulary make, and what it costs to find it."""

from __future__ import annotations

import time

import pytest

from tests.generate.conftest import with_tokens
from vkmoe.errors import UnsupportedModelError
from vkmoe.generate.chat.process import TemplateProcess
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.tools import ToolFamily, family_of
from vkmoe.generate.tools.forms import CallForm, ReplyForm

from .replies import FAMILIES, TEMPLATES, THINK, D, events_of, joined


def call_of(name: str) -> CallForm:
    call = FAMILIES[name].form.call
    assert call is not None
    return call


def test_marks_are_those_around_what_is_known() -> None:
    hermes, deepseek, newer = map(call_of, ("hermes", "deepseek-v3", "mistral-args"))
    assert (hermes.open, hermes.close) == ("<tool_call>\n", "\n</tool_call>")
    assert (deepseek.before, deepseek.between, deepseek.after) == (D.calls, "\n", D.calls_end)
    assert newer.mark == "[TOOL_CALLS]" and newer.several
    assert FAMILIES["hermes"].thought == THINK
    assert FAMILIES["mistral-args"].thought == ("[THINK]", "[/THINK]")
    assert FAMILIES["hermes"].form.ends == ("<|end|>",)
    llama = call_of("llama")
    assert (llama.mark, llama.several) == ("", False)


def test_arguments_are_an_object_or_stand_one_by_one() -> None:
    hermes, coder = call_of("hermes").object, call_of("qwen-coder").pairs
    assert hermes is not None and coder is not None
    assert (hermes.name_key, hermes.arguments_key) == ("name", "arguments")
    assert (coder.open, coder.close) == ("\n<parameter=", "\n</parameter>")
    assert coder.middles == ((">\n", frozenset()),)


def test_the_name_of_a_template_does_not_matter() -> None:
    """Only what it writes does: here, marks that no model has."""
    source = TEMPLATES["hermes"].replace("tool_call>", "run>").replace("think>", "ponder>")
    form = family_of(source, with_tokens("<run>")).form
    assert form.call is not None and form.call.open == "<run>\n"
    assert form.thought == ("<ponder>", "</ponder>")
    family = family_of(source, with_tokens("<run>"))
    text = '<ponder>\nWhy?\n</ponder>\n\nWell.<run>\n{"name": "now", "arguments": {}}\n</run>'
    content, thought, (call,) = joined(events_of([text], family))
    assert (content, thought, call.name) == ("Well.", "Why?", "now")


def test_a_template_without_calls_has_none(tiny_tokenizer: Tokenizer) -> None:
    source = TEMPLATES["none"]
    assert family_of(source, tiny_tokenizer) == ToolFamily()
    assert family_of("", tiny_tokenizer) == ToolFamily()
    family = family_of(source + "{# <think> </think> #}", tiny_tokenizer)
    assert family == ToolFamily(ReplyForm(THINK), mark_ids={"<think>": 261})


def test_a_template_that_is_broken_is_an_error(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be used"):
        family_of("{% if %}", tiny_tokenizer)


def test_marks_that_are_control_tokens_show() -> None:
    marks = ("[TOOL_CALLS]", "[INST]", "[/THINK]")
    family = family_of(TEMPLATES["mistral-args"], with_tokens(*marks))
    assert family.mark_ids == {"[TOOL_CALLS]": 262, "[/THINK]": 264}
    assert family.shown == {262, 264}
    visible = family_of(TEMPLATES["mistral-args"], with_tokens("[TOOL_CALLS]", kind=4))
    assert (visible.mark_ids, visible.shown) == ({"[TOOL_CALLS]": 262}, frozenset())


def test_channels_are_those_of_harmony() -> None:
    ends = with_tokens("<|channel|>", "<|message|>", "<|call|>", "<|return|>")
    marks = {"<|channel|>": 262, "<|message|>": 263}  # they show anyhow, ends never
    assert family_of("", ends) == ToolFamily(is_harmony=True, mark_ids=marks)


def test_a_family_is_found_once_and_quickly(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Tokenizer
) -> None:
    source = TEMPLATES["qwen-coder"] + "{# another one #}"
    began = time.perf_counter()
    found = family_of(source, tiny_tokenizer)
    assert time.perf_counter() - began < 3  # a few tenths on a machine with nothing else to do
    monkeypatch.setattr(TemplateProcess, "__init__", None)
    assert family_of(source, tiny_tokenizer) == found
