"""This module reads values that are elements named by their keys, as XML has them.

    <where><lat>1.5</lat><names><item>Oslo</item></names></where>

The marks around names are those of the arguments themselves (`PairForm`).
"""

from __future__ import annotations

import json
from typing import Any

from vkmoe.generate.tools.forms import KEY, PairForm
from vkmoe.generate.tools.json_text import json_of
from vkmoe.generate.tools.schemas import ParameterSchemas

_MAX_DEPTH = 50  # of elements inside elements; deeper ones are a text


class Elements:
    """Reads the inside of an element as JSON, by the schema of its value."""

    def __init__(self, pairs: PairForm, schemas: ParameterSchemas) -> None:
        self._schemas = schemas
        self._open = pairs.open.strip()
        self._open_end = pairs.middles[0][0].strip()
        self._close, self._close_end = pairs.close.strip().split(KEY)

    def json(self, text: str, schema: object) -> str:
        """Return the JSON of `text`, which is a text where it is no elements."""
        try:
            value = self._value(text, schema, 0)
        except ValueError:
            value = text
        return json.dumps(value, ensure_ascii=False)

    def _value(self, text: str, schema: object, depth: int) -> Any:
        types, body = self._schemas.allowed(schema).types, text.strip()
        nested = types & {"array", "object"}
        if types == {"string"} or not (body.startswith(self._open) or (nested and not body)):
            return json.loads(json_of(text, types))
        if depth > _MAX_DEPTH:
            raise ValueError(body)
        found, at = list[tuple[str, str]](), 0
        while at < len(body):
            key, inner, at = self._element(body, at)
            found.append((key, inner))
        is_list = all(key == "item" for key, _ in found) if len(nested) != 1 else "array" in nested
        if is_list:
            items = self._schemas.inside(schema, "items")
            return [self._value(inner, items, depth + 1) for _, inner in found]
        properties = self._schemas.inside(schema, "properties")
        return {key: self._value(each, properties.get(key), depth + 1) for key, each in found}

    def _element(self, text: str, at: int) -> tuple[str, str, int]:
        """Return the key and the inside of the element at `at`, and where it ends."""
        begin = at + len(self._open)
        end = text.find(self._open_end, begin)
        if not text.startswith(self._open, at) or end < 0:
            raise ValueError(text)
        key, inside = text[begin:end], end + len(self._open_end)
        first, last = f"{self._open}{key}{self._open_end}", self._close + key + self._close_end
        place, n_open = inside, 1
        while n_open:
            close = text.find(last, place)
            if close < 0:
                raise ValueError(text)
            n_open += text.count(first, place, close) - 1
            place = close + len(last)
        rest = text[place:]
        return key, text[inside:close], place + len(rest) - len(rest.lstrip())
