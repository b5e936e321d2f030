"""Reads what form a reply is to have: all names that a form has in APIs.

`response_format` is OpenAI's, `json_schema` and `grammar` are llama-server's, `guided_...` and
`structured_outputs` vLLM's.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from vkmoe.generate.form import Form, FormKind
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Many


class _Schema(Body):
    form: dict[str, Any] | bool = Field(default=True, alias="schema")


class _ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")  # as llama-server has it

    def wanted(self) -> Form | None:
        """Return the form of the reply; None: it may have any. Raises ApiError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Form("json", self.form or {"type": "object"})
        if self.json_schema is None:
            raise ApiError(400, "a json_schema is missing", param="response_format.json_schema")
        return Form("json", self.json_schema.form)


class _StructuredOutputs(Body):
    json_form: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Many[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None


class FormFields(Body):
    """Describes the fields by which a request says what form its reply has, each with one name."""

    response_format: _ResponseFormat | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = None
    structured_outputs: _StructuredOutputs | None = None

    def form(self) -> Form | None:
        """Return the form of the reply; None: it may have any. Raises ApiError for two of them."""
        found: dict[str, Form] = {}
        if self.response_format and (form := self.response_format.wanted()):
            found["response_format"] = form
        outputs = self.structured_outputs or _StructuredOutputs()
        if outputs.json_object:
            found["structured_outputs.json_object"] = Form("json", {"type": "object"})
        values: tuple[tuple[str, FormKind, Any], ...] = (
            ("json_schema", "json", self.json_schema),
            ("grammar", "grammar", self.grammar or None),
            ("guided_json", "json", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("structured_outputs.json", "json", outputs.json_form),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
        )
        for name, kind, value in values:
            if value is not None:
                found[name] = Form(kind, _schema(value, name) if kind == "json" else value)
        if len(found) > 1:
            first, second, *_ = found
            raise ApiError(400, f"{first} and {second} are two forms of one reply", param=second)
        return next(iter(found.values()), None)


def _schema(value: Any, name: str) -> Any:
    """Return a schema, which may be written as a text. Raises ApiError."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict | bool):
        raise ApiError(400, f"{name} is no JSON schema", param=name)
    return found
