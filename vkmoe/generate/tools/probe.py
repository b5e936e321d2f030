"""This module finds out how a chat template has a model write replies, by trying it out.

It renders a few conversations whose texts, names and arguments are known, and looks at what stands
around them. It owns these conversations and what is concluded from all but the calls (infer.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

from vkmoe.errors import PromptError
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.generate.tools.forms import ReplyForm, atoms, parts, shared_end, shared_start, without
from vkmoe.generate.tools.infer import CALLS, TOOLS, Heads, call_form

_QUESTION, _TEXT, _THOUGHT = "zquestionz", "ztextz", "zthoughtz"
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # where a template writes none
_ASKED = {"role": "user", "content": _QUESTION}


def reply_form(chat: ChatTemplate) -> ReplyForm:
    """Return how a template writes replies. It takes a few renderings."""
    return _Probe(chat).form()


class _Probe:
    """Holds the renderings of a template from the end of a question on, "" where it fails."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._prompt = self._rendered(add_generation_prompt=True)
        self._text = self._rendered(content=_TEXT)
        self._thought = self._rendered(content=_TEXT, reasoning_content=_THOUGHT)
        self._calls = self._rendered(tool_calls=CALLS)
        self._one = self._rendered(tool_calls=CALLS[:1])
        self._text_call = self._rendered(content=_TEXT, tool_calls=CALLS[:1])
        self._thought_call = self._rendered(reasoning_content=_THOUGHT, tool_calls=CALLS[:1])
        replies = list(filter(None, [self._text, self._calls, self._one, self._thought]))
        self._header = reduce(shared_start, replies) if replies else self._prompt
        if not self._prompt.endswith(self._header):  # all of them begin with some mark
            self._header = shared_start(self._header, self._prompt)

    def _rendered(self, add_generation_prompt: bool = False, **reply: Any) -> str:
        messages: list[Mapping[str, Any]] = [_ASKED]
        if reply:
            messages.append({"role": "assistant", "content": "", **reply})
        try:
            text = self._chat.render(messages, add_generation_prompt, tools=TOOLS)
        except PromptError:
            return ""
        return text[text.rfind(_QUESTION) + len(_QUESTION) :]

    def form(self) -> ReplyForm:
        """Return the form of replies."""
        thought = self._thought_marks()
        content, end = self._content_marks(thought)
        heads = Heads(self._header, (*thought, *content), end.strip())
        call, given, ends = call_form(heads, self._calls, self._one)
        first, close = thought
        if given and content[0]:
            content = (given + content[0], content[1] or close.partition(given)[0])
        if first and not self._header.rstrip().endswith(first):
            first = given + first
            close = _cut(first, close)
        first, close = first.strip(), close.strip()
        return ReplyForm(
            (first, close) if first and close else None,
            (content[0].strip(), content[1].strip()),
            tuple(dict.fromkeys(each.strip() for each in (end, *ends) if each.strip())),
            given,
            self._header.strip(),
            call,
        )

    def _thought_marks(self) -> tuple[str, str]:
        """Return what stands around a thought, and maybe more behind it; "" for nothing."""
        reply = self._thought
        called = self._thought_call
        before, found, behind = (reply if _THOUGHT in reply else called).partition(_THOUGHT)
        if not found:
            source = self._chat.source
            return next((pair for pair in THOUGHTS if pair[1] in source), ("", ""))
        close = behind.partition(_TEXT)[0]
        name = CALLS[0]["function"]["name"]
        if close == behind:  # a call follows in place of an answer
            close = behind.partition(name)[0]
            head = self._one.partition(name)[0]
            cut = close[: len(close) - len(shared_end(close, head))]
            close = cut if cut.strip() else (parts(close) or ("",))[0]
        elif (shared := shared_start(close, called.partition(_THOUGHT)[2])).strip():
            close = shared
        first = before.removeprefix(self._header)
        if not first.strip():  # the prompt has it
            first = self._end_like(close) or self._prompt.removeprefix(self._header)
        return first, _cut(first, close)

    def _end_like(self, close: str) -> str:
        """Return the end of the header that names the same thing as the mark `close`."""
        header = atoms(self._header.rstrip())
        for i in range(len(header) - 1, -1, -1):
            for place, atom in enumerate(parts(close)):
                if any(word in atom for word in re.findall(r"\w+", header[i])):
                    return "".join(header[max(i - place, 0) :]).strip()
        return ""

    def _content_marks(self, thought: tuple[str, str]) -> tuple[tuple[str, str], str]:
        """Return what stands around an answer, and what ends it."""
        before, found, end = self._text.partition(_TEXT)
        if not found:
            return ("", ""), ""
        first, close = without(before.removeprefix(self._header), thought), ""
        if first.strip():
            behind = self._text_call.partition(_TEXT)[2]
            shared = shared_end(end, self._one)
            close = shared_start(end, behind) if behind else end[: len(end) - len(shared)]
        return (first if first.strip() else "", close), end.removeprefix(close)


def _cut(first: str, close: str) -> str:
    """Return the end of a part without the beginning of another, which begins as the part did."""
    tag = (parts(first) or ("",))[0]
    place = close.find(tag, 1) if len(tag) > 2 and tag[0] in "<[" else -1
    return close[:place] if place > 0 else close
