"""This module knows the ways in which models write thoughts and tool calls, and which is whose.

It owns the marks of each way and how a model's is found. How calls are read is the subject of
tags.py, marked.py and harmony.py, how they are demanded that of grammar.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.tools.cursor import BLANKS
from vkmoe.generate.tools.harmony import CHANNEL, HARMONY_MARKS, MESSAGE
from vkmoe.generate.tools.marked import DEEPSEEK, MISTRAL, PYTHON_TAG
from vkmoe.generate.tools.tags import CLOSE, FUNCTION, OPEN

FamilyName = Literal[
    "hermes",
    "qwen-coder",
    "harmony",
    "mistral",
    "mistral-args",
    "deepseek-v3",
    "deepseek-v3.1",
    "llama",
    "none",
]

# All marks of each, that of a call first.
_MARKS: dict[FamilyName, tuple[str, ...]] = {
    "hermes": (OPEN, CLOSE),
    "qwen-coder": (OPEN, CLOSE),
    "harmony": HARMONY_MARKS,
    "mistral": MISTRAL.all,
    "mistral-args": MISTRAL.all,
    "deepseek-v3": DEEPSEEK.all,
    "deepseek-v3.1": DEEPSEEK.all,
    "llama": (PYTHON_TAG,),
    "none": (),
}
_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class ToolFamily:
    """Says how a model writes thoughts and calls.

    `thought` are the marks around a thought, None where a model has none, or has channels.
    `mark_ids` are the ids of those marks that are special tokens, `shown` those that a reply hides:
    as `Request.shown` they come out as text.
    """

    name: FamilyName
    thought: tuple[str, str] | None = None
    mark_ids: dict[str, int] = field(default_factory=dict)
    shown: frozenset[int] = frozenset()

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Return the marks with which calls begin; small models forget the first of two."""
        return _MARKS[self.name][:1] + ((FUNCTION,) if self.name == "qwen-coder" else ())

    def begins_in_thought(self, prompt: str) -> bool:
        """Say whether a rendered prompt ends inside a thought, which the template has opened."""
        return self.thought is not None and prompt.rstrip(BLANKS).endswith(self.thought[0])


def family_of(template_source: str, tokenizer: Tokenizer) -> ToolFamily:
    """Find the family of a model by its chat template and its vocabulary.

    A vocabulary with channels is harmony's. Else the template decides, by the marks with which it
    writes calls of earlier turns: `<tool_call>` is Hermes's, and Qwen-Coder's where `<function=` is
    there too. `[TOOL_CALLS]` is Mistral's, newer with `[ARGS]`. DEEPSEEK.calls is DeepSeek's, older
    with a block of code. `<|python_tag|>`, or "ipython" with "parameters", is Llama's. Where the
    template has none of them, the model calls no tools.
    Thoughts stand between the marks that the template or the vocabulary names.
    """
    name = _name(template_source, tokenizer)
    thought = None
    if name != "harmony":
        pairs = [pair for pair in _THOUGHTS if _has_thought(pair, template_source, tokenizer)]
        thought = pairs[0] if pairs else None
    marks = (*_MARKS[name], *(thought or ()))
    ids = {mark: tokenizer.special_id(mark) for mark in marks}
    ends = tokenizer.end_ids
    mark_ids = {mark: i for mark, i in ids.items() if i is not None and i not in ends}
    return ToolFamily(name, thought, mark_ids, tokenizer.control_ids & set(mark_ids.values()))


def _name(source: str, tokenizer: Tokenizer) -> FamilyName:
    if tokenizer.has_channels or (CHANNEL in source and MESSAGE in source):
        return "harmony"
    if OPEN in source:
        return "qwen-coder" if FUNCTION in source else "hermes"
    if MISTRAL.calls in source:
        return "mistral-args" if MISTRAL.arguments in source else "mistral"
    if DEEPSEEK.calls in source:
        return "deepseek-v3" if "```json" in source else "deepseek-v3.1"
    if PYTHON_TAG in source or ("ipython" in source and '"parameters"' in source):
        return "llama"
    return "none"


def _has_thought(pair: tuple[str, str], source: str, tokenizer: Tokenizer) -> bool:
    """Say whether the template writes these marks, or they are tokens of the model."""
    return pair[1] in source or all(tokenizer.special_id(mark) is not None for mark in pair)
