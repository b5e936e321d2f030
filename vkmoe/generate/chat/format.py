"""This module says how one model writes conversations: by which template, with which marks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.tools import ToolFamily, family_of

_JOINED = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class ChatFormat:
    """Holds the template of a model, and how it writes thoughts and calls of tools.

    For a model without a template of its own there is one that joins all texts: so it goes on with
    the last message, as it would with a prompt.
    """

    template: ChatTemplate
    family: ToolFamily
    is_own: bool  # the template is the model's

    @property
    def without_thoughts(self) -> ChatFormat:
        """Return the format by which thoughts are part of the answer, marks and all."""
        form = replace(self.family.form, thought=None)
        return replace(self, family=replace(self.family, form=form))

    @classmethod
    def of(cls, own: ChatTemplate | None, tokenizer: Tokenizer) -> ChatFormat:
        """Find the format of a model with this template of its own, or without one."""
        template = own or _joined()
        return cls(template, family_of(template.source, tokenizer), own is not None)


@cache
def _joined() -> ChatTemplate:
    return ChatTemplate(_JOINED)
