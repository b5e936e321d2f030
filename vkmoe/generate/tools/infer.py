"""This module concludes from renderings of known calls how a template writes calls.

It owns the calls that are rendered (probe.py does so) and what their names and arguments look like
in a text. What stands around them is the form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vkmoe.generate.tools.forms import (
    ARGUMENTS,
    ID,
    INDEX,
    KEY,
    NAME,
    CallForm,
    ObjectForm,
    PairForm,
    parts,
    shared_end,
    shared_start,
    without,
)
from vkmoe.generate.tools.json_text import is_json, json_at
from vkmoe.generate.tools.schemas import kind_of

_FIRST, _SECOND = "zprobe_one", "zprobe_two"
_AWKWARD = 'it\'s "two"\n<b> \\ & {x}, y'
# In the order of their keys, as some templates sort them. The last is a text.
_ARGUMENTS: dict[str, Any] = {
    "ka_text": "zplainz",
    "kb_text": _AWKWARD,
    "kc_number": 4711,
    "kd_flag": True,
    "ke_none": None,
    "kf_list": [8151, "zinnerz", False],
    "kg_map": {"inner": [True, None, "zdeepz"]},
    "kh_text": "zlastz",
}
_OTHER = {"ka_text": "zotherz", "kb_text": "zmorez", "kc_number": 8147, "kh_text": "zendz"}


def _call(index: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"zcallid{index}x", "type": "function", "function": function}


CALLS = [_call(0, _FIRST, _ARGUMENTS), _call(1, _SECOND, _OTHER)]
_TEXT = {"type": "string"}
_SCHEMAS: dict[str, Any] = {
    "kc_number": {"type": "integer"},
    "kd_flag": {"type": "boolean"},
    "kf_list": {"type": "array", "items": _TEXT},
    "kg_map": {"type": "object", "properties": {}, "additionalProperties": _TEXT},
}
_PARAMETERS = {
    "type": "object",
    "properties": {key: {"description": "one"} | _SCHEMAS.get(key, _TEXT) for key in _ARGUMENTS},
    "required": [],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "one", "parameters": _PARAMETERS},
    }
    for name in (_FIRST, _SECOND)
]


class Heads(NamedTuple):
    """Says what a reply has beside its calls.

    It begins with the header of its turn and maybe `marks` of other parts; `end` ends an answer.
    """

    header: str
    marks: Sequence[str]
    end: str

    def cleaned(self, before: str) -> str:
        """Return what stands before a call without all that belongs to other parts of a reply."""
        return without(before.removeprefix(self.header), self.marks)

    def without_end(self, tail: str) -> str:
        """Return `tail` without what also ends an answer."""
        if self.end and self.end in tail:
            return tail.partition(self.end)[0].rstrip()
        tail = tail.rstrip()
        return tail[: len(tail) - len(shared_end(tail, self.end))].rstrip()


class _Item(NamedTuple):
    """Says where a call's arguments are in a text, or the object that is all of it, and how."""

    start: int
    end: int
    form: CallForm


def call_form(heads: Heads, both: str, one: str) -> tuple[CallForm | None, str, Sequence[str]]:
    """Return how calls are written, None where they do not show it.

    `both` and `one` are what a template writes of CALLS, and of the first of them. Returns also
    what of the calls' beginning is part of the header, and what ends a reply with calls.
    """
    first = _item(both, 0, CALLS[0])
    second = first and _item(both, first.end, CALLS[1])
    if first is None or second is None:
        return _form_of_one(heads, one), "", ()
    head = _slotted(both[: first.start])
    between, tail = _slotted(both[first.end : second.start]), both[second.end :]
    begin = shared_end(head, between)
    between = between[: len(between) - len(begin)]
    close = shared_start(between, heads.without_end(tail))
    before, given = head[: len(head) - len(begin)], heads.header[len(head) - len(begin) :]
    before = "" if given else heads.cleaned(before)
    if not given.strip():
        begin, between, given = begin.removeprefix(given), between + given, ""
    after = heads.without_end(tail)[len(close) :]
    end = tail[len(close) + len(after) :]
    is_end = bool(after.strip()) and not before.strip()
    form = replace(
        first.form,
        open=begin,
        close=close,
        before=before,
        between=between[len(close) :],
        after="" if is_end else after,
        closes_one=after.strip() in one,
    )
    if not form.has_name:
        return _form_of_one(heads, one), "", ()
    return form, given, [after, end] if is_end else [end]


