"""This module keeps a reply to a form: a JSON schema, a regular expression or a grammar.

It owns what makes a form unusable, the vocabulary as the `llguidance` package wants it, and where
the next tokens that a form allows are computed: on a thread of its own, while the model runs. The
package is imported with the first form. How tokens are chosen among those is the subject of
sampler.py, what ends a reply that of loop.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import UsageError, VkmoeError
from vkmoe.generate.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]  # [n_vocab of the tokenizer]: the tokens that are allowed

MAX_CHARS = 1 << 18  # of a schema, a grammar or a regular expression
MAX_DEPTH = 100  # of a schema; the package reads no deeper JSON
MAX_OBJECTS = 2000  # in a schema: compiling takes the square of an object's properties
MAX_VALUES = 50_000  # in a schema, scalars included
_SCHEMA, _GRAMMAR, _REGEX = "the JSON schema", "the grammar", "the regular expression"
# Keywords that each describe an object; two in one place may both have to hold.
_SHAPES = ("properties", "$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")  # keywords with values in place of schemas
_MAX_LISTED = 200  # characters of a reason
# A blank between the parts of JSON. Models that know no better word repeat it as often as they may.
_JSON_BLANK = r"[\x20\x0A]"
# A row of the parser has four items for each property that may come next, a step few more; a state
# of the lexer takes up to 2 kB.
_LIMITS = {
    "max_items_in_row": 5 * MAX_OBJECTS,
    "step_max_items": 10 * MAX_OBJECTS,
    "max_lexer_states": 50_000,
}
_MAX_SECONDS = 10  # that a reply waits for a mask, and other replies with it


class Constraints:
    """Makes constraints for one model's vocabulary. Any thread may call it.

    All methods raise UsageError for what cannot be used, and VkmoeError without `llguidance`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._built: LLTokenizer | None = None

    def prepare(self) -> None:
        """Build what the first form needs, if that was not done: up to a second, once."""
        self._vocabulary()

    def json_schema(self, schema: Mapping[str, Any] | bool) -> Constraint:
        """Allow JSON that a schema describes; what `$ref` names must be in the schema itself.

        Between two parts stands at most one space or newline. An object whose properties are listed
        has no others, unless the schema says something of them, or objects are made up of parts
        (`allOf`). Keywords and formats that cannot be kept to, such as `not`, are refused.
        """
        text = _written(schema, lenient=False)
        try:
            grammar = _package().LLMatcher.grammar_from_json_schema(text)
        except ValueError as error:
            raise _unusable(_SCHEMA, str(error)) from error
        return self._compile(grammar, _SCHEMA)

    def regex(self, pattern: str) -> Constraint:
        """Allow texts that a regular expression (of Rust's kind) matches as a whole."""
        _check_text(pattern, _REGEX)
        return self._compile(_package().LLMatcher.grammar_from_regex(pattern), _REGEX)

    def lark(self, grammar: str) -> Constraint:
        """Allow texts of a Lark grammar in the form of `llguidance`.

        `json_in_lark` and `quoted` write parts of one.
        """
        _check_text(grammar, _GRAMMAR)
        _check_schemas_in(grammar)
        return self._compile(_package().LLMatcher.grammar_from_lark(grammar), _GRAMMAR)

    def grammar(self, text: str) -> Constraint:
        """Allow texts of a grammar: llama.cpp's GBNF, or Lark as `lark` takes it."""
        return self.lark(_as_lark(text))

    def grammar_in_lark(self, text: str) -> str:
        """Write a grammar, as `grammar` takes it, as a Lark grammar wants it amid its rules."""
        return f"%lark {{\n{_as_lark(text)}\n}}"

    def regex_in_lark(self, pattern: str) -> str:
        """Write a regular expression as a Lark grammar wants it amid its rules."""
        _check_text(pattern, _REGEX)
        escaped = {"/": r"\/", "\n": r"\n"}
        inner = re.sub(r"(?s)\\.|[/\n]", lambda found: escaped.get(found[0], found[0]), pattern)
        return f"/(?:{inner})/"

    def json_in_lark(self, schema: Mapping[str, Any] | bool, lenient: bool = False) -> str:
        """Write a schema, as `json_schema` takes it, as a Lark grammar wants it amid its rules.

        If `lenient`, what cannot be kept to is ignored, and of `oneOf` several may hold.
        """
        return f"%json {_written(schema, lenient)}"

    def quoted(self, text: str) -> str:
        """Write a text as a Lark grammar wants it: special tokens by id, the rest in quotes."""
        parts = self._tokenizer.parts(text)
        written = [f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts]
        return " ".join(written) or '""'

    def _compile(self, grammar: str, what: str) -> Constraint:
        package = _package()
        limits = package.LLParserLimits(**_LIMITS)
        matcher = package.LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _unusable(what, matcher.get_error())
        n_vocab = self._tokenizer.n_vocab
        first_mask = _mask(matcher, n_vocab)
        error = matcher.get_error()
        if error and not error.startswith("NoExtension"):
            raise _unusable(what, error)
        if error or not (first_mask.any() or matcher.is_accepting()):
            raise UsageError(
                f"{what} allows no text at all", "see that its parts can come to an end"
            )
        return Constraint(self._tokenizer, matcher, first_mask)

    def _vocabulary(self) -> LLTokenizer:
        """Return the vocabulary as the package wants it, which takes it up to a second, once."""
        with self._lock:
            if self._built is None:
                words = _Words(self._tokenizer)
                self._built = _package().LLTokenizer(words, eos_token=words.end_ids)
            return self._built


