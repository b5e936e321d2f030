"""This module brings messages and tools of OpenAI's API into forms that chat templates take.

It owns what the API allows and templates do not: contents in parts, empty fields, arguments of
calls as a JSON text, ids of any length. It does not own the templates (template.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vkmoe.errors import PromptError
from vkmoe.generate.chat.unwritten import Calls

Message = Mapping[str, Any]
RESERVED = frozenset(("messages", "add_generation_prompt", "self"))  # of a template's names
_KEPT = ("name", "tool_calls", "tool_call_id")  # of a message's fields, where they hold something


class MessageForm(NamedTuple):
    """Says what is special about the messages that a template takes."""

    text_arguments: bool = False  # of calls, as a JSON text in place of an object
    bare_calls: bool = False  # whose content is none, not an empty text
    short_ids: bool = False  # of calls: nine letters and digits
    thinking: bool = False  # thoughts are "thinking"
    one_text: bool = False  # a call has thoughts or a text beside it, not both
    writer: Callable[[Calls], str] | None = None  # calls are part of the content


def check_messages(messages: object) -> None:
    """Raise PromptError for anything but a list of messages that have a role."""
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for message in messages
    ):
        raise PromptError(
            "messages is no list of messages",
            'it is such as [{"role": "user", "content": "Hello"}]',
        )


def given_message(message: Message) -> dict[str, Any]:
    """Return the fields of a message that templates know, each by its one name.

    Developers are systems there, and "reasoning" is another name of "reasoning_content".
    """
    role, content = message["role"], message.get("content")
    found = {
        "role": "system" if role == "developer" else role,
        "content": content if content is not None else "",
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
    }
    found |= {name: message.get(name) for name in _KEPT}
    return {key: value for key, value in found.items() if value or key == "content"}


def prepared_messages(messages: Sequence[Message], form: MessageForm) -> list[dict[str, Any]]:
    """Return `messages` in a template's form.

    Raises PromptError for parts that are no text and for arguments that are no JSON object.
    """
    ready = [_prepared(message, form) for message in messages]
    return [each for message in ready for each in _bare(message)] if form.bare_calls else ready


def prepared_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Return `tools` for a template, None for no tools.

    Raises PromptError for what is no list of objects.
    """
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise PromptError("the tools are no list of objects", "see OpenAI's API")
    return list(tools)


def names_of_fussy_templates(tools: list[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return names for a template that fails with the usual ones.

    Some need a list where there are no tools, a description of each tool, or the types of what is
    inside objects and arrays; Firefunction needs its tools as a text.
    """
    functions = [tool.get("function", tool) for tool in tools or []]
    return {
        "tools": [_completed(tool) for tool in tools or []],
        "functions": json.dumps(functions, indent=2) if functions else "",
    }


def _completed(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    given = {"description": "", **{k: v for k, v in function.items() if v is not None}}
    return {**tool, "function": {**given, "parameters": _typed(given.get("parameters", {}))}}


def _typed(schema: Any) -> Any:
    """Return a schema that says what is in each object and array, and describes properties."""
    if not isinstance(schema, Mapping):
        return schema
    inner = {"object": "additionalProperties", "array": "items"}.get(str(schema.get("type")))
    given = {inner: {}, **schema} if inner else dict(schema)
    for key in ("items", "additionalProperties"):
        given |= {key: _typed(given[key])} if key in given else {}
    properties = given.get("properties")
    if isinstance(properties, Mapping):
        described = {name: _typed(value) for name, value in properties.items()}
        given["properties"] = {
            name: {"description": "", **value} if isinstance(value, dict) else value
            for name, value in described.items()
        }
    return given


def _prepared(message: Message, form: MessageForm) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    ready = {**given, "content": _joined(given.get("content", ""))}
    calls = ready.pop("tool_calls", None)
    if calls:
        ready["tool_calls"] = [_prepared_call(call, form) for call in calls]
        if form.writer is not None and isinstance(ready["content"], str):
            functions = [call["function"] for call in ready.pop("tool_calls")]
            ready["content"] += form.writer(functions)
    if form.short_ids and "tool_call_id" in ready:
        ready["tool_call_id"] = _short_id(str(ready["tool_call_id"]))
    if form.thinking and ready.get("reasoning_content"):
        ready.setdefault("thinking", ready["reasoning_content"])
    if form.one_text and calls and ready.get("thinking") and ready["content"]:
        ready["thinking"] += "\n\n" + ready["content"]
        ready["content"] = ""
    return ready


def _bare(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message, in two if it has both calls and a text: the text comes first."""
    if "tool_calls" not in message:
        return [message]
    calls = {**message, "content": None}
    if not message["content"]:
        return [calls]
    return [{key: value for key, value in message.items() if key != "tool_calls"}, calls]


def _joined(content: object) -> object:
    """Join a content that is a list of parts, line by line; others stay."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise PromptError(
                f"a message has a part that is no text: {str(kind)[:40]!r}",
                "vkmoe reads texts only; give parts of the type 'text'",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _prepared_call(call: Any, form: MessageForm) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise PromptError("a tool call of an earlier message has no function", "see OpenAI's API")
    function = dict(call["function"])
    arguments = _as_object(function.get("arguments"))
    function["arguments"] = arguments
    if form.text_arguments:
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    ready = {**call, "function": function}
    if form.short_ids:
        ready["id"] = _short_id(str(call.get("id", "")))
    return ready


def _as_object(arguments: object) -> Mapping[str, Any]:
    """Return the arguments of a call, which the API has as a JSON text; no text is none."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PromptError(
            f"the arguments of a tool call are no JSON object: {str(arguments)[:40]!r}",
            "give back what the reply had, a JSON object as a text",
        )
    return value


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits: the same one, or one made of it."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
