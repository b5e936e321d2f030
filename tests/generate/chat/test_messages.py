"""Messages of OpenAI's API in the forms that chat templates take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vkmoe.errors import PromptError
from vkmoe.generate.chat.template import ChatTemplate

USER = {"role": "user", "content": "Hi"}
ARGUMENTS = {"a": 1, "s": "é"}
CALL = {
    "id": "call_1234567890",
    "type": "function",
    "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)},
}
ALL = "{{ messages | tojson }}"


def seen(*messages: dict[str, Any], source: str = ALL) -> Any:
    """The messages that a template is given, which writes them as JSON."""
    return json.loads(ChatTemplate(source).render([USER, *messages]))[1:]


def with_call(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_arguments_come_as_an_object_whichever_way_they_are_given() -> None:
    as_object = {**CALL, "function": {"name": "add", "arguments": ARGUMENTS}}
    for call in (CALL, as_object):
        (message,) = seen(with_call(call))
        assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    for nothing in ("", None):
        empty = {**CALL, "function": {"name": "add", "arguments": nothing}}
        assert seen(with_call(empty))[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("'```json\\n' + f.arguments + '```'", '```json\n{"a": 1, "s": "é"}```'),  # DeepSeek V3
        ("f.arguments", '{"a": 1, "s": "é"}'),
        ("f.arguments | tojson", '{"a": 1, "s": "é"}'),
        ("f.arguments | items | list | tojson", '[["a", 1], ["s", "é"]]'),
        ("f.arguments if f.arguments is string else f.arguments | tojson", '{"a": 1, "s": "é"}'),
    ],
)
def test_a_template_gets_the_arguments_that_it_understands(written: str, wanted: str) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        f"{{{{ {written} }}}}{{% endfor %}}{{% endfor %}}"
    )
    assert ChatTemplate(source).render([USER, with_call(CALL)]) == wanted


def test_calls_are_in_the_prompt_of_a_template_that_asks_for_no_content() -> None:
    """As DeepSeek V3's template does, which drops calls beside a text."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}{% endfor %}"
        "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    call = '<call>add{"a": 1, "s": "é"}'
    chat = ChatTemplate(source)
    assert chat.render([USER, with_call(CALL)]) == f"<user>Hi{call}"
    assert chat.render([USER, {**with_call(CALL), "content": ""}]) == f"<user>Hi{call}"
    both = chat.render([USER, {**with_call(CALL), "content": "Well."}, USER])
    assert both == f"<user>Hi<assistant>Well.{call}<user>Hi"


def test_arguments_that_are_no_object_are_refused() -> None:
    for arguments in ("[1]", "{", "[" * 100_000, 5):
        call = {**CALL, "function": {"name": "add", "arguments": arguments}}
        with pytest.raises(PromptError, match="arguments of a tool call are no JSON object"):
            seen(with_call(call))
    wrong: Any
    for wrong in ("add", {"id": "x"}):
        with pytest.raises(PromptError, match="no function"):
            seen({"role": "assistant", "tool_calls": [wrong]})


def test_empty_fields_are_left_out_and_a_missing_content_is_empty() -> None:
    given: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [], "name": None}
    assert seen(given, {"role": "tool"}) == [
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": ""},
    ]


def test_parts_of_a_content_are_joined_line_by_line() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert seen({"role": "user", "content": parts})[0]["content"] == "one\ntwo"
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    for part in (picture, "text", {"type": "text", "text": None}):
        with pytest.raises(PromptError, match="a part that is no text"):
            seen({"role": "user", "content": [*parts, part]})


def test_ids_of_any_length_become_those_that_mistral_takes() -> None:
    source = ALL + "{# id|length != 9 #}"
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "3"}
    asked, answered = seen(with_call(CALL), result, source=source)
    short = asked["tool_calls"][0]["id"]
    assert answered["tool_call_id"] == short and len(short) == 9 and short.isalnum()
    assert seen({**result, "tool_call_id": "abcDEF123"}, source=source)[0]["tool_call_id"] == (
        "abcDEF123"
    )
    assert seen(result)[0]["tool_call_id"] == CALL["id"]


def test_gpt_oss_gets_thoughts_under_its_own_name() -> None:
    source = ALL + "{# message.thinking: no content and thinking beside a call #}"
    thoughtful = {"role": "assistant", "content": "Well.", "reasoning_content": "Why?"}
    assert seen(thoughtful, source=source)[0]["thinking"] == "Why?"
    (message,) = seen({**thoughtful, "tool_calls": [CALL]}, source=source)
    assert (message["thinking"], message["content"]) == ("Why?\n\nWell.", "")
    assert "thinking" not in seen(thoughtful)[0]
    (message,) = seen({**thoughtful, "tool_calls": [CALL]}, source=ALL + "{# message.thinking #}")
    assert (message["thinking"], message["content"]) == ("Why?", "Well.")


def test_tools_are_a_list_of_objects_or_none() -> None:
    chat = ChatTemplate("{{ tools | tojson }}")
    assert chat.render([USER], tools=[]) == chat.render([USER]) == "null"
    tool = {"type": "function", "function": {"name": "now"}}
    assert json.loads(chat.render([USER], tools=[tool])) == [tool]
    wrong: Any
    for wrong in (5, {"a": 1}, ["add"]):
        with pytest.raises(PromptError, match="no list of objects"):
            chat.render([USER], tools=wrong)


def test_a_template_that_wants_more_of_tools_gets_it() -> None:
    """Some fail without a description, without the types inside a schema, or without a list."""
    schema = {"type": "object", "properties": {"x": {"type": "array"}, "y": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    need = "{{ 'is ' + f.description ~ f.parameters.properties.x['items'].missing }}"
    chat = ChatTemplate("{% for t in tools %}{% set f = t.function %}" + need + "{% endfor %}")
    assert (chat.render([USER], tools=[tool]), chat.render([USER])) == ("is ", "")
    deep = ChatTemplate("{{ tools[0].function.parameters.properties.y.additionalProperties.type }}")
    assert deep.render([USER], tools=[tool]) == ""
    fire = ChatTemplate("{{ 'on ' + datetime + ': ' + functions }}")
    assert re.fullmatch(r"on [A-Z][a-z]{2} \d\d \d{4}: ", fire.render([USER]))
    assert '"name": "now"' in fire.render([USER], tools=[tool])
    with pytest.raises(PromptError, match="roles"):  # the first error is the one that counts
        ChatTemplate("{{ 1 / 0 if functions else raise_exception('roles') }}").render(
            [USER], tools=[tool]
        )


def test_what_is_no_json_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), {1, 2}, deep):
        with pytest.raises(PromptError, match="are not JSON"):
            ChatTemplate("x").render([USER], extra=value)


@pytest.mark.parametrize("messages", ["hi", 5, None, ["hi"], [USER, 5], [{}], [{"role": 5}]])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(PromptError, match=r"^messages is no list of messages$") as caught:
        ChatTemplate(ALL).render(messages)
    assert caught.value.hint