@dataclass(frozen=True, eq=False)
class Constraint:
    """Holds a form that a reply is kept to, compiled for one vocabulary. `Constraints` makes it."""

    tokenizer: Tokenizer = field(repr=False)
    _matcher: LLMatcher = field(repr=False)  # only ever copied
    _first_mask: Mask = field(repr=False)

    def begin(self) -> ConstraintState:
        """Return the state of a reply that has no token yet."""
        return ConstraintState(self._matcher.deep_copy(), self._first_mask, self.tokenizer)


class ConstraintState:
    """Knows which tokens a reply may have next. One thread at a time calls it.

    `accept` begins to compute that on another thread, and `allowed` waits for it.
    """

    def __init__(self, matcher: LLMatcher, mask: Mask, tokenizer: Tokenizer) -> None:
        self._matcher, self._mask = matcher, mask
        self._coming: Future[Mask] | None = None
        self._n_vocab = tokenizer.n_vocab
        self._end_ids = np.array(sorted(tokenizer.end_ids), np.int64)

    def allowed(self) -> Mask | None:
        """Return the tokens that may come next [n_vocab]; None where only the end may. Mutates.

        End tokens are among them where the reply may end. Raises VkmoeError where the form turned
        out to be too complex, or has a text that the vocabulary cannot spell.
        """
        if self._coming is not None:
            try:
                self._mask, self._coming = self._coming.result(_MAX_SECONDS), None
            except TimeoutError as error:
                raise _stuck(f"a token took more than {_MAX_SECONDS} seconds") from error
            self._check()
        n_ends = np.count_nonzero(self._mask[self._end_ids])
        if np.count_nonzero(self._mask) > n_ends:
            return self._mask
        if not self._matcher.is_accepting():
            raise _stuck("no token of the vocabulary goes on")
        return None

    def accept(self, token: int) -> bool:
        """Take a token, one that was allowed; say whether others may follow it. Mutates.

        Raises VkmoeError where the form turned out to be too complex.
        """
        self._matcher.consume_token(token)
        if self._matcher.is_stopped():  # after an error too
            self._check()
            return False
        self._coming = _threads().submit(_mask, self._matcher, self._n_vocab)
        return True

    def close(self) -> None:
        """Compute no more, as the reply is over. May be called again. Mutates."""
        if self._coming is not None:
            self._coming.cancel()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _stuck(_reason(self._matcher.get_error()))


