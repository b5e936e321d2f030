"""This module says what values the schemas of a tool's parameters allow, references followed.

It owns what a value's form between tags depends on: its types, and the values if they are listed.
What else a schema asks for is the subject of the grammar's package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

_MAX_DEPTH = 50  # of schemas inside schemas; deeper ones count as any value


class Allowed(NamedTuple):
    """Says what values a schema allows. An empty field: the schema does not say.

    `types` are names of JSON types, with "integer" beside "number". `choices` are all values there
    are, as JSON texts.
    """

    types: frozenset[str] = frozenset()
    choices: tuple[str, ...] = ()


class ParameterSchemas:
    """Reads the schemas inside one tool's `parameters`, to whose parts `$ref` leads.

    Every schema is read once, so the time grows with the length of the parameters.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        self._found: dict[int, Allowed] = {}  # by the id of a schema, which the root keeps alive
        self.properties = self.inside(parameters, "properties")
        self.required = self.required_of(parameters)

    def parameter(self, name: str) -> Allowed:
        """Return what values the parameter `name` may have."""
        return self.allowed(self.properties.get(name))

    def alone(self, name: str) -> Mapping[str, Any]:
        """Return the schema of the parameter `name` with the definitions it may refer to."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return shared | {**mapping(self.properties[name])}

    def allowed(self, schema: object) -> Allowed:
        """Return what values a schema allows that is a part of the parameters."""
        return self._of(schema, 0)

    def inside(self, schema: object, key: str) -> Mapping[str, Any]:
        """Return what a schema has as `key`, which is an object, or a schema that it leads to."""
        return mapping(self._first(schema, key))

    def required_of(self, schema: object) -> list[Any]:
        """Return the names of the properties that a value of a schema must have."""
        return _list(self._first(schema, "required"))

    def _first(self, schema: object, key: str) -> object:
        """Return what a schema has as `key`, or the first that it leads to and that has it."""
        schemas, seen = [schema], set[int]()
        for each in schemas:  # which grow meanwhile
            if not isinstance(each, Mapping) or id(each) in seen:
                continue
            if each.get(key):
                return each[key]
            seen.add(id(each))
            schemas.append(self._at(each.get("$ref")))
            for combined in ("allOf", "anyOf", "oneOf"):
                schemas += _list(each.get(combined))
        return None

    def _of(self, schema: object, depth: int) -> Allowed:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return Allowed()
        if id(schema) not in self._found:
            self._found[id(schema)] = Allowed()  # a schema that leads to itself says nothing by it
            self._found[id(schema)] = self._read(schema, depth + 1)
        return self._found[id(schema)]

    def _read(self, schema: Mapping[str, Any], depth: int) -> Allowed:
        parts = [_own(schema)]
        if "$ref" in schema:
            parts.append(self._of(self._at(schema["$ref"]), depth))
        parts += [self._of(each, depth) for each in _list(schema.get("allOf"))]
        for key in ("anyOf", "oneOf"):
            if options := _list(schema.get(key)):
                parts.append(_either([self._of(each, depth) for each in options]))
        return reduce(_both, parts)

    def _at(self, reference: object) -> object:
        """Return what stands at a JSON pointer (RFC 6901) in the parameters; None for nothing."""
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            return None
        place: object = self._root
        for step in unquote(reference).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            place = place.get(key) if isinstance(place, Mapping) else None
        return place


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function that a tool in the form of OpenAI's API describes."""
    return mapping(tool.get("function", tool))


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value that should be an object; where it is none, an empty one."""
    return value if isinstance(value, Mapping) else {}


def kind_of(value: str) -> str:
    """Return the JSON type of a valid JSON text; a number is "integer" where it has digits only."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean"}
    if value[0] in kinds:
        return kinds[value[0]]
    if value[0] == "n":
        return "null"
    return "integer" if value.lstrip("-").isdigit() else "number"


def _own(schema: Mapping[str, Any]) -> Allowed:
    """Return what a schema says by itself."""
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(map(str, _list(given)))
    if "number" in types:
        types.add("integer")
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if not values and types == {"null"}:
        values = [None]
    return _both(Allowed(frozenset(types)), _one_of(values))


def _one_of(values: Sequence[Any]) -> Allowed:
    """Return what a list of values allows; a list with objects or arrays has types only."""
    types, choices = set[str](), list[str]()
    for value in values:
        if isinstance(value, Mapping | list):
            types.add("object" if isinstance(value, Mapping) else "array")
        else:
            choices.append(json.dumps(value, ensure_ascii=False))
    kinds = frozenset(types.union(map(kind_of, choices)))
    return Allowed(kinds, () if types else tuple(choices))


def _both(first: Allowed, second: Allowed) -> Allowed:
    """Return what two schemas allow that must both hold."""
    types = first.types & second.types or first.types | second.types
    choices = first.choices or second.choices
    if first.choices and second.choices:
        others = set(second.choices)
        choices = tuple(each for each in choices if each in others)
    choices = tuple(each for each in choices if kind_of(each) in types)
    return Allowed(types, choices)


def _either(options: Sequence[Allowed]) -> Allowed:
    """Return what schemas allow of which one must hold."""
    types = [option.types for option in options]
    choices = [option.choices for option in options]
    return Allowed(
        frozenset().union(*types) if all(types) else frozenset(),
        tuple(dict.fromkeys(chain.from_iterable(choices))) if all(choices) else (),
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
