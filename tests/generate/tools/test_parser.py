"""Replies of every family: calls that are well written, that are not, and any cut of both."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkmoe.generate.tools import Content, ReplyParser, ToolCallArguments, ToolFamily
from vkmoe.generate.tools.events import random_call_id
from vkmoe.generate.tools.forms import ReplyForm

from .replies import FAMILIES, THINK, TOOLS, Call, D, Reply, events_of, in_pieces, joined, tool

V3 = f"{D.call}function{D.separator}add\n```json\n" + '{"a": 1}' + f"\n```{D.call_end}"
V31 = f"{D.call}add{D.separator}" + '{"a": 1}' + D.call_end
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Why <|not|>?<|end|><|start|>assistant"
CUTS = st.lists(st.integers(0, 10_000), max_size=12)

# Replies with the calls add({"a": 1}), several of them where that is possible.
ONE = ("add", '{"a": 1}')
WELL_FORMED: list[tuple[str, str, tuple[str, str, list[tuple[str, str]]]]] = [
    (
        "hermes",
        "<think>\nWhy\n\nnot?\n</think>\n\nWell.\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"note":"</tool_call> \\" <tool_call>"},"name":"add"}</tool_call>',
        (
            "Well.",
            "Why\n\nnot?",
            [ONE, ("add", '{"note":"</tool_call> \\" <tool_call>"}')],
        ),
    ),
    ("hermes", '<tool_call>{"name": "now"}', ("", "", [("now", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call> \n Done.\n',
        ("Done.\n", "", [ONE]),
    ),
    (
        "qwen-coder",
        "<think>\n\n</think>\n\nI add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n"
        '</parameter>\n<parameter=note>\nsay "</parameter>"\n\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("I add.", "", [("add", '{"a": 1, "note": "say \\"</parameter>\\"\\n"}'), ("now", "{}")]),
    ),
    (
        "qwen-coder",  # as small models write it: no tag before the function
        "<function=add>\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
        ("", "", [ONE]),
    ),
    (
        "qwen-coder",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n\nDone.",
        ("Done.", "", [ONE]),
    ),
    (
        "harmony",
        f"{HARMONY_THOUGHT}<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        ("", "Why <|not|>?", [ONE]),
    ),
    (
        "harmony",
        ' to=functions.add<|channel|>commentary json<|message|>{"note": "<|end|>"}',
        ("", "", [("add", '{"note": "<|end|>"}')]),
    ),
    (
        "harmony",
        '<|channel|>commentary to=add<|message|>{"a": 1}<|end|><|start|>assistant'
        "<|channel|>final<|message|>Yes.\n<|return|>",
        ("Yes.\n", "", [ONE]),
    ),
    (
        "mistral",
        'Well. [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "123456789"}, '
        '{"name": "now", "arguments": {}}]',
        ("Well.", "", [ONE, ("now", "{}")]),
    ),
    (
        "mistral-args",
        '[THINK]Why not?[/THINK][TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]123[ARGS]{}',
        ("", "Why not?", [ONE, ("now", "{}")]),
    ),
    ("deepseek-v3", f"Well.{D.calls}{V3}\n{V3}{D.calls_end}", ("Well.", "", [ONE, ONE])),
    ("deepseek-v3.1", f"Well.\n{D.calls}{V31}{V31}{D.calls_end}", ("Well.", "", [ONE, ONE])),
    ("deepseek-v3.1", f"{D.calls}{V31}", ("", "", [ONE])),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', ("", "", [ONE])),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; '
        '{"name": "now", "parameters": {}}',
        ("", "", [ONE, ("now", "{}")]),
    ),
]

# Replies that look like calls; all of each is answer.
MALFORMED: list[tuple[str, str]] = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": oops}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}} and more</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "reason": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", "a <tool_call> is a tag, <tool_"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "' + "\\"),
    ("qwen-coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
    ("qwen-coder", "<tool_call>\n<function=add>\n<parameter=note>\n1\n</parameter>\n"),
    ("qwen-coder", "<tool_call><function=add\n></function></tool_call>"),
    (
        "qwen-coder",
        "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>",
    ),
    ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}'),
    ("mistral-args", "[TOOL_CALLS]add{}"),
    ("mistral-args", '[TOOL_CALLS]add[ARGS]{"a": 1,}'),
    ("deepseek-v3", f"{D.calls}{V3.replace('```json', '```yaml')}{D.calls_end}"),
    ("deepseek-v3.1", f"{D.calls}{V31.replace('1}', '1')}{D.calls_end}"),
    ("llama", '{"name": "subtract", "parameters": {"a": 1}}'),
    ("llama", '{"name": "add", "age": 7}'),
    ("llama", '{"name": "add"}'),
    ("llama", '{"name": "add", "parameters": {}} is how it is written'),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", '  I write {"name": "add", "parameters": {}}'),
    ("none", "<think>a</think><tool_call>b</tool_call>"),
]


def of_call(reply: Reply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.content, reply.thought, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize(("name", "text", "wanted"), WELL_FORMED)
@given(cuts=CUTS, streams=st.booleans())
@settings(max_examples=30)
def test_calls_are_found_however_the_text_is_cut(
    name: str,
    text: str,
    wanted: tuple[str, str, list[tuple[str, str]]],
    cuts: list[int],
    streams: bool,
) -> None:
    events = events_of(in_pieces(text, cuts), FAMILIES[name], streams=streams)
    reply = joined(events)
    assert of_call(reply) == wanted
    assert all(isinstance(json.loads(call.arguments), dict) for call in reply.calls)
    assert [call.id for call in reply.calls] == [f"id{i}" for i in range(len(reply.calls))]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
@given(cuts=CUTS)
@settings(max_examples=20)
def test_what_is_no_call_is_all_answer(name: str, text: str, cuts: list[int]) -> None:
    assert joined(events_of(in_pieces(text, cuts), FAMILIES[name])) == Reply(text, "", [])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("name", "text", "wanted"), WELL_FORMED)
def test_no_part_of_a_call_that_was_cut_is_text(
    name: str, text: str, wanted: tuple[str, str, list[tuple[str, str]]], streams: bool
) -> None:
    """Wherever the reply ends, what comes out is the beginning of what the whole one is."""
    for end in range(len(text)):
        events = events_of([text[:end]], FAMILIES[name], is_cut=True, streams=streams)
        content, thought, calls = of_call(joined(events))
        assert wanted[0].startswith(content.rstrip()) and wanted[1].startswith(thought.rstrip())
        whole = calls[:-1] if streams else calls  # the last of a stream may be the beginning of one
        assert whole == wanted[2][: len(whole)]
        for call, right in zip(calls, wanted[2], strict=False):
            assert call[0] == right[0] and right[1].startswith(call[1])
        assert len(calls) <= len(wanted[2])


def test_a_malformed_call_of_harmony_shows_with_its_header() -> None:
    header = "<|channel|>commentary to=functions.add<|message|>"
    text = f"{header}oops<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert joined(events_of(text, FAMILIES["harmony"])) == Reply(f"{header}oopsYes.", "", [])
    call = '<|channel|>final to=functions.add<|message|>{"a": 1}<|end|><|start|>assistant'
    content, _, calls = joined(events_of(call + text, FAMILIES["harmony"]))
    assert (content, len(calls)) == (f"<|end|><|start|>assistant{header}oopsYes.", 1)


PARTS = [
    *(text for _, text, _ in WELL_FORMED),
    *(text for _, text in MALFORMED),
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=note>", "</parameter>", "<think>"),
    *("</think>", "<|channel|>", "<|message|>", " to=functions.add", "[TOOL_CALLS]", "[ARGS]"),
    *(D.calls, D.call, D.separator, D.call_end, D.calls_end, "<|python_tag|>", "```json", "\n"),
    *('{"name": "add", ', '"arguments": {', '"parameters": {', '"a": ', "1", "}", "[", '"', "\\u1"),
]


@pytest.mark.parametrize("name", FAMILIES)
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=8), cuts=CUTS,
       streams=st.booleans(), in_thought=st.booleans(), end=st.integers(0, 400),
       is_cut=st.booleans())  # fmt: skip
@settings(max_examples=150, deadline=None)
@pytest.mark.sample(4)
def test_no_cut_of_any_reply_changes_it(
    name: str,
    parts: list[str],
    cuts: list[int],
    streams: bool,
    in_thought: bool,
    end: int,
    is_cut: bool,
) -> None:
    """Hostile and truncated replies come out the same in pieces, whole and letter by letter."""
    text = "".join(parts)[: end or None]
    family = FAMILIES[name]
    options = {"streams": streams, "in_thought": in_thought and family.thought is not None}
    options["is_cut"] = is_cut
    ways = (in_pieces(text, cuts), [text], list(text))
    replies = [joined(events_of(pieces, family, **options)) for pieces in ways]
    assert replies[0] == replies[1] == replies[2]
    if not streams:
        assert all(isinstance(json.loads(call.arguments), dict) for call in replies[0].calls)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("harmony", "none")])
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=8))
@settings(max_examples=100)
def test_nothing_is_lost_where_nothing_is_a_call(name: str, parts: list[str]) -> None:
    text = "x" + "".join(parts)  # a thought begins a reply
    reply = joined(events_of([text], FAMILIES[name]))
    assert reply.calls or reply == Reply(text, "", [])


def test_an_argument_shows_before_the_call_is_whole() -> None:
    parser = ReplyParser(FAMILIES["hermes"], TOOLS, streams=True)
    parser.feed('<tool_call>{"name": "add", "arguments": {"note": "be')
    assert parser.feed("gin") == [ToolCallArguments(0, "gin")]
    parser = ReplyParser(FAMILIES["qwen-coder"], TOOLS, streams=True)
    parser.feed("<tool_call><function=add><parameter=note>be")
    assert parser.feed("gin\n") == [ToolCallArguments(0, "gin")]


def test_a_streamed_call_that_breaks_ends_there_and_the_rest_is_answer() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    reply = joined(events_of(text, FAMILIES["hermes"], streams=True))
    assert reply == Reply("oops}}</tool_call>", "", [Call("id0", "add", '{"a": ', True)])


@pytest.mark.parametrize(
    ("name", "before", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": ', '{"a": 1}', "} and </tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ', '{"a": "', "\\uD8"),
        ("llama", '{"name": "add", "parameters": ', '{"a": 1}', "} is a call"),
        ("mistral-args", "[TOOL_CALLS]add[ARGS]", '{"a": [', "1, }"),
        ("deepseek-v3.1", f"{D.calls}{D.call}add{D.separator}", '{"a": 1}', f"\n.{D.calls_end}"),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=20)
def test_nothing_is_lost_of_a_streamed_call_that_breaks(
    name: str, before: str, arguments: str, rest: str, cuts: list[int]
) -> None:
    pieces = in_pieces(before + arguments + rest, cuts)
    content, _, (call,) = joined(events_of(pieces, FAMILIES[name], streams=True))
    given, got = arguments + rest, call.arguments + content
    assert call.arguments.startswith(arguments)
    assert got == given or got == given.replace("\n", "")  # blanks at a call are form


def test_text_before_any_mark_is_not_held_back() -> None:
    parser = ReplyParser(FAMILIES["hermes"], TOOLS)
    assert parser.feed("a <b") == [Content("a <b")]
    assert parser.feed("<tool") == []
    assert parser.feed("x") == [Content("<toolx")]


@pytest.mark.parametrize(("name", "text", "wanted"), WELL_FORMED)
def test_without_tools_nothing_is_a_call(
    name: str, text: str, wanted: tuple[str, str, list[tuple[str, str]]]
) -> None:
    content, thought, calls = joined(events_of([text], FAMILIES[name], tools=[]))
    assert (calls, thought if name != "harmony" else wanted[1]) == ([], wanted[1])
    assert content in text
    assert name == "harmony" or len(content) > len(wanted[0])  # the call as it was written


def test_a_thought_that_the_template_opened_ends_in_the_reply() -> None:
    for pieces in ("Why not?\n</think>\n\nYes.", ["Why not?\n", "</think>\n\nYes."]):
        events = events_of(pieces, FAMILIES["hermes"], in_thought=True)
        assert joined(events) == Reply("Yes.", "Why not?", [])
    assert joined(events_of("Why", FAMILIES["hermes"], in_thought=True)) == Reply("", "Why", [])


def test_a_mark_of_thoughts_inside_an_answer_is_text() -> None:
    text = "Use <think> and </think>."
    assert joined(events_of(text, FAMILIES["hermes"])) == Reply(text, "", [])


def test_the_prompt_tells_whether_the_template_opened_a_thought() -> None:
    family = FAMILIES["hermes"]
    assert family.begins_in_thought("<|im_start|>assistant\n<think>\n")
    assert not family.begins_in_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not FAMILIES["harmony"].begins_in_thought("<think>")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "true", "true"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "-5e3", -5000),
        ({"type": "number"}, "many", "many"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "number"]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"type": "object"}, '{\n"a": 1}', {"a": 1}),
        ({}, "5", 5),
        ({}, '"5"', '"5"'),
        ({}, " two\nlines ", " two\nlines "),
        (None, "[1", "[1"),
    ],
)
def test_a_value_between_tags_has_the_type_of_its_schema(
    schema: object, text: str, value: object
) -> None:
    reply = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"
    events = events_of([reply], FAMILIES["qwen-coder"], tools=[tool("f", x=schema)])
    assert json.loads(joined(events).calls[0].arguments) == {"x": value}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<zip>5</zip><tags><tag>7</tag></tags>", {"zip": "5", "tags": ["7"]}),
        ("<zip></zip><tags></tags><x>NaN</x>", {"zip": "", "tags": [], "x": "NaN"}),
        ("<x><item>5</item><item>true</item></x>", {"x": [5, True]}),
        ("<x><x>1</x><y>None</y></x>", {"x": {"x": 1, "y": None}}),
        ("<zip><x>5</x></zip>", {"zip": "<x>5</x>"}),
        ("<zip>5</zip> and", "<zip>5</zip> and"),
        ("<x>" * 60 + "</x>" * 60, "<x>" * 60 + "</x>" * 60),
    ],
)
def test_elements_have_the_types_that_references_lead_to(text: str, value: object) -> None:
    tags: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/Tag"}}
    place: Any = {"type": "object", "properties": {"zip": {"$ref": "#/$defs/Tag"}, "tags": tags}}
    where = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
    defs = {"Tag": {"type": "string"}, "Place": place}
    parameters = {"properties": {"where": where}, "$defs": defs}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    reply = f"<|do|><name>f</name><where>{text}</where><|done|>"
    (call,) = joined(events_of([reply], FAMILIES["elements"], tools=tools)).calls
    assert json.loads(call.arguments) == {"where": value}


@pytest.mark.parametrize("streams", [False, True])
def test_hostile_replies_take_time_by_their_length(streams: bool) -> None:
    for text in (
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 20_000 + "]" * 20_000 + "}}",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 40_000 + "}}",
        '<tool_call>{"a":"' * 3_000,
        "<tool_call>" * 4_000,
        "\n" * 40_000,
        "<function=add><parameter=note>" + "</parameter>" * 4_000,
    ):
        began = time.perf_counter()
        joined(events_of(in_pieces(text, range(0, 50_000, 4)), FAMILIES["qwen-coder"],
                         streams=streams))  # fmt: skip
        assert time.perf_counter() - began < 5


def test_ids_are_random() -> None:
    first, second = random_call_id(), random_call_id()
    assert first != second and first.startswith("call_") and int(first[5:], 16)


def test_a_reply_of_harmony_in_a_chat_has_no_calls() -> None:
    """The command `chat` offers no tools: what commentary says shows as a thought."""
    text = (
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|end|>'
        "<|start|>assistant<|channel|>final<|message|>2"
    )
    assert joined(events_of(text, FAMILIES["harmony"], tools=[])) == Reply("2", '{"a": 1}', [])
    for bare, wanted in (("<|message|>bare", "bare"), ("<|channel|>analysis", ""), ("", "")):
        assert joined(events_of(bare, FAMILIES["harmony"], tools=[])) == Reply(wanted, "", [])


def test_thoughts_show_without_tools() -> None:
    family = ToolFamily(ReplyForm(THINK))
    assert joined(events_of("<think>a</think>b", family, tools=[])) == Reply("b", "a", [])


@pytest.mark.parametrize("pieces", [["\n"], [" ", "\n"], ["\n", "a", " \n"]])
def test_blanks_are_answer_where_a_model_writes_nothing_else(pieces: list[str]) -> None:
    parser = ReplyParser(ToolFamily(), TOOLS)
    found = [*(each for piece in pieces for each in parser.feed(piece)), *parser.finish()]
    assert "".join(each.text for each in found if isinstance(each, Content)) == "".join(pieces)