class _Words:
    """Gives `llguidance` a vocabulary, by the names that it reads.

    Tokens have the bytes that they add to a text, the blank before a word of SentencePiece
    included: where a form begins with no blank, neither does the reply. Special tokens have no
    bytes that a text could have, but names for grammars.
    """

    is_tokenizer_wrapper = True  # which is what the package looks for

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids | tokenizer.end_ids
        self.tokens = list(tokenizer.words)
        self.end_ids = sorted(tokenizer.end_ids)
        self.special_token_ids = sorted(self._special)
        if not self.end_ids:  # the package wants one; masks end before it
            self.end_ids = [len(self.tokens)]
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"<end of the reply>")
        self.eos_token_id = self.end_ids[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens that the model knows a text by, which a form may ask for as a whole.

        Raises nothing: `llguidance` has no way to go on from that.
        """
        raw = text if isinstance(text, bytes) else text.encode()
        try:
            ids = self._tokenizer.encode_plain(raw.decode())
        except (VkmoeError, UnicodeError):
            return self._longest_first(raw)
        return self._longest_first(raw) if self._special.intersection(ids) else ids

    def _longest_first(self, raw: bytes) -> list[int]:
        """Cut bytes into tokens, the longest that fits after the other; leave out what none has."""
        ids: list[int] = []
        start = 0
        while start < len(raw):
            ends = range(min(len(raw), start + self._longest), start, -1)
            end = next((end for end in ends if raw[start:end] in self._ids), None)
            if end is not None:
                ids.append(self._ids[raw[start:end]])
            start = end or start + 1
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        plain = (i for i in range(self._tokenizer.n_vocab) if i not in self._special)
        return {self.tokens[i]: i for i in plain if self.tokens[i]}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that compute masks, for all replies of all models."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="vkmoe-constraint")


def _mask(matcher: LLMatcher, n_vocab: int) -> Mask:
    """Compute which tokens may come next, mostly without Python's lock. Mutates."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, count=n_vocab, bitorder="little").view(np.bool_)


def _package() -> Any:
    """Import `llguidance`. Raises VkmoeError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise VkmoeError(
            "replies of a given form need the package llguidance, which is not installed",
            "pip install 'vkmoe[server]'",
        ) from error
    return llguidance


# ----- objects that a schema leaves open -----


def _has_parts(value: Any) -> bool:
    """Say whether a schema makes an object up of parts, which cannot be closed one by one."""
    if isinstance(value, Mapping):
        parts = value.get("allOf")
        n_more = len(parts) - 1 if isinstance(parts, list | tuple) else 0
        n_shapes = sum(key in value for key in _SHAPES) + n_more
        n_shapes += "required" in value and "properties" not in value
        return n_shapes > 1 or any(map(_has_parts, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_parts, value))


def _closed(value: Any) -> Any:
    """Return a schema whose objects have no properties but those that it lists, where it does.

    Models that know no better word add properties up to the end of the context.
    """
    if isinstance(value, list | tuple):
        return [_closed(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: each if key in _DATA else _closed(each) for key, each in value.items()}
    listed, required = value.get("properties"), value.get("required") or []
    types = value.get("type")
    is_object = "object" in (types if isinstance(types, list | tuple) else [types])
    if not is_object or not isinstance(listed, Mapping) or not listed:
        return found
    are_listed = isinstance(required, list | tuple) and all(
        isinstance(name, str) and name in listed for name in required
    )
    if are_listed and "minProperties" not in value:
        found.setdefault("additionalProperties", False)
    return found


# ----- what is refused -----


def _written(schema: Mapping[str, Any] | bool, lenient: bool) -> str:
    """Check a schema, and return it as JSON with the options that the package is to read it by."""
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"{_SCHEMA} is no object", "give a JSON object, or true for any JSON")
    if schema is False:
        raise UsageError(f"{_SCHEMA} is false, which allows nothing", "leave it out")
    rules = {} if schema is True else dict(schema)
    rules["x-guidance"] = {
        "whitespace_pattern": _JSON_BLANK,
        "lenient": lenient,
        "coerce_one_of": lenient,
    }
    _check_size(rules)
    try:
        text = json.dumps(rules if _has_parts(rules) else _closed(rules), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{_SCHEMA} is no JSON: {error}", "use objects, lists, texts, numbers"
        ) from error
    _check_text(text, _SCHEMA)
    return text


def _as_lark(grammar: str) -> str:
    """Return a grammar in Lark that may be in GBNF. Raises UsageError."""
    _check_text(grammar, _GRAMMAR)
    _package()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # its parser, in Python, has no errors of its own
        raise _unusable(_GRAMMAR, str(error)) from error


def _check_text(text: str, what: str) -> None:
    """Refuse what is no text, or too long a one."""
    if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{what} is no text", "give Unicode text, without half surrogate pairs")
    if len(text) > MAX_CHARS:
        raise UsageError(
            f"{what} has {len(text)} characters, more than {MAX_CHARS}", "make it shorter"
        )


def _check_size(schema: Any) -> None:
    """Refuse a schema that is too deep or too large, or has a circle, without recursion."""
    n_values = n_objects = 0
    left: list[tuple[Any, int]] = [(schema, 1)]
    while left:
        value, depth = left.pop()
        inside: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inside, n_objects = value.values(), n_objects + 1
        elif isinstance(value, list | tuple):
            inside = value
        n_values += 1
        if depth > MAX_DEPTH:
            raise UsageError(
                f"{_SCHEMA} is nested more than {MAX_DEPTH} deep", "put parts of it under $defs"
            )
        if n_values > MAX_VALUES or n_objects > MAX_OBJECTS:
            raise UsageError(
                f"{_SCHEMA} has more than {MAX_OBJECTS} objects or {MAX_VALUES} values in it",
                "make it smaller",
            )
        left += [(each, depth + 1) for each in inside]


def _check_schemas_in(grammar: str) -> None:
    """Refuse schemas inside a grammar that are too deep or too large."""
    decoder = json.JSONDecoder()
    for mark in re.finditer(r"%json\s*", grammar):
        try:
            schema = decoder.raw_decode(grammar, mark.end())[0]
        except RecursionError as error:
            raise UsageError(
                f"{_SCHEMA} is nested more than {MAX_DEPTH} deep", "put parts of it under $defs"
            ) from error
        except ValueError:
            continue  # which compiling says better
        _check_size(schema)


def _unusable(what: str, error: str) -> UsageError:
    if "not present in a registry" in error:
        return UsageError(
            f"{what} refers to another document: {_reason(error)}",
            'put what it refers to under "$defs", and refer to it as "#/$defs/name"',
        )
    return UsageError(
        f"{what} cannot be used: {_reason(error)}", "mend or leave out the part that it names"
    )


def _stuck(reason: str) -> UsageError:
    return UsageError(
        f"the reply cannot be kept to the form that was asked for: {reason}",
        "ask for a simpler schema or grammar",
    )


def _reason(error: str) -> str:
    """Return the line of a message of the package that says most, fit to be shown."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    line = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    line = "".join(char if char.isprintable() else "?" for char in line.removeprefix("error: "))
    return line if len(line) <= _MAX_LISTED else line[:_MAX_LISTED] + "..."
