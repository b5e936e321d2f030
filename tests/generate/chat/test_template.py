"""Chat templates: real ones against what transformers renders, the sandbox, and errors."""

from __future__ import annotations

import datetime
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.generate.conftest import file_of
from vkmoe.errors import ModelFileError, PromptError, UnsupportedModelError
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.text.tokenizer import Tokenizer

FIXTURE: dict[str, Any] = json.loads(
    Path(__file__).with_name("renderings.json").read_text(encoding="utf-8")
)
HELLO = [{"role": "user", "content": "Hi"}]
RENDERED = [(template, case) for template in FIXTURE["texts"] for case in FIXTURE["cases"]]


@cache
def compiled(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"), FIXTURE["tokens"])


@pytest.mark.shared
@pytest.mark.parametrize(("template", "case"), RENDERED)
def test_renders_what_transformers_renders(
    shared: Path, template: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FixedDate(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> FixedDate:
            return cls.fromisoformat(FIXTURE["date"])

    clock = SimpleNamespace(datetime=FixedDate)
    monkeypatch.setattr("vkmoe.generate.chat.template.datetime", clock)
    chat = compiled(shared / "templates" / template)
    expected = FIXTURE["texts"][template][case]
    given = {"date_string": "26 Jul 2024", **FIXTURE["cases"][case]}  # transformers names no day
    if expected is None:
        with pytest.raises(PromptError):
            chat.render(**given)
    else:
        assert chat.render(**given) == expected


@pytest.mark.shared
def test_every_template_there_has_every_rendering(shared: Path) -> None:
    names = sorted(path.name for path in (shared / "templates").glob("*.jinja"))
    assert names == sorted(FIXTURE["texts"])
    for texts in FIXTURE["texts"].values():
        assert texts.keys() == FIXTURE["cases"].keys()


def test_few_templates_refuse_and_the_cases_differ() -> None:
    """A template may refuse a role, an order of them or parallel calls, but little else."""
    refusals = {
        (template, case)
        for template, texts in FIXTURE["texts"].items()
        for case, text in texts.items()
        if text is None
    }
    assert refusals == {
        ("Qwen3.5-4B.jinja", "a developer message"),
        ("EXAONE.jinja", "a developer message"),
        ("Qwen3.5-4B.jinja", "only a system message"),
        ("meta-llama-Llama-3.1-8B-Instruct.jinja", "several calls"),
        ("mistralai-Mistral-Nemo-Instruct-2407.jinja", "a developer message"),
        ("mistralai-Mistral-Nemo-Instruct-2407.jinja", "two users in a row"),
    }
    for template, on, off in (
        ("Qwen-Qwen3-0.6B.jinja", "thinking on", "thinking off"),
        ("Qwen3.5-4B.jinja", "thinking on", "thinking off"),
        ("deepseek-ai-DeepSeek-V3.1.jinja", "DeepSeek thinks", "DeepSeek does not think"),
        ("openai-gpt-oss-120b.jinja", "little reasoning", "three turns"),
        ("openai-gpt-oss-120b.jinja", "another identity", "one message"),
        ("meta-llama-Llama-3.1-8B-Instruct.jinja", "another date", "a system message"),
    ):
        texts = FIXTURE["texts"][template]
        assert texts[on] != texts[off]
    assert FIXTURE["date"] in FIXTURE["texts"]["openai-gpt-oss-120b.jinja"]["one message"]


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
    file = file_of({"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"})
    chat = ChatTemplate.from_file(file, tiny_tokenizer)
    assert chat.render(HELLO) == "<|endoftext|>" * 2


def test_a_model_without_a_template_is_an_error(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedModelError, match="no chat template") as caught:
        ChatTemplate.from_file(file_of({}), tiny_tokenizer)
    assert "vkmoe generate" in caught.value.hint


def test_a_template_that_is_no_text_is_an_error(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelFileError, match="chat_template' should be a string"):
        ChatTemplate.from_file(file_of({"tokenizer.chat_template": 5}), tiny_tokenizer)


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ x", "{% for m in messages %}", "{% nonsense %}", "(" * 5 + "{{" + "(" * 9999],
)
def test_a_broken_template_is_one_clear_line(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be used") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)


def test_a_template_may_change_lists_of_its_own() -> None:
    made = "{% set l = ['b'] %}{% set _ = l.append('c') %}{{ l.pop(0) }}{{ l | join }}"
    assert ChatTemplate(made).render(HELLO) == "bc"
    held = "{% set n = namespace(ids=[]) %}{% set _ = n.ids.append(messages) %}{{ n.ids | length }}"
    assert ChatTemplate(held).render(HELLO) == "1"


def test_a_generator_is_written_as_a_list() -> None:
    chat = ChatTemplate("{{ messages | map(attribute='content') | tojson }}")
    assert chat.render(HELLO) == '["Hi"]'


@pytest.mark.parametrize(
    "source",
    [
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages.pop() %}",
        "{% set _ = tools[0].parts.append(1) %}",
        "{% set _ = [messages][0].append(1) %}",
        "{% set l = [1] %}{% set _ = l.extend([2]) %}",
        "{% set l = [1] %}{% set _ = l.clear() %}",
        "{% set d = {'a': 1} %}{% set _ = d.pop('a') %}",
        "{% set l = [1] %}{{ l.__class__.__mro__ }}",
        "{% set l = [1] %}{{ l.append.__self__.x }}",
        "{{ messages | tojson(default=messages.append) }}",
    ],
)
def test_a_template_changes_nothing_that_it_was_given(source: str) -> None:
    with pytest.raises(PromptError, match=r"unsafe|undefined|failed"):
        ChatTemplate(source).render(HELLO, tools=[{"parts": []}])


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


def test_templates_are_told_what_they_take_for_granted() -> None:
    """Today; and that the model may think, unless a template has a default of its own."""
    today = f"{datetime.date.today():%d %b %Y}"
    assert ChatTemplate("{{ date_string }}").render(HELLO) == today
    sources = {
        "{{ enable_thinking }}": "True",
        "{{ enable_thinking is defined }}": "False",
        "{{ enable_thinking | default(false) }}": "False",
    }
    for source, text in sources.items():
        assert ChatTemplate(source).render(HELLO) == text
    assert ChatTemplate("{{ enable_thinking }}").render(HELLO, enable_thinking=False) == "False"
