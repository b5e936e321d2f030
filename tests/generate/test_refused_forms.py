"""Schemas, grammars and regular expressions that no reply can be kept to: one clear error, soon."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from vkmoe.errors import UsageError, VkmoeError
from vkmoe.generate.constraint import Constraints
from vkmoe.generate.text.tokenizer import Tokenizer

from .conftest import nested


def circle() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


HOSTILE: list[tuple[Any, str]] = [
    ({"$ref": "http://example.com/x.json"}, "refers to another document"),
    ({"$ref": "file:///etc/passwd"}, "refers to another document"),
    ({"$ref": "other.json#/a"}, "refers to another document"),
    ({"properties": {"x": {"items": {"$ref": "//example.com/x"}}}}, "another document"),
    ({"$ref": "#/$defs/none"}, "does not exist"),
    ({"$ref": "#"}, "no text at all"),
    (nested(10_000), "nested more than 100 deep"),
    (circle(), "nested more than 100 deep"),
    ({"description": "x" * 1_000_000}, "more than 262144"),
    ({"properties": {f"p{i}": {} for i in range(100_000)}}, "more than 2000 objects"),
    ({"enum": list(range(60_000))}, "50000 values"),
    ({"type": "foo"}, "Invalid type: foo"),
    ({"type": 5}, "type must be"),
    ({"properties": 5}, "properties must be an object"),
    ({"not": {"type": "string"}}, "not"),
    ({"pattern": "(?=a)b"}, "look-around"),
    ({"pattern": "(", "type": "string"}, "unclosed group"),
    ({"enum": []}, "Unsatisfiable"),
    ({"minLength": 5, "maxLength": 3, "type": "string"}, "Unsatisfiable"),
    ({"const": float("nan")}, "no JSON"),
    ({"const": {1, 2}}, "no JSON"),
    ({(1, 2): 3}, "no JSON"),
    ({"const": "\ud800"}, "cannot be used"),
    ([], "no object"),
    ("{}", "no object"),
    (None, "no object"),
    (False, "allows nothing"),
    ({"allOf": [{"anyOf": [{"minimum": 9 * i + j} for i in range(30)]} for j in range(12)]}, ""),
]


@pytest.mark.parametrize(("schema", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_schema_is_one_clear_error(
    tiny_tokenizer: Tokenizer, schema: Any, message: str
) -> None:
    constraints = Constraints(tiny_tokenizer)
    started = time.perf_counter()
    with pytest.raises(UsageError) as found:
        constraints.json_schema(schema)
    assert time.perf_counter() - started < 2
    assert message in str(found.value) and found.value.hint
    assert len(str(found.value)) < 400 and str(found.value).isprintable()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "Empty"),
        ("start: (", "Expected"),
        ("start: none", "unknown name"),
        ("start: <tool_call>", "unknown special token"),
        ('start: start "a"', "no text at all"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
        ('start: %json {"$ref": "http://example.com/x"}', "another document"),
        ("start: " + '"a" ' * 100_000, "more than 262144"),
        ('start: "\ud800"', "no text"),
        ("start: %json " + '{"items":' * 200 + "{}" + "}" * 200, "nested more than 100 deep"),
        ("start: %json " + '{"items":' * 20_000 + "{}" + "}" * 20_000, "nested more than"),
        ("start: %json " + json.dumps({"properties": {f"p{i}": {} for i in range(9000)}}), "2000"),
        ("start: %json {", "EOF"),
        (None, "no text"),
    ],
    ids=range(14),
)
def test_a_bad_grammar_is_one_clear_error(
    tiny_tokenizer: Tokenizer, grammar: Any, message: str
) -> None:
    started = time.perf_counter()
    with pytest.raises(UsageError) as found:
        Constraints(tiny_tokenizer).lark(grammar)
    assert time.perf_counter() - started < 2
    assert message in str(found.value) and len(str(found.value)) < 400


def test_a_bad_regular_expression_is_refused_and_a_costly_one_ends(
    tiny_tokenizer: Tokenizer,
) -> None:
    constraints = Constraints(tiny_tokenizer)
    with pytest.raises(UsageError, match="regular expression cannot be used: unclosed group"):
        constraints.regex("(a")
    started = time.perf_counter()
    for pattern in (r"(((a{1,1000}){1,1000}){1,1000})", r"(.*a.{500}b.*|x)+c{500}", r"(a+)+$b"):
        try:
            state = constraints.regex(pattern).begin()
            for _ in range(50):
                if state.allowed() is None or not state.accept(ord("a")):
                    break
        except VkmoeError as error:
            assert error.hint
    assert time.perf_counter() - started < 10
