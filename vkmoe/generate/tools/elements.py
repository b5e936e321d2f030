"""This module reads values that are elements named by their keys, as XML has them.

    <where><lat>1.5</lat><names><item>Oslo</item></names></where>

The marks around names are those of the arguments themselves (`PairForm`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vkmoe.generate.tools.forms import KEY, PairForm

_MAX_DEPTH = 50  # of elements inside elements; deeper ones are a text


class Elements:
    """Reads the inside of an element as JSON, by the schema of its value."""

    def __init__(self, pairs: PairForm) -> None:
        self._open = pairs.open.strip()
        self._open_end = pairs.middles[0][0].strip()
        self._close, self._close_end = pairs.close.strip().split(KEY)

    def value(self, text: str, schema: object, depth: int = 0) -> Any:
        """Return the value that `text` is; raises ValueError where it is no elements."""
        given = schema if isinstance(schema, Mapping) else {}
        kind = given.get("type")
        body = text.strip()
        if not body.startswith(self._open) and (body or kind not in ("array", "object")):
            return self._scalar(text, kind)
        if depth > _MAX_DEPTH:
            raise ValueError(body)
        found, at = list[tuple[str, str]](), 0
        while at < len(body):
            key, inner, at = self._element(body, at)
            found.append((key, inner))
        properties = given.get("properties")
        if kind == "array" or (kind is None and all(key == "item" for key, _ in found)):
            return [self.value(inner, given.get("items"), depth + 1) for _, inner in found]
        inside = properties if isinstance(properties, Mapping) else {}
        return {key: self.value(inner, inside.get(key), depth + 1) for key, inner in found}

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

    def _scalar(self, text: str, kind: object) -> Any:
        if kind == "string":
            return text
        try:
            value = json.loads(text)
        except ValueError:
            return text
        return text if isinstance(value, str) else value
