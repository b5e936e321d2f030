"""Grammars of calls: they compile, take what the templates write, and nothing but calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import pytest

from tests.generate.conftest import with_tokens
from vkmoe.errors import PromptError
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.constraint import Constraints
from vkmoe.generate.tools import ToolFamily, family_of, reply_grammar
from vkmoe.generate.tools.families import family_of_template
from vkmoe.generate.tools.schemas import Allowed, ParameterSchemas

from .replies import FAMILIES, NOW, TEMPLATES, D, events_of, joined, takes, template, tool
from .test_parser import HARMONY_THOUGHT, V3, V31


def calls_of(family: ToolFamily, tools: Sequence[Any], **more: Any) -> str:
    """The grammar of calls, with schemas as they are."""
    return reply_grammar(family, lambda schema: f"%json {json.dumps(schema)}", tools, **more)


LEVEL = {"type": "string", "enum": ["low", "high"]}
TOOLS = [
    tool("add", ["a"], a={"type": "number"}, note={"type": "string"}, level=LEVEL),
    {**NOW},
]
ADD_TAGS = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
ADD_JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
# One call, what stands between calls or None, what begins and ends all, a thought before it.
FORMS: dict[str, tuple[str, str | None, str, str, str]] = {
    "hermes": (ADD_JSON, "\n", "", "", "<think>\nhm\n</think>\n\n"),
    "qwen-coder": (ADD_TAGS, "\n", "", "", "<think>\nhm\n</think>\n\n"),
    "harmony": (
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
        None,
        "",
        "",
        HARMONY_THOUGHT,
    ),
    "mistral": ('{"name": "add", "arguments": {"a": 1}}', ", ", "[TOOL_CALLS][", "]", ""),
    "mistral-args": ('[TOOL_CALLS]add[ARGS]{"a": 1}', "", "", "", "[THINK]hm[/THINK]"),
    "deepseek-v3": (V3, "\n", D.calls, D.calls_end, "<think>hm</think>"),
    "deepseek-v3.1": (V31, "", D.calls, D.calls_end, "<think>hm</think>"),
    "llama": ('{"name": "add", "parameters": {"a": 1}}', None, "", "", ""),
    "none": ('{"name": "add", "arguments": {"a": 1}}', None, "", "", ""),
}


@pytest.mark.parametrize("name", FORMS)
def test_calls_as_the_template_writes_them_are_taken_and_nothing_else(name: str) -> None:
    call, between, begin, end, thought = FORMS[name]
    family = FAMILIES[name]
    grammar = calls_of(family, TOOLS)
    one = f"{begin}{call}{end}"
    assert takes(grammar, one) and takes(grammar, thought + one)
    assert len(joined(events_of([thought + one], family, must_call=True)).calls) == 1
    for wrong in ("", thought, "Hi", call[:-1], one + "!", one.replace("add", "subtract")):
        assert not takes(grammar, wrong), wrong
    assert not takes(grammar, one.replace("1", "true"))
    two = f"{begin}{call}{between}{call}{end}"
    assert takes(grammar, two) == (between is not None)
    assert not takes(calls_of(family, TOOLS, parallel=False), two)
    assert takes(calls_of(family, TOOLS, parallel=False), one)
    assert not takes(calls_of(family, TOOLS[1:]), one)  # tool_choice names another
    longer = [tool("additive"), *TOOLS]  # whose name begins with that of another
    assert takes(calls_of(family, longer), one)


def test_a_thought_that_the_template_opened_must_end_first() -> None:
    grammar = calls_of(FAMILIES["hermes"], TOOLS, in_thought=True)
    assert takes(grammar, f"hm\n</think>\n\n{ADD_JSON}")
    assert not takes(grammar, ADD_JSON)


def test_values_between_tags_keep_to_their_schemas() -> None:
    grammar = calls_of(FAMILIES["qwen-coder"], TOOLS)

    def call(*parameters: tuple[str, str]) -> str:
        tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
        return f"<tool_call>\n<function=add>\n{tags}</function>\n</tool_call>"

    assert takes(grammar, call(("a", "-1.5"), ("note", 'two\nlines "é"'), ("level", "low")))
    assert takes(grammar, call(("a", "1"), ("level", "high")))
    assert not takes(grammar, call(("a", "1"), ("level", "middle")))
    assert not takes(grammar, call(("a", "one")))
    assert not takes(grammar, call(("note", "a is required")))


PLACE = {
    "type": "object",
    "properties": {
        "lat": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "level": LEVEL,
        "free": {"type": "object"},
        "none": {"type": "object", "properties": {}},
    },
    "required": ["lat"],
}


@pytest.mark.parametrize(
    ("value", "is_right"),
    [
        ("{'lat': -1.5}", True),
        ('{"lat": 1, "tags": ["a"]}', True),
        ("{'lat': 0, 'tags': ['a', \"it's\"], 'level': 'low', 'free': {'x': [None, 1]}}", True),
        ("{'lat': 1, 'level': 'low', 'tags': []}", True),  # as templates sort keys
        ("{'level': 'low', 'lat': 1}", False),
        ("{'lat': 1, 'none': {}}", True),
        ("{'lat': 1, 'none': {'x': 1}}", False),
        ("{'lat': 01}", False),
        ("{'lat': True}", False),
        ("{'lat': 1, 'tags': [1]}", False),
        ("{'lat': 1, 'level': 'middle'}", False),
        ("{'lat': 1, 'other': 1}", False),
        ("{'tags': []}", False),
        ("None", False),
    ],
)
def test_values_that_are_nearly_json_keep_to_their_schemas(value: str, is_right: bool) -> None:
    pair = "{% for k, v in a.items() %}<|p {{ k }}>{{ v }}</p>{% endfor %}"
    family = family_of_template(ChatTemplate(template("<|do {{ f }}>" + pair + "</do>")))
    tools = [tool("go", place=PLACE)]
    call = f"<|do go><|p place>{value}</p></do>"
    assert takes(calls_of(family, tools), call) == is_right
    if is_right:
        (found,) = joined(events_of([call], family, tools=tools)).calls
        assert json.loads(found.arguments)["place"]["lat"] <= 1


def test_references_in_schemas_find_their_definitions() -> None:
    function = {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/Point"}},
            "required": ["x"],
            "$defs": {"Point": {"type": "object", "properties": {"y": {"type": "integer"}}}},
        },
    }
    tools = [{"type": "function", "function": function}]
    inner = json.dumps({"x": {"y": 1}})
    call = f'<tool_call>\n{{"name": "f", "arguments": {inner}}}\n</tool_call>'
    assert takes(calls_of(FAMILIES["hermes"], tools), call)
    tags = '<tool_call>\n<function=f>\n<parameter=x>\n{"y": 1}\n</parameter>\n</function>\n'
    assert takes(calls_of(FAMILIES["qwen-coder"], tools), tags + "</tool_call>")


DEFS = {
    "Level": {"type": "string", "enum": ["low", "high"]},
    "Text": {"type": "string"},
    "Point": {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]},
    "a/b": {"$ref": "#/$defs/Level"},
}
NULL = {"type": "null"}
# A schema, a value as it stands between tags, what it is, and what the schema does not allow.
VALUES: list[tuple[Any, str, Any, str | None]] = [
    ({"$ref": "#/$defs/Level"}, "low", "low", '"low"'),
    ({"$ref": "#/$defs/a~1b"}, "low", "low", "middle"),
    ({"$ref": "#/$defs/Text"}, "42", "42", None),
    ({"$ref": "#/$defs/Point"}, '{"y": 1}', {"y": 1}, "one"),
    ({"allOf": [{"$ref": "#/$defs/Level"}], "default": "low"}, "high", "high", "middle"),
    ({"allOf": [{"$ref": "#/$defs/Level"}, {"enum": ["high", 1]}]}, "high", "high", "low"),
    ({"anyOf": [{"$ref": "#/$defs/Level"}, NULL], "default": None}, "high", "high", "middle"),
    ({"anyOf": [{"$ref": "#/$defs/Level"}, NULL], "default": None}, "null", None, "nothing"),
    ({"anyOf": [{"$ref": "#/$defs/Point"}, NULL]}, '{"y":1}', {"y": 1}, "nothing"),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, NULL]}, "42", "42", None),
    ({"anyOf": [{"const": "a"}, {"const": 5}]}, "a", "a", "b"),
    ({"const": "x"}, "x", "x", '"x"'),
    ({"const": "5", "type": "string"}, "5", "5", "6"),
    ({"const": {"k": [1]}}, '{"k": [1]}', {"k": [1]}, '{"k": [2]}'),
    ({"enum": ["a", 7, None]}, "7", 7, "8"),
    ({"$ref": "#/$defs/Loop"}, "null", None, None),
    ({"$ref": "#/$defs/none"}, "5", 5, None),
    ({"$ref": "http://example.com/x.json"}, "a", "a", None),
    ({"oneOf": [{"$ref": "#/$defs/Level"}, {"const": 7}]}, "7", 7, "8"),
]


@pytest.mark.parametrize(("schema", "text", "value", "wrong"), VALUES)
def test_a_value_between_tags_is_what_its_schema_leads_to(
    schema: Any, text: str, value: Any, wrong: str | None
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": DEFS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    family = FAMILIES["qwen-coder"]
    grammar = calls_of(family, tools)

    def call(text: str) -> str:
        tag = f"<parameter=x>\n{text}\n</parameter>\n"
        return f"<tool_call>\n<function=f>\n{tag}</function>\n</tool_call>"

    assert takes(grammar, call(text))
    assert wrong is None or not takes(grammar, call(wrong))
    (found,) = joined(events_of([call(text)], family, tools=tools)).calls
    assert json.loads(found.arguments) == {"x": value}


def test_parameters_may_stand_behind_a_reference() -> None:
    """As pydantic writes a model that leads to itself."""
    node = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
        "required": ["name"],
    }
    parameters = {"$defs": {"Node": node}, "$ref": "#/$defs/Node"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    family = FAMILIES["qwen-coder"]
    call = (
        "<tool_call>\n<function=f>\n<parameter=name>\n42\n</parameter>\n</function>\n</tool_call>"
    )
    assert takes(calls_of(family, tools), call)
    assert not takes(
        calls_of(family, tools), "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    )
    (found,) = joined(events_of([call], family, tools=tools)).calls
    assert json.loads(found.arguments) == {"name": "42"}


def test_references_that_lead_far_or_everywhere_come_to_an_end() -> None:
    chain: dict[str, Any] = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(5000)}
    for i in range(24):
        chain[f"d{i}"] = {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
    properties = {"far": {"$ref": "#/$defs/c0"}, "wide": {"$ref": "#/$defs/d0"}}
    schemas = ParameterSchemas({"properties": properties, "$defs": {**chain, "d24": {"const": 1}}})
    assert schemas.parameter("far") == Allowed()
    assert schemas.parameter("wide") == Allowed(frozenset({"integer"}), ("1",))


def test_control_tokens_stand_by_their_ids() -> None:
    ids = {"[TOOL_CALLS]": 9, "[ARGS]": 32, "[/THINK]": 7}
    family = ToolFamily(FAMILIES["mistral-args"].form, mark_ids=ids)
    grammar = calls_of(family, TOOLS)
    assert '<[9]> "add" ("[CALL_ID]" /[A-Za-z0-9_.:-]+/)? <[32]> %json' in grammar
    assert "thought_end: /(?s:.*)/ <[7]>" in grammar
    tokenizer = llguidance.LLTokenizer("byte")
    source = llguidance.grammar_from("lark", grammar)
    assert llguidance.LLMatcher.validate_grammar(source, tokenizer) == ""


def test_a_constraint_takes_the_tokens_of_a_call() -> None:
    """Marks are single tokens, also those that are no control tokens."""
    marks = ("<tool_call>", "</tool_call>", "</think>")  # <think> is there
    tokenizer = with_tokens(*marks, kind=4)
    family = family_of(TEMPLATES["hermes"], tokenizer)
    state = Constraints(tokenizer).lark(calls_of(family, TOOLS)).begin()
    ids = tokenizer.encode(f"<think>\nhm\n</think>\n\n{ADD_JSON}", add_special=False)
    assert set(family.mark_ids.values()) <= set(ids)
    for token in ids:
        allowed = state.allowed()
        assert allowed is not None and allowed[token]
        assert state.accept(token)
    allowed = state.allowed()
    assert allowed is not None and allowed[sorted(tokenizer.end_ids)].all()


def test_a_call_cannot_be_demanded_without_tools() -> None:
    with pytest.raises(PromptError, match="no tools"):
        calls_of(FAMILIES["hermes"], [])
