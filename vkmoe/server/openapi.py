"""Describes the answers of a server as an OpenAPI 3.1 document.

Each answer says with `described` what it reads and sends; its docstring is its summary. Schemas
come from the pydantic models that read requests, and from the types in api/shapes.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from vkmoe.server.api.shapes import ErrorShape, TextErrorShape
from vkmoe.server.errors import OLLAMA

Answer = TypeVar("Answer", bound=Callable[..., Any])
Route = tuple[str, str, Callable[..., Any]]  # method, path, answer
Object = dict[str, Any]

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
_ERRORS = {
    400: "The request makes no sense, or cannot be met.",
    401: "The key is missing or wrong.",
    403: "The request names another server, or comes from a page of another site.",
    404: "There is nothing of this name.",
    413: "The body is too large.",
    500: "The reply failed.",
    501: "This server does not do that.",
    503: "The model is not there, busy, or too slow; Retry-After, if any, says when to try again.",
}
_ALWAYS = (401, 403)
_WITH_BODY = (400, 413)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


@dataclass(frozen=True)
class _Description:
    """Holds what one answer says of itself."""

    sends: Any
    body: type[BaseModel] | None
    query: type[BaseModel] | None
    media_types: tuple[str, ...]
    statuses: tuple[int, ...]


_DESCRIBED: dict[Callable[..., Any], _Description] = {}


def described(
    sends: Any,
    *,
    body: type[BaseModel] | None = None,
    query: type[BaseModel] | None = None,
    media_types: tuple[str, ...] = (JSON,),
    statuses: tuple[int, ...] = (503,),
) -> Callable[[Answer], Answer]:
    """Say of an answer what type it sends as JSON, and what models its body and query are.

    `statuses` are those of its errors, besides what every request may be refused with.
    """

    def note(answer: Answer) -> Answer:
        more = _WITH_BODY if body is not None else (400,) if query is not None else ()
        known = tuple(sorted({*_ALWAYS, *more, *statuses}))
        _DESCRIBED[answer] = _Description(sends, body, query, media_types, known)
        return answer

    return note


def document(routes: Iterable[Route], version: str, open_paths: Collection[str]) -> Object:
    """Return the document for routes; those whose answers are not described are left out.

    `open_paths` need no key.
    """
    schemas: Object = {}
    for kind in (ErrorShape, TextErrorShape):
        _schema(kind, kind.__name__, schemas, "serialization")
    paths: Object = {}
    for method, path, answer in routes:
        if (found := _DESCRIBED.get(answer)) is not None:
            plain = re.sub(r"\{(\w+):path\}", r"{\1}", path)
            operation = _operation(method, plain, answer, found, schemas)
            if path in open_paths:
                operation["security"] = []
                del operation["responses"]["401"]
            paths.setdefault(plain, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "vkmoe", "version": version},
        "security": [{}, *({name: []} for name in _KEYS)],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
    }


def _operation(
    method: str, path: str, answer: Callable[..., Any], found: _Description, schemas: Object
) -> Object:
    """Describe one method of a path. Mutates `schemas`: what its own refer to."""
    sent = _schema(found.sends, f"{answer.__name__}.sent", schemas, "serialization")
    streamed = (EVENTS, LINES)
    content = {kind: {} if kind in streamed else {"schema": sent} for kind in found.media_types}
    answers: Object = {"200": {"description": "The answer.", "content": content}}
    for status in found.statuses:
        answers[str(status)] = {"description": _ERRORS[status], "content": _error(path)}
    operation: Object = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": " ".join((answer.__doc__ or "").split("\n\n")[0].split()),
        "parameters": [*_in_path(path), *_in_query(found.query)],
        "responses": answers,
    }
    if found.body is not None:
        schema = _schema(found.body, answer.__name__, schemas, "validation")
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


def _error(path: str) -> Object:
    kind = TextErrorShape if path.startswith(OLLAMA) else ErrorShape
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _in_path(path: str) -> list[Object]:
    found = re.findall(r"\{(\w+)\}", path)
    text = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": text} for name in found]


def _in_query(model: type[BaseModel] | None) -> list[Object]:
    fields = model.model_json_schema()["properties"] if model is not None else {}
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]


def _schema(kind: Any, owner: str, schemas: Object, mode: Any) -> Object:
    """Return a reference to the schema of a type. Mutates `schemas`, which get it."""
    schemas[owner] = TypeAdapter(kind).json_schema(mode=mode, ref_template=_place(owner))
    return _lift(schemas, owner)


def _lift(schemas: Object, owner: str) -> Object:
    """Put what a schema defines beside it, as documents want it. Mutates. Return its reference."""
    for name, schema in schemas[owner].pop("$defs", {}).items():
        schemas[f"{owner}.{name}"] = schema
    return {"$ref": f"#/components/schemas/{owner}"}


def _place(owner: str) -> str:
    return f"#/components/schemas/{owner}.{{model}}"