def _form_of_one(heads: Heads, one: str) -> CallForm | None:
    """Return the form of calls of which a turn has one only."""
    item = _item(one, 0, CALLS[0])
    if item is None:
        return None
    begin = _slotted(heads.cleaned(one[: item.start]))
    close = heads.without_end(one[item.end :])
    form = replace(item.form, open=begin, close=close, several=False)
    return form if form.has_name else None


def _slotted(text: str) -> str:
    """Return a literal with slots for what differs from call to call."""
    for call in CALLS:
        text = text.replace(call["function"]["name"], NAME).replace(call["id"], ID)
    return re.sub(rf"(?<={NAME}:)[01](?!\w)", INDEX, text)


def _item(text: str, start: int, call: Mapping[str, Any]) -> _Item | None:
    """Find a call in a text, from `start` on."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    place = text.find(name, start)
    if place < 0:
        return None
    other = _SECOND if name == _FIRST else _FIRST
    limit = text.find(other, place) if other in text[place:] else len(text)
    return (
        _object(text, start, place, call)
        or _value(text, place, limit, arguments)
        or _pairs(text, place + len(name), limit, arguments)
    )


def _object(text: str, start: int, place: int, call: Mapping[str, Any]) -> _Item | None:
    """Find the JSON object that is all of a call; `place` is where its name stands."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    begin = text.rfind("{", start, place)
    while begin >= 0:
        found = json_at(text, begin, is_strict=True)
        if found is not None and isinstance(value := json.loads(found.json), dict):
            keys = {_kind(each, name, arguments): key for key, each in value.items()}
            if value.get(name) == arguments:
                keys |= {"arguments": name, "name": ""}
            if "arguments" in keys and "name" in keys:
                form = _object_form(text[begin : found.end], value, keys, call)
                return _Item(begin, found.end, CallForm("", object=form))
        begin = text.rfind("{", start, begin)
    return None


def _kind(value: object, name: str, arguments: object) -> str:
    if value == name:
        return "name"
    if isinstance(value, str) and (found := json_at(value, 0)) is not None:
        value = json.loads(found.json)
    return "arguments" if value == arguments else "other"


def _object_form(
    text: str, value: Mapping[str, Any], keys: Mapping[str, str], call: Mapping[str, Any]
) -> ObjectForm:
    name_key, arguments_key = keys["name"], keys["arguments"]
    before, colon, rest = re.split(rf'("{re.escape(arguments_key)}"\s*:\s*)', text, maxsplit=1)
    found = json_at(rest, 0, is_strict=True)
    before, behind = before + colon, rest[found.end if found is not None else 0 :]
    others = frozenset(value) - {name_key, arguments_key}
    for key in others:  # an id, or a number of the call
        if key not in ("type",) and isinstance(value[key], str | int):
            pattern = rf'("{re.escape(key)}"\s*:\s*"?)[^",}}]*'
            before, behind = (re.sub(pattern, rf"\g<1>{ID}", part) for part in (before, behind))
    slotted = (_slotted(before) + ARGUMENTS + _slotted(behind)).replace(call["id"], ID)
    return ObjectForm(slotted, name_key, arguments_key if name_key else "", others)


def _value(text: str, place: int, limit: int, arguments: Mapping[str, Any]) -> _Item | None:
    """Find the arguments as one object, in JSON or like it, behind a name."""
    key, plain = "ka_text", str(arguments["ka_text"])
    begin = text.find("{", place, limit)
    pattern = re.compile(rf"{key}[\"']?\s*[:=]\s*(\S*?){re.escape(plain)}(\S*?)[,}}]")
    quoted = pattern.search(text, place, limit)
    quotes = None
    if quoted is not None and quoted[1] not in ("", '"', "'", '\\"'):
        quotes = (quoted[1], quoted[2])
    while begin >= 0:
        found = json_at(text, begin, quotes)
        if found is not None and _alike(json.loads(found.json), arguments):
            form = CallForm("", quotes=quotes, is_json=is_json(text[begin : found.end]))
            return _Item(begin, found.end, form)
        begin = text.find("{", begin + 1, limit)
    return None


def _alike(value: object, arguments: Mapping[str, Any]) -> bool:
    """Say whether a value is these arguments, up to null, which some templates write otherwise."""
    if not isinstance(value, dict) or value.keys() != arguments.keys():
        return False
    return all(
        value[key] == each for key, each in arguments.items() if key not in ("ke_none", "kg_map")
    )


def _pairs(text: str, place: int, limit: int, arguments: Mapping[str, Any]) -> _Item | None:
    """Find arguments that are written one by one, behind a name."""
    keys = _keys(text, place, limit, arguments)
    if keys is None:
        return None
    name_end = max(place, *(text.rfind(n, 0, keys[0].start) + len(n) for n in (_FIRST, _SECOND)))
    first, last = keys[0], keys[-1]
    middle, step = first.middle, text[first.value_end : keys[1].start]
    numbers = [key.middle for key in keys if key.key == "kc_number"]
    quote = middle[-1:] if numbers == [middle[:-1]] and step[:1] == middle[-1:] else ""
    middle, step = middle.removesuffix(quote), step.removeprefix(quote).replace(first.key, KEY)
    rest = text[last.value_end : limit].removeprefix(quote).replace(last.key, KEY)
    begin = shared_end(text[name_end : first.start], step)
    begin = begin[1:] if begin[:1] == ">" else begin  # a tag ends before the next begins
    step = step[: len(step) - len(begin)]
    close = shared_start(step, rest)
    others = [key for key in keys if not isinstance(arguments[key.key], str)]
    middles = {middle: {"string"}}
    for key in others:
        kind = kind_of(json.dumps(arguments[key.key]))
        kinds = {"integer", "number"} if kind == "integer" else {kind}
        middles[key.middle] = middles.get(key.middle, set()) | kinds
    is_plain = close.count(KEY) <= 1 and KEY not in begin + step[len(close) :]
    if not is_plain or not all(parts(m) for m in middles):
        return None
    pairs = PairForm(
        begin,
        tuple((m, frozenset(types if len(middles) > 1 else ())) for m, types in middles.items()),
        close,
        step[len(close) :],
        is_raw=not quote,
    )
    texts = [text[key.value : key.value_end] for key in others]
    form = CallForm("", pairs=_with_awkward(pairs, keys, text), is_json=all(map(is_json, texts)))
    end = last.value_end + len(quote) + len(close.replace(KEY, last.key))
    return _Item(first.start - len(begin), end, form)


class _Key(NamedTuple):
    """Says where a key and its value stand in a text."""

    key: str
    start: int
    value: int
    value_end: int
    middle: str


def _keys(text: str, place: int, limit: int, arguments: Mapping[str, Any]) -> list[_Key] | None:
    """Find the keys of arguments in a text, each with its value; None without the first ones."""
    found: list[_Key] = []
    at = place
    for key, value in arguments.items():
        start = text.find(key, at, limit)
        if start < 0:
            continue
        end = start + len(key)
        forms = [value] if isinstance(value, str) and value != _AWKWARD else _forms(value)
        places = [i for other in arguments if other > key and (i := text.find(other, end)) >= 0]
        stop = min([limit, *places])
        spots = [(i, form) for form in forms if (i := text.rfind(form, end, stop)) >= 0]
        if not spots:
            continue
        begin, form = max(spots, key=lambda spot: (spot[0] + len(spot[1]), len(spot[1])))
        at = begin + len(form)
        found.append(_Key(key, start, begin, at, text[end:begin]))
    wanted = [key for key, value in arguments.items() if isinstance(value, str)]
    seen = [each.key for each in found]
    is_whole = len(found) > 2 and seen[:2] == wanted[:2] and seen[-1] == wanted[-1]
    return found if is_whole else None


def _forms(value: object) -> list[str]:
    """List how a value may be written."""
    text = json.dumps(value)
    forms = [text, repr(value), str(value), json.dumps(value, separators=(",", ":"))]
    if isinstance(value, str):
        forms += [text[1:-1], repr(value)[1:-1], value]
    return forms


def _with_awkward(pairs: PairForm, keys: Sequence[_Key], text: str) -> PairForm:
    """Return pairs with what the awkward text of them shows: what surrounds it, or escapes."""
    awkward = keys[1]
    shown = text[awkward.value : awkward.value_end]
    if shown != _AWKWARD:
        return pairs
    if not pairs.is_raw:
        return replace(pairs, has_escapes=False)
    plain = next((m for m, types in pairs.middles if not types or "string" in types), "")
    first = awkward.middle.removeprefix(plain)
    if not first or first == awkward.middle:
        return pairs
    behind = text[awkward.value_end : keys[2].start]
    return replace(pairs, wrap=(first, behind.partition((parts(pairs.close) or ("\n",))[0])[0]))
