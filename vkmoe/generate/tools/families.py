"""This module finds out how a model writes thoughts and tool calls, by its template and tokens.

It owns the two forms that no template shows: that of OpenAI's harmony (harmony.py), and the mark of
Llama's models. All others come from renderings (probe.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from vkmoe.generate.chat.template import ChatTemplate, special_tokens
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.tools.cursor import BLANKS
from vkmoe.generate.tools.forms import ReplyForm
from vkmoe.generate.tools.harmony import CHANNEL, HARMONY_MARKS, MESSAGE
from vkmoe.generate.tools.probe import THOUGHTS, reply_form

# Llama's models may write it before a call, which their templates write without.
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolFamily:
    """Says how a model writes thoughts and calls: in its `form`, or in OpenAI's harmony.

    `mark_ids` are the ids of the marks of its form that are special tokens, `shown` those that a
    reply hides: as `Request.shown` they come out as text.
    """

    form: ReplyForm = field(default_factory=ReplyForm)
    is_harmony: bool = False
    mark_ids: dict[str, int] = field(default_factory=dict)
    shown: frozenset[int] = frozenset()

    @property
    def thought(self) -> tuple[str, str] | None:
        """Return the marks around a thought, None where a model has none, or has channels."""
        return self.form.thought

    @property
    def has_thoughts(self) -> bool:
        """Say whether a reply may have thoughts."""
        return self.is_harmony or self.thought is not None

    @property
    def has_calls(self) -> bool:
        """Say whether the model's own replies may have calls."""
        return self.is_harmony or self.form.call is not None

    def begins_in_thought(self, prompt: str) -> bool:
        """Say whether a rendered prompt ends inside a thought, which the template has opened."""
        return self.thought is not None and prompt.rstrip(BLANKS).endswith(self.thought[0])


def family_of(template_source: str, tokenizer: Tokenizer) -> ToolFamily:
    """Find the family of a model by its chat template and its vocabulary.

    A vocabulary with channels is harmony's. Else the template decides, by what it writes of known
    replies; that is found once for each template. Raises UnsupportedModelError for a template that
    cannot be used.
    """
    if tokenizer.has_channels:
        family = ToolFamily(is_harmony=True)
    else:
        family = _found_once(template_source, tuple(special_tokens(tokenizer).items()))
    form = family.form
    if not family.has_thoughts:
        known = [p for p in THOUGHTS if all(tokenizer.special_id(m) is not None for m in p)]
        form = replace(form, thought=known[0]) if known else form
    literals = HARMONY_MARKS if family.is_harmony else form.literals()
    parts = [part for text in literals for part in tokenizer.parts(text)]
    ids = {part for part in parts if isinstance(part, int)} - tokenizer.end_ids
    marks = {tokenizer.token_text(i): i for i in sorted(ids)}
    return replace(family, form=form, mark_ids=marks, shown=tokenizer.control_ids & ids)


def family_of_template(chat: ChatTemplate) -> ToolFamily:
    """Find the family of a chat template by itself. It takes a few renderings."""
    if CHANNEL in chat.source and MESSAGE in chat.source:
        return ToolFamily(is_harmony=True)
    form = reply_form(chat)
    call = form.call
    if call and call.object and not (call.mark or call.between.strip()):
        call = replace(call, tag=PYTHON_TAG, between="; ")
    return ToolFamily(replace(form, call=call))


@lru_cache(maxsize=64)
def _found_once(source: str, tokens: tuple[tuple[str, str], ...]) -> ToolFamily:
    return family_of_template(ChatTemplate(source, dict(tokens))) if source else ToolFamily()
