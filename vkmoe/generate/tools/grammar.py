"""This module writes the grammar of replies that can only be calls, or only of a form.

The grammar is in llguidance's dialect of Lark. What computes with it is no subject of this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vkmoe.errors import PromptError
from vkmoe.generate.tools.families import ToolFamily
from vkmoe.generate.tools.forms import ARGUMENTS, ID, INDEX, KEY, NAME, PLAIN_CALL, SLOT, PairForm
from vkmoe.generate.tools.harmony import CHANNEL, MESSAGE
from vkmoe.generate.tools.schemas import Allowed, ParameterSchemas, function_of, mapping

# Writes a JSON schema as a grammar wants it: `Constraints.json_in_lark` does.
InLark = Callable[[Mapping[str, Any] | bool], str]

_OPTIONAL = re.compile(rf'(\[[A-Z_]+\]{ID}|, "[^"]+": "?{ID}"?|"[^"]+": "?{ID}"?, )')
# Scalars that are nearly JSON, as Python writes them, by their JSON types.
_LOOSE = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/",
    "boolean": "/[Tt]rue|[Ff]alse/",
    "null": "/None|null/",
}
_BARE_KEY = r"""/[^\x00-\x20:,'"{}<>\[\]]+/"""
_ANY: Mapping[str, Any] = {}  # the schema that allows all values
_QUOTED = r"""/'([^'\\]|\\(.|\n))*'|"([^"\\]|\\(.|\n))*"/"""
# Without escapes, a quote is the end where something follows that goes on with the call.
_QUOTED_RAW = r"""/'([^']|'[^',)\]}])*'|"([^"]|"[^",)\]}])*"/"""
_SCALARS = {"integer", "number", "boolean", "null"}
_BLANKS = r"/[ \n]{0,3}/"


def reply_grammar(
    family: ToolFamily,
    in_lark: InLark,
    tools: Sequence[Mapping[str, Any]] = (),
    answer: str | None = None,
    *,
    parallel: bool = True,
    in_thought: bool = False,
) -> str:
    """Return the grammar of a call of one of `tools`, or of several, after an optional thought.

    `answer` is the form of an answer, amid the rules of a Lark grammar: such a one may come instead
    then. `parallel` allows several calls where the family can write them. A family without calls
    writes one as {"name": ..., "arguments": ...}, beside an answer none. `in_thought`: the prompt
    ends inside a thought, which must end first. Special tokens stand in it by their ids. Raises
    PromptError for neither tools nor an answer.
    """
    if not tools and answer is None:
        raise PromptError(
            "a tool call is demanded, but there are no tools",
            "leave tool_choice at 'auto' or 'none'",
        )
    functions = [] if answer is not None and not family.has_calls else map(function_of, tools)
    grammar = _Grammar(family, list(functions), in_lark)
    return grammar.text(answer, parallel, in_thought)


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(
        self, family: ToolFamily, functions: Sequence[Mapping[str, Any]], in_lark: InLark
    ) -> None:
        self._family, self._functions, self._in_lark = family, functions, in_lark
        self._form, self._is_harmony = family.form, family.is_harmony
        call = self._form.call or PLAIN_CALL
        given = self._form.given if call.open.startswith(self._form.given) else ""
        if not given and not call.before.strip():
            given = call.open[: len(call.open) - len(call.open.lstrip())]
        self._call_form = replace(
            call, open=call.open.removeprefix(given), between=call.between + given
        )
        self._more: list[str] = []  # rules that others need
        self._loose_names: dict[int, str] = {}  # of rules, by the ids of their schemas
        self._loose_rules: list[tuple[str, ParameterSchemas, Mapping[str, Any]]] = []

    def text(self, answer: str | None, parallel: bool, in_thought: bool) -> str:
        """Return the rules: of a thought, if there can be one, of an answer, and of calls."""
        rules = [*self._thought()] if self._family.has_thoughts else []
        choices = []
        if answer is not None:
            first, last = self._form.content
            first = f"{CHANNEL}final{MESSAGE}" if self._is_harmony else first
            first = first.removeprefix(self._form.given)
            rules.append(f"answer: {self._marked(first)} {answer} {self._marked(last)}")
            choices.append("answer")
        if self._functions:
            rules += self._call_rules(parallel)
            choices.append("calls")
        before = "thought_end" if in_thought else "thought?"
        if not in_thought and self._family.thought is not None:  # one that is over at once
            over = f"{self._marked(self._family.thought[1])} {_BLANKS}"
            before = f'("\\n"? (thought | {over}))?'
        start = f"start: {before if self._family.has_thoughts else ''} ({' | '.join(choices)})"
        for name, schemas, schema in self._loose_rules:  # which grow meanwhile
            forms = self._loose_choices(schemas.allowed(schema))
            forms = forms or self._loose_forms(schemas, schema, name)
            self._more.append(f"{name}: {' | '.join(forms)}")
        return "\n".join([start, *rules, *dict.fromkeys(self._more)]) + "\n"

    def _thought(self) -> Iterator[str]:
        """Write the rules of a thought, and of what is left of one that has begun."""
        if self._is_harmony:
            first, last, rest = f"{CHANNEL}analysis{MESSAGE}", "<|end|>", '"<|start|>assistant"'
        else:
            assert self._family.thought is not None
            first, last = self._family.thought
            first = first.removeprefix(self._form.given)
            rest = self._marked(self._form.given) or '("\\n\\n" | "\\n")?'
        yield f"thought: {self._marked(first)} thought_end"
        yield f"thought_end: {self._until(last)} {rest}"

    def _until(self, end: str) -> str:
        """Write any text and what ends it."""
        if any(mark in end for mark in self._family.mark_ids):
            return f"/(?s:.*)/ {self._marked(end)}"
        name = f"until_{len(self._more)}"
        rule = f"[suffix={_quoted(end)}]: /(?s:.*)/"
        for known in self._more:
            if known.endswith(rule):
                return known.removesuffix(rule)
        self._more.append(name + rule)
        return name

    def _call_rules(self, parallel: bool) -> Iterator[str]:
        form = self._call_form
        more = ""
        if parallel and form.several and not self._is_harmony:
            more = f"({self._marked(form.between)} call)*"
        empty = " ".join(map(self._marked, self._form.content)) if all(self._form.content) else ""
        empty = f"({empty})?" if empty and not self._form.given else ""
        begin = form.before or (self._form.call or form).open
        blanks = begin[: len(begin) - len(begin.lstrip())]
        blanks = f"({_quoted(blanks)})?" if blanks else ""
        after = "" if self._is_harmony else self._marked(form.after)
        after = after if form.closes_one else f"({after})?"
        yield f"calls: {empty} {blanks} {self._marked(form.before.lstrip())} call {more} {after}"
        yield "call: " + " | ".join(f"call_{i}" for i in range(len(self._functions)))
        for i, function in enumerate(self._functions):
            yield f"call_{i}: {self._call(function, f'call_{i}')}"

    def _call(self, function: Mapping[str, Any], rule: str) -> str:
        form, name = self._call_form, str(function.get("name"))
        schema = {"type": "object", "properties": {}, **mapping(function.get("parameters"))}
        schemas, arguments = ParameterSchemas(schema), self._in_lark(schema)
        if self._is_harmony:
            short = self._marked(f" to=functions.{name}{CHANNEL}commentary json{MESSAGE}")
            long = f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}"
            return f"({short} | {self._marked(long)}) {arguments}"
        begin, close = self._slotted(form.open, name), self._marked(form.close)
        if form.object is not None:
            before, _, behind = form.object.text.partition(ARGUMENTS)
            name = json.dumps(name, ensure_ascii=False)[1:-1]
            inner = f"{self._slotted(before, name)} {arguments} {self._slotted(behind, name)}"
            return f"{begin} {inner} {close}"
        if form.pairs is not None:
            return f"{begin} {self._pairs(form.pairs, schemas, rule)} {close}"
        arguments = arguments if form.is_json else self._loose(schemas, schema)
        return f"{begin} {arguments} {close}"

    def _pairs(self, pairs: PairForm, schemas: ParameterSchemas, rule: str) -> str:
        """Write arguments one by one, in the schema's order; those that need not be may miss."""
        forms = {key: self._pair(pairs, key, schemas) for key in schemas.properties}
        inside = self._in_order(rule, forms, schemas.required, self._marked(pairs.between))
        return inside or '"\\n"?'  # an empty line, as some templates write

    def _in_order(
        self, rule: str, forms: Mapping[str, str], required: Sequence[Any], between: str
    ) -> str:
        """Write forms one after another, by their keys; those that are not required may miss."""
        for i, (key, form) in enumerate(forms.items()):
            # What one that is the first begins with, and what one behind others does.
            first, later = f"{rule}_{i} {rule}_later_{i + 1}", f"{rule}_later_{i + 1}"
            following = f"{between} {rule}_{i} {later}"
            if key not in required:
                first, following = f"{first} | {rule}_first_{i + 1}", f"{following} | {later}"
            self._more += [f"{rule}_{i}: {form}", f"{rule}_first_{i}: {first}"]
            self._more.append(f"{rule}_later_{i}: {following}")
        n = len(forms)
        self._more += [f'{rule}_first_{n}: ""', f'{rule}_later_{n}: ""'] if forms else []
        return f"{rule}_first_0" if forms else ""

    def _pair(self, pairs: PairForm, key: str, schemas: ParameterSchemas) -> str:
        """Write an argument: its key, what stands before its value, and that."""
        forms, allowed = [], schemas.parameter(key)
        closed = replace(pairs, close=pairs.close.replace(KEY, key))
        for middle, types in pairs.middles:
            if types and allowed.types and not types & allowed.types:
                continue
            begin = self._marked(pairs.open + key + middle)
            as_text = types == {"string"} and "string" in (allowed.types or {"string"})
            kinds = Allowed(frozenset({"string"}), allowed.choices) if as_text else allowed
            if types and not as_text and not allowed.types:
                kinds = Allowed(types)
            forms.append(f"{begin} {self._value(closed, key, schemas, kinds)}")
        return " | ".join(forms) or self._marked(pairs.open + key)

    def _value(self, pairs: PairForm, key: str, schemas: ParameterSchemas, allowed: Allowed) -> str:
        """Write the value of a parameter and what ends it; a text stands there as it is."""
        end, is_text = self._marked(pairs.close), "string" in (allowed.types or {"string"})
        if allowed.choices and pairs.is_raw:
            texts = [json.loads(each) if each[0] == '"' else each for each in allowed.choices]
            return f"({' | '.join(map(_quoted, texts))}) {end}"
        if is_text and pairs.is_raw:
            return self._until(pairs.close) if end else "/[^\\n]*/"
        if is_text:
            is_free = allowed == Allowed(frozenset({"string"})) and not pairs.has_escapes
            loose = _QUOTED_RAW if is_free else self._loose(schemas, schemas.properties[key])
            return f"{loose} {end}"
        whole = self._call_form.pairs
        if whole is not None and KEY in whole.close and not allowed.types <= _SCALARS:
            return f"({self._elements(whole)} | {self._in_lark(schemas.alone(key))}) {end}"
        json_form = self._in_lark(schemas.alone(key))
        if self._call_form.is_json or allowed.types <= {"integer", "number"}:
            return f"{json_form} {end}"
        return f"({json_form} | {self._loose(schemas, schemas.properties[key])}) {end}"

    def _elements(self, pairs: PairForm) -> str:
        """Write elements inside a value, of any names."""
        name, before, behind = r"/[^\s<>]+/", *pairs.close.split(KEY)
        first = f"{self._marked(pairs.open)} {name} {self._marked(pairs.middles[0][0])}"
        # The lexer must tell a text from the next element by its first character.
        inside = f"(element* | /[^{re.escape(pairs.open.strip()[0])}]+/) {self._marked(before)}"
        self._more.append(f"element: {first} {inside} {name} {self._marked(behind)}")
        return "element*"

    def _loose(self, schemas: ParameterSchemas, schema: object) -> str:
        """Return the name of a rule for values of a schema that are nearly JSON."""
        schema = mapping(schema) or _ANY
        if id(schema) not in self._loose_names:
            name = self._loose_names[id(schema)] = f"loose_{len(self._loose_rules)}"
            self._loose_rules.append((name, schemas, schema))
        return self._loose_names[id(schema)]

    def _loose_choices(self, allowed: Allowed) -> list[str]:
        """List how the values that a schema lists may be written."""
        forms: list[str] = []
        for value in map(json.loads, allowed.choices):
            if not isinstance(value, str):
                forms += map(_quoted, {json.dumps(value), repr(value)})
            elif self._call_form.quotes is not None:
                forms.append(self._marked(value.join(self._call_form.quotes)))
            else:
                forms += map(_quoted, {_quoted(value), repr(value)})
        return sorted(forms)

    def _loose_forms(
        self, schemas: ParameterSchemas, schema: Mapping[str, Any], name: str
    ) -> list[str]:
        """List how values of each of a schema's types are written; its parts have own rules.

        Keys are in the schema's order or, as some templates write them, in that of the alphabet.
        """
        quotes, texts = self._call_form.quotes, _QUOTED
        if quotes is not None:
            texts = f"{self._marked(quotes[0])} {self._until(quotes[1])}"
        types = schemas.allowed(schema).types or {*_LOOSE, "string", "array", "object"}
        forms = [form for kind, form in _LOOSE.items() if kind in types]
        if "string" in types:
            forms.append(texts)
        if "array" in types:
            item = self._loose(schemas, schemas.inside(schema, "items"))
            forms.append(f'"[" ({item} (/, ?/ {item})*)? "]"')
        if "object" in types:
            pairs = {}
            for key, each in schemas.inside(schema, "properties").items():
                keys = " | ".join(_quoted(f"{quote}{key}{quote}:") for quote in ("", "'", '"'))
                pairs[key] = f"({keys}) / ?/ {self._loose(schemas, each)}"
            orders = {name: pairs, f"{name}_sorted": dict(sorted(pairs.items()))}
            required = schemas.required_of(schema)
            rules = [self._in_order(r, order, required, "/, ?/") for r, order in orders.items()]
            inside = f"({' | '.join(rules)})" if pairs else ""
            if "properties" not in schema and not inside:
                pair = f"({texts} | {_BARE_KEY}) /: ?/ {self._loose(schemas, _ANY)}"
                inside = f"({pair} (/, ?/ {pair})*)?"
            forms.append(f'"{{" {inside} "}}"')
        return forms

    def _slotted(self, text: str, name: str) -> str:
        """Write a text with slots; ids may be left out where they stand apart.

        The name is one text with what is around it: the lexer does not go back where another
        choice begins with the same letters.
        """
        slots, found = {INDEX: "/[0-9]+/", ID: "/[A-Za-z0-9_.:-]+/"}, []
        for i, part in enumerate(_OPTIONAL.split(text.replace(NAME, name))):
            pieces = [slots.get(piece) or self._marked(piece) for piece in SLOT.split(part)]
            written = " ".join(filter(None, pieces))
            found.append(f"({written})?" if i % 2 else written)
        return " ".join(filter(None, found))

    def _marked(self, text: str) -> str:
        """Write a text, its marks that are special tokens by their ids."""
        for mark, token_id in self._family.mark_ids.items():
            before, found, after = text.partition(mark)
            if found:
                parts = [self._marked(before), f"<[{token_id}]>", self._marked(after)]
                return " ".join(part for part in parts if part)
        return _quoted(text) if text else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
