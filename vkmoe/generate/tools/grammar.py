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
# A value that is nearly JSON, as Python writes it, or with marks around texts.
_LOOSE = r"""loose: loose_text | loose_object | loose_array | LOOSE_SCALAR
loose_object: "{" (loose_pair (/, ?/ loose_pair)*)? "}"
loose_pair: (loose_text | /[^\s:,'"{}<>\[\]]+/) /: ?/ loose
loose_array: "[" (loose (/, ?/ loose)*)? "]"
LOOSE_SCALAR: /-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?|[Tt]rue|[Ff]alse|None|null/"""
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
        schema = _schema_of(function)
        arguments = self._in_lark(schema)
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
            return f"{begin} {self._pairs(form.pairs, schema, rule)} {close}"
        return f"{begin} {arguments if form.is_json else self._loose('loose_object')} {close}"

    def _pairs(self, pairs: PairForm, schema: Mapping[str, Any], rule: str) -> str:
        """Write arguments one by one, in the schema's order; those that need not be may miss."""
        schemas, between = ParameterSchemas(schema), self._marked(pairs.between)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for i, (key, each) in enumerate(schemas.properties.items()):
            form = self._pair(pairs, key, {**shared, **mapping(each)}, schemas.parameter(key))
            # What an argument that is the first begins with, and what one behind others does.
            first, later = f"{rule}_{i} {rule}_later_{i + 1}", f"{rule}_later_{i + 1}"
            following = f"{between} {rule}_{i} {later}"
            if key not in schemas.required:
                first, following = f"{first} | {rule}_first_{i + 1}", f"{following} | {later}"
            self._more += [f"{rule}_{i}: {form}", f"{rule}_first_{i}: {first}"]
            self._more.append(f"{rule}_later_{i}: {following}")
        n = len(schemas.properties)
        self._more += [f'{rule}_first_{n}: "\\n"?', f'{rule}_later_{n}: ""']
        return f"{rule}_first_0"  # an empty line, where there are none, as some templates write

    def _pair(self, pairs: PairForm, key: str, schema: Mapping[str, Any], allowed: Allowed) -> str:
        """Write an argument: its key, what stands before its value, and that."""
        forms = []
        for middle, types in pairs.middles:
            if types and allowed.types and not types & allowed.types:
                continue
            begin = self._marked(pairs.open + key + middle)
            as_text = types == {"string"} and "string" in (allowed.types or {"string"})
            kinds = Allowed(frozenset({"string"}), allowed.choices) if as_text else allowed
            if types and not as_text and not allowed.types:
                kinds = Allowed(types)
            closed = replace(pairs, close=pairs.close.replace(KEY, key))
            forms.append(f"{begin} {self._value(closed, schema, kinds)}")
        return " | ".join(forms) or self._marked(pairs.open + key)

    def _value(self, pairs: PairForm, schema: Mapping[str, Any], allowed: Allowed) -> str:
        """Write the value of a parameter and what ends it; a text stands there as it is."""
        end, is_text = self._marked(pairs.close), "string" in (allowed.types or {"string"})
        if allowed.choices and pairs.is_raw:
            texts = [json.loads(each) if each[0] == '"' else each for each in allowed.choices]
            return f"({' | '.join(map(_quoted, texts))}) {end}"
        if is_text and pairs.is_raw:
            return self._until(pairs.close) if end else "/[^\\n]*/"
        if is_text:
            quoted = _QUOTED if pairs.has_escapes else _QUOTED_RAW
            return f"{quoted if allowed.types == {'string'} else self._loose('loose')} {end}"
        whole = self._call_form.pairs
        if whole is not None and KEY in whole.close and not allowed.types <= _SCALARS:
            return f"({self._elements(whole)} | {self._in_lark(schema)}) {end}"
        json_form = self._in_lark(schema)
        if self._call_form.is_json or allowed.types <= {"integer", "number"}:
            return f"{json_form} {end}"
        return f"({json_form} | {self._loose('loose')}) {end}"

    def _elements(self, pairs: PairForm) -> str:
        """Write elements inside a value, of any names."""
        name, before, behind = r"/[^\s<>]+/", *pairs.close.split(KEY)
        first = f"{self._marked(pairs.open)} {name} {self._marked(pairs.middles[0][0])}"
        # The lexer must tell a text from the next element by its first character.
        inside = f"(element* | /[^{re.escape(pairs.open.strip()[0])}]+/) {self._marked(before)}"
        self._more.append(f"element: {first} {inside} {name} {self._marked(behind)}")
        return "element*"

    def _loose(self, rule: str) -> str:
        """Return the name of a rule for values that are nearly JSON."""
        form = self._call_form
        texts = _QUOTED
        if form.quotes is not None:
            texts = f"{self._marked(form.quotes[0])} {self._until(form.quotes[1])}"
        self._more += [_LOOSE, f"loose_text: {texts}"]
        return rule

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


def _schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    return {"type": "object", "properties": {}, **mapping(function.get("parameters"))}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
