"""Chat templates: real ones against what transformers renders, the sandbox, and errors."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from vkmoe.errors import ModelFileError, PromptError, UnsupportedModelError
from vkmoe.generate.chat_template import ChatTemplate
from vkmoe.generate.tokenizer import Tokenizer

FIXTURE: dict[str, Any] = json.loads(
    Path(__file__).with_name("chat_renderings.json").read_text(encoding="utf-8")
)
HELLO = [{"role": "user", "content": "Hi"}]
RENDERED = [(template, case) for template in FIXTURE["texts"] for case in FIXTURE["cases"]]


@pytest.mark.shared
@pytest.mark.parametrize(("template", "case"), RENDERED)
def test_renders_what_transformers_renders(shared: Path, template: str, case: str) -> None:
    source = (shared / "templates" / template).read_text(encoding="utf-8")
    chat = ChatTemplate(source, FIXTURE["tokens"])
    today = datetime.datetime.fromisoformat(FIXTURE["date"])
    arguments = {**FIXTURE["cases"][case], "strftime_now": today.strftime}
    expected = FIXTURE["texts"][template][case]
    if expected is None:
        with pytest.raises(PromptError):
            chat.render(**arguments)
    else:
        assert chat.render(**arguments) == expected


def test_the_fixture_renders_nearly_everything() -> None:
    texts = [text for cases in FIXTURE["texts"].values() for text in cases.values()]
    assert len(texts) == len(RENDERED) >= 35
    assert all(FIXTURE["texts"]["Qwen-Qwen3-0.6B.jinja"].values())
    assert sum(text is None for text in texts) <= 3


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n  {% if m %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert ChatTemplate(source).render(HELLO) == "Hi\n"


def test_json_is_not_escaped_for_html() -> None:
    chat = ChatTemplate("{{ x | tojson }} {{ x | tojson(indent=1) }}")
    assert chat.render(HELLO, x={"é": "<&'>"}) == '{"é": "<&\'>"} {\n "é": "<&\'>"\n}'


def test_loops_can_be_left() -> None:
    chat = ChatTemplate(
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert chat.render(HELLO) == "01"


def test_the_generation_mark_prints_as_it_is() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render(HELLO) == "Hi"


def test_the_date_is_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO).isdigit()


def test_special_tokens_come_from_the_vocabulary(tiny_tokenizer: Tokenizer) -> None:
    metadata = {"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"}
    chat = ChatTemplate.from_metadata(metadata, tiny_tokenizer)
    assert chat.render(HELLO) == "<|endoftext|>" * 2


@pytest.mark.parametrize("source", [None, ""])
def test_a_model_without_a_template_is_an_error(source: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match="no chat template") as caught:
        ChatTemplate(source)
    assert "vkmoe generate" in caught.value.hint


def test_a_template_that_is_no_text_is_an_error(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelFileError, match="not text"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 5}, tiny_tokenizer)


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ x", "{% for m in messages %}", "{% nonsense %}", "(" * 5 + "{{" + "(" * 9999],
)
def test_a_broken_template_is_one_clear_line(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be used") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate\nalways') }}", "failed: roles must alternate$"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages[0].content + 1 }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "failed"),
        ("{% set x = messages.append(1) %}", "failed"),
        ("{{ range(999999999) | list }}", "failed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed"),
    ],
)
def test_what_a_template_does_wrong_is_one_clear_line(source: str, message: str) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        ChatTemplate(source).render(HELLO)
    assert "\n" not in str(caught.value)
