"""What becomes of the fields of requests: done, refused by name, or without effect on an answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import httpx
import pytest

from tests.server.conftest import Served
from vkmoe.server.api.chat import ChatFields
from vkmoe.server.api.completions import CompletionFields
from vkmoe.server.api.embeddings import EmbeddingFields
from vkmoe.server.api.messages import _CountFields, _MessageFields
from vkmoe.server.api.responses import _ResponseFields
from vkmoe.server.fields import Body
from vkmoe.server.forms import FormFields
from vkmoe.server.known_fields import NO_EFFECT, REFUSED

FILE = Path(__file__).resolve().parents[1] / "fixtures" / "api_fields.json"  # make_api_fields.py
PUBLISHED: dict[str, list[str]] = json.loads(FILE.read_text())["fields"]
BODIES: dict[str, type[Body]] = {
    "chat": ChatFields,
    "completions": CompletionFields,
    "responses": _ResponseFields,
    "messages": _MessageFields,
    "count_tokens": _CountFields,
    "embeddings": EmbeddingFields,
}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
)
MESSAGE = {"role": "user", "content": "def main():"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [MESSAGE], "max_tokens": 12, "temperature": 0},
    COMPLETIONS: {"prompt": "def main():", "max_tokens": 12, "temperature": 0},
    RESPONSES: {"input": "def main():", "max_output_tokens": 12, "temperature": 0},
    MESSAGES: {"messages": [MESSAGE], "max_tokens": 12, "temperature": 0},
}


def paths_done(body: type[Body], before: str = "") -> set[str]:
    """The paths of fields that a body has, those of bodies inside included."""
    found = set()
    hints = get_type_hints(body, include_extras=True)
    for name, field in body.model_fields.items():
        path = f"{before}{field.alias or name}"
        inner = list(bodies_in(hints[name]))
        found |= {path} if inner else {path, f"{path}.*"}  # what no body describes is read by hand
        for each in inner:
            found |= paths_done(each, f"{path}.")
    return found


def bodies_in(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Body):
        yield hint
    if get_origin(hint) in (Union, UnionType, list, Annotated):
        for part in get_args(hint):
            yield from bodies_in(part)


@pytest.mark.parametrize("api", BODIES)
def test_no_published_field_is_ignored(api: Any) -> None:
    """Each is done, refused or without effect, alone or with all that is around it or in it."""
    done = paths_done(BODIES[api])
    stated = REFUSED[api].keys() | NO_EFFECT[api]
    assert BODIES[api].api == api and not stated & done, "a field has one fate"
    assert not REFUSED[api].keys() & NO_EFFECT[api]

    def has_fate(path: str) -> bool:
        names = path.split(".")
        ways = [".".join(names[:n]) for n in range(1, len(names) + 1)]
        if path in done or any(way in stated or f"{way}.*" in done for way in ways):
            return True
        inner = [each for each in PUBLISHED[api] if each.startswith(f"{path}.")]
        return bool(inner) and all(map(has_fate, inner))

    assert [path for path in PUBLISHED[api] if not has_fate(path)] == []


def reply(served: Served, path: str, **more: Any) -> str:
    """The text of an answer, thoughts and calls aside."""
    answer = served.post(path, {**LEAST[path], **more})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path == MESSAGES:
        return "".join(block["text"] for block in found["content"])
    if path == RESPONSES:
        return "".join(item["content"][0]["text"] for item in found["output"])
    choice = found["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"function_call": {"name": "f"}}, "function_call"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"min_tokens": 5}, "min_tokens"),
        (CHAT, {"include_reasoning": False}, "include_reasoning"),
        (CHAT, {"reasoning_format": "none"}, "reasoning_format"),
        (COMPLETIONS, {"add_special_tokens": False}, "add_special_tokens"),
        (COMPLETIONS, {"t_max_predict_ms": 10}, "t_max_predict_ms"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [MESSAGE, {**MESSAGE, "audio": {"id": "a"}}]}, "messages.1.audio"),
        (CHAT, {"n_predict": 13}, "n_predict"),
        (CHAT, {"max_completion_tokens": 13}, "max_tokens"),
        (CHAT, {"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, None),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"n_predict": 3}, "n_predict"),
        (COMPLETIONS, {"guided_json": "{"}, "guided_json"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"conversation": "c"}, "conversation"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"n": 2}, "n"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        (RESPONSES, {"input": [{"role": "wizard", "content": "x"}]}, "input.0.role"),
        (MESSAGES, {"mcp_servers": [{"name": "m", "url": "u"}]}, "mcp_servers"),
        (MESSAGES, {"container": "c"}, "container"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(
    server: Served, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = server.post(path, {**LEAST[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (param or "continue_final_message") in error["message"] + str(error.get("param"))
    if path != MESSAGES and param is not None and error["code"] == "unsupported_parameter":
        assert error["param"] == param


@pytest.mark.parametrize("name", FormFields.model_fields)
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_form_by_the_name_of_another_api_is_refused(server: Served, path: str, name: str) -> None:
    answer = server.post(path, {**LEAST[path], name: {"type": "json_object"}})
    assert answer.status_code == 400 and f"{name} is not supported" in answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"modalities": ["text"], "function_call": "auto", "functions": [], "n": 1}),
        (CHAT, {"user": "u", "store": True, "metadata": {"a": "b"}, "n_predict": 12}),
        (COMPLETIONS, {"suffix": "", "best_of": 1, "audio": None}),
        (CHAT, {"include_reasoning": True, "reasoning_format": "auto", "n_indent": 0}),
        (RESPONSES, {"grammar": "", "response_format": {"type": "text"}, "json_schema": None}),
        (RESPONSES, {"background": False, "truncation": "disabled", "include": []}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "store": True}),
        (MESSAGES, {"mcp_servers": [], "metadata": {"user_id": "u"}, "container": None}),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        ),
    ],
)
def test_what_asks_for_nothing_changes_nothing(
    server: Served, path: str, fields: dict[str, Any]
) -> None:
    assert reply(server, path, **fields) == reply(server, path)


SCHEMA = {"enum": ["one", "two"]}
JSON_FORM = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"json_schema": SCHEMA}, ('"one"', '"two"')),
        ({"guided_json": SCHEMA}, ('"one"', '"two"')),
        ({"guided_json": json.dumps(SCHEMA)}, ('"one"', '"two"')),
        ({"structured_outputs": {"json": SCHEMA}}, ('"one"', '"two"')),
        ({"response_format": {**JSON_FORM, "json_schema": {"schema": SCHEMA}}}, ('"one"', '"two"')),
        ({"grammar": 'root ::= "a/" | [0-9]{3}'}, ("a/", *(f"{n:03}" for n in range(1000)))),
        ({"guided_grammar": 'start: "b" "c"'}, ("bc",)),
        ({"structured_outputs": {"grammar": 'root ::= "xy"'}}, ("xy",)),
        ({"guided_regex": "a/b|c\\/d"}, ("a/b", "c/d")),
        ({"structured_outputs": {"regex": "[pq]{2}"}}, ("pp", "pq", "qp", "qq")),
        ({"guided_choice": ["né", 'quo"te']}, ("né", 'quo"te')),
        ({"structured_outputs": {"choice": ["yes"]}}, ("yes",)),
    ],
)
def test_a_form_has_many_names(
    server: Served, path: str, fields: dict[str, Any], texts: tuple[str, ...]
) -> None:
    assert reply(server, path, **fields).strip() in texts


def test_a_message_has_the_form_of_its_output_config(server: Served) -> None:
    config = {"format": JSON_FORM, "effort": "low"}
    assert reply(server, MESSAGES, output_config=config).strip() in ('"one"', '"two"')


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("text", ["    return [x for", "end", "a "])
def test_a_reply_goes_on_with_the_last_message(server: Served, path: str, text: str) -> None:
    """What it says is what the model writes behind the prompt that ends there."""
    messages = [MESSAGE, {"role": "assistant", "content": text}]
    more = {"continue_final_message": True} if path == CHAT else {}
    prompt = server.post("/apply-template", {"messages": messages, "continue_final_message": True})
    written = prompt.json()["prompt"]
    assert written.endswith(text)
    assert reply(server, path, messages=messages, **more) == reply(
        server, COMPLETIONS, prompt=written
    )


def test_only_a_text_of_the_assistant_can_go_on(server: Served) -> None:
    answer = server.post(CHAT, {**LEAST[CHAT], "continue_final_message": True})
    assert answer.status_code == 400 and "continue_final_message" in answer.text


def test_tools_that_are_no_functions_are_left_out_of_the_answer(server: Served) -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    asked = {**LEAST[RESPONSES], "tools": [{"type": "web_search_preview"}, function]}
    assert server.post(RESPONSES, asked).json()["tools"] == [function]
    only: httpx.Response = server.post(
        RESPONSES,
        {**asked, "tools": asked["tools"][:1], "tool_choice": "required"},
    )
    assert only.status_code == 400 and "tool" in only.text


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 2, "mirostat_tau": 1.0},
        {"typical_p": 0.1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
        {"dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    ],
)
def test_samplers_change_a_reply_the_same_way_each_time(
    server: Served, fields: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    body |= {"max_tokens": 40, "prompt": "x = [1, 2, 3, 4]\nx = [1, 2, 3,"}
    plain, first, again = (
        reply(server, COMPLETIONS, **body, **more) for more in ({}, fields, fields)
    )
    assert first == again != plain
