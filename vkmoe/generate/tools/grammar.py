"""This module writes the grammar of replies that can only be calls, or only of a form.

The grammar is in llguidance's dialect of Lark. What computes with it is no subject of this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vkmoe.errors import PromptError
from vkmoe.generate.tools.families import ToolFamily
from vkmoe.generate.tools.harmony import CHANNEL, MESSAGE
from vkmoe.generate.tools.marked import DEEPSEEK, MISTRAL
from vkmoe.generate.tools.parser import function_of
from vkmoe.generate.tools.schemas import Allowed, ParameterSchemas
from vkmoe.generate.tools.tags import CLOSE, FUNCTION, OPEN

# Writes a JSON schema as a grammar wants it: `Constraints.json_in_lark` does.
InLark = Callable[[Mapping[str, Any] | bool], str]

_ONE_ONLY = ("harmony", "llama", "none")  # which write one call of a turn


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
    functions = [] if answer is not None and family.name == "none" else map(function_of, tools)
    grammar = _Grammar(family, list(functions), in_lark)
    return grammar.text(answer, parallel, in_thought)


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(
        self, family: ToolFamily, functions: Sequence[Mapping[str, Any]], in_lark: InLark
    ) -> None:
        self._family, self._functions, self._in_lark = family, functions, in_lark

    def text(self, answer: str | None, parallel: bool, in_thought: bool) -> str:
        """Return the rules: of a thought, if there can be one, of an answer, and of calls."""
        is_harmony = self._family.name == "harmony"
        has_thought = is_harmony or self._family.thought is not None
        rules = [*self._thought()] if has_thought else []
        choices = []
        if answer is not None:
            mark = self._marked(f"{CHANNEL}final{MESSAGE}") if is_harmony else ""
            rules.append(f"answer: {mark} {answer}")
            choices.append("answer")
        if self._functions:
            rules += self._call_rules(parallel)
            choices.append("calls")
        before = "thought_end" if in_thought else "thought?"
        start = f"start: {before if has_thought else ''} ({' | '.join(choices)})"
        return "\n".join([start, *rules]) + "\n"

    def _call_rules(self, parallel: bool) -> Iterator[str]:
        name = self._family.name
        yield f"calls: {self._calls(parallel and name not in _ONE_ONLY)}"
        yield "call: " + " | ".join(f"call_{i}" for i in range(len(self._functions)))
        for i, function in enumerate(self._functions):
            yield f"call_{i}: {self._call(function)}"
        if name == "qwen-coder":
            yield 'value[suffix="\\n</parameter>\\n"]: /(?s:.*)/'

    def _thought(self) -> Iterator[str]:
        """Write the rules of a thought, and of what is left of one that has begun."""
        if self._family.name == "harmony":
            first, last = f"{CHANNEL}analysis{MESSAGE}", "<|end|>"
            rest = _quoted("<|start|>assistant")
        else:
            assert self._family.thought is not None
            first, last = self._family.thought
            rest = '("\\n\\n" | "\\n")?'
        yield f"thought: {self._marked(first)} thought_end"
        if last in self._family.mark_ids:
            yield f"thought_end: /(?s:.*)/ {self._marked(last)} {rest}"
        else:
            yield f"thought_end: thought_text {rest}"
            yield f"thought_text[suffix={_quoted(last)}]: /(?s:.*)/"

    def _calls(self, several: bool) -> str:
        """Write what stands around calls and between them."""
        name = self._family.name
        if name == "mistral":
            more = '(", " call)*' if several else ""
            return f'{self._marked(MISTRAL.calls)} "[" call {more} "]"'
        if name.startswith("deepseek"):
            between = '("\\n" call)*' if name == "deepseek-v3" else "call*"
            more = between if several else ""
            return f"{self._marked(DEEPSEEK.calls)} call {more} {self._marked(DEEPSEEK.calls_end)}"
        if not several:
            return "call"
        return "call+" if name == "mistral-args" else 'call ("\\n" call)*'

    def _call(self, function: Mapping[str, Any]) -> str:
        family, name = self._family.name, str(function.get("name"))
        schema = _schema_of(function)
        arguments = self._in_lark(schema)
        if family == "qwen-coder":
            return self._tagged(name, schema)
        if family == "hermes":
            inner = f"{_opened(name, 'arguments')} {arguments} {_quoted('}')}"
            return f'{self._marked(OPEN)} "\\n" {inner} "\\n" {self._marked(CLOSE)}'
        if family == "harmony":
            short = self._marked(f" to=functions.{name}{CHANNEL}commentary json{MESSAGE}")
            long = f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}"
            return f"({short} | {self._marked(long)}) {arguments}"
        if family == "mistral-args":
            marks = f"{self._marked(MISTRAL.calls)} {_quoted(name)}"
            return f"{marks} {self._marked(MISTRAL.arguments)} {arguments}"
        if family.startswith("deepseek"):
            is_block = family == "deepseek-v3"
            before = _quoted("function" if is_block else name)
            begin = f"{self._marked(DEEPSEEK.call)} {before} {self._marked(DEEPSEEK.separator)}"
            if is_block:
                arguments = f"{_quoted(name + chr(10) + '```json' + chr(10))} {arguments}"
                arguments += ' "\\n```"'
            return f"{begin} {arguments} {self._marked(DEEPSEEK.call_end)}"
        key = "parameters" if family == "llama" else "arguments"
        return f"{_opened(name, key)} {arguments} {_quoted('}')}"

    def _tagged(self, name: str, schema: Mapping[str, Any]) -> str:
        """Write a call with a tag for each parameter, in the schema's order."""
        parts = [self._marked(OPEN), _quoted(f"\n{FUNCTION}{name}>\n")]
        schemas = ParameterSchemas(schema)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for key, value in schemas.properties.items():
            form = self._value({**shared, **_mapping(value)}, schemas.parameter(key))
            rule = f"{_quoted(f'<parameter={key}>' + chr(10))} {form}"
            parts.append(rule if key in schemas.required else f"({rule})?")
        return " ".join([*parts, '"</function>\\n"', self._marked(CLOSE)])

    def _value(self, schema: Mapping[str, Any], allowed: Allowed) -> str:
        """Write the value of a parameter and the tag behind it; a text stands there as it is."""
        end = _quoted("\n</parameter>\n")
        if allowed.choices:
            texts = [json.loads(each) if each[0] == '"' else each for each in allowed.choices]
            return f"({' | '.join(map(_quoted, texts))}) {end}"
        if not allowed.types or "string" in allowed.types:
            return "value"
        return f"{self._in_lark(schema)} {end}"

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
    return {"type": "object", "properties": {}, **_mapping(function.get("parameters"))}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _opened(name: str, key: str) -> str:
    """Write the beginning of a call in JSON, up to its arguments."""
    return _quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
