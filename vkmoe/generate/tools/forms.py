"""This module describes how a model writes a reply: its thoughts, its answer, its tool calls.

It owns the parts that such a description has. What finds them is the subject of probe.py; what
reads replies by them that of parser.py and calls.py; what demands them that of grammar.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

# Stand inside a literal for what differs from call to call; no text has these characters.
NAME, ID, INDEX, ARGUMENTS, KEY = SLOTS = "\ue000\ue001\ue002\ue003\ue004"

SLOT = re.compile(f"([{SLOTS}])")
_ATOM = re.compile(rf"<[^<>\s{SLOTS}]*>?|\[/?[A-Z_]{{2,}}\]|\s|\w+|.", re.DOTALL)
_STRONG = re.compile(rf"[^\s\[\]{{}}()\"',:={SLOTS}]")


@dataclass(frozen=True)
class PairForm:
    """Says how a call writes its arguments one by one, each with its key.

    `close` may have the slot of the key. Between a key and its value stands one of `middles`, each
    with the JSON types that it announces (none: any). `is_raw`: a text stands there as it is, else
    in quotes; `wrap` may surround one.
    `has_escapes`: a text in quotes has them.
    """

    open: str
    middles: tuple[tuple[str, frozenset[str]], ...]
    close: str
    between: str
    is_raw: bool = True
    has_escapes: bool = True
    wrap: tuple[str, str] | None = None


@dataclass(frozen=True)
class ObjectForm:
    """Says how a call is one JSON object: `text` is one, with slots.

    Without a `name_key` the name itself is the key of the arguments. `others` are further keys.
    """

    text: str
    name_key: str
    arguments_key: str
    others: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CallForm:
    """Says how calls are written.

    All of them stand between `before` and `after`, each between `open` and `close`, with `between`
    from one to the next. `open` has the slot of the name, unless a call is an `object`. Arguments
    are an object too, or `pairs`. `quotes` surround texts inside values, beside JSON's; `is_json`:
    values are JSON, and else Python's or the like. `several`: a turn may have several calls; a
    single one has `after` only if `closes_one`. `tag` may stand before them.
    """

    open: str
    close: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    object: ObjectForm | None = None
    pairs: PairForm | None = None
    quotes: tuple[str, str] | None = None
    is_json: bool = True
    several: bool = True
    closes_one: bool = True
    tag: str = ""

    @property
    def mark(self) -> str:
        """Return what a call begins with; "" where that is only brackets, as in plain JSON."""
        return mark_of(self.before + self.open)

    @property
    def has_name(self) -> bool:
        """Say whether the form shows where the name of the tool stands."""
        return self.object is not None or NAME in self.open


# How a model writes a call whose template shows none.
PLAIN_CALL = CallForm(
    "",
    object=ObjectForm(f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}', "name", "arguments"),
    several=False,
)


@dataclass(frozen=True)
class ReplyForm:
    """Says how a reply is written.

    `thought` and `content` are what stands around a thought and an answer, `content` being empty
    where nothing does. `given` is what a prompt ends with of the marks that begin a reply's parts.
    One of `ends` may end it. It follows the `header` of its turn.
    """

    thought: tuple[str, str] | None = None
    content: tuple[str, str] = ("", "")
    ends: tuple[str, ...] = ()
    given: str = ""
    header: str = ""
    call: CallForm | None = None

    def literals(self) -> list[str]:
        """List all texts that are form, and that a reply must show."""
        call = self.call
        texts = [*(self.thought or ()), *self.content]
        if call is not None:
            texts += [call.tag, call.before, call.open, call.close, call.between, call.after]
            texts += call.quotes or ()
            if (pairs := call.pairs) is not None:
                texts += [pairs.open, pairs.close, pairs.between, *(m for m, _ in pairs.middles)]
        return [text for text in texts if text.strip()]


def atoms(text: str) -> list[str]:
    """Cut a literal into tags, words, slots and single characters."""
    return _ATOM.findall(text)


@cache
def parts(text: str) -> tuple[str, ...]:
    """Return the atoms of a literal that are no blanks."""
    return tuple(atom for atom in atoms(text) if not atom.isspace())


@cache
def mark_of(text: str) -> str:
    """Return with what a literal begins to be one: a tag, or all up to a tag, blank or slot.

    It is "" for what is everywhere in texts: brackets and the like.
    """
    mark = ""
    for atom in atoms(text.lstrip()):
        is_tag = len(atom) > 2 and atom[0] in "<["
        if atom.isspace() or atom in SLOTS or (is_tag and _STRONG.search(mark)):
            break
        mark += atom
        if is_tag:
            break
    return mark if _STRONG.search(mark) else ""


def shared_start(first: str, second: str) -> str:
    """Return the atoms with which both texts begin."""
    found = ""
    for one, other in zip(atoms(first), atoms(second), strict=False):
        if one != other:
            break
        found += one
    return found


def shared_end(first: str, second: str) -> str:
    """Return the atoms with which both texts end; a number that counts on in `second` is INDEX."""
    found = ""
    for one, other in zip(reversed(atoms(first)), reversed(atoms(second)), strict=False):
        if one.isdecimal() and other.isdecimal() and int(one) + 1 == int(other):
            one = other = INDEX
        if one != other:
            break
        found = one + found
    return found


def without(text: str, literals: Sequence[str]) -> str:
    """Return a text without the literals with which it begins, in this order."""
    for literal in literals:
        if literal and text.lstrip().startswith(literal.strip()):
            text = text.lstrip().removeprefix(literal.strip())
    return text
