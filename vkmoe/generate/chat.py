"""This module writes a conversation as a prompt and sorts the reply to it into channels.

For the prompt it owns what the Jinja template inside a model file is given, the sandbox it runs in
and what its failures mean. Of replies it owns the marks of gpt-oss (OpenAI's harmony format), which
tell what it thinks aloud from what it answers: a reply is messages such as
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.
It does not own the conversation (the caller) nor tokens (tokenizer.py), and it imports Jinja only
when a template is used.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from vkmoe.errors import ModelFileError, PromptError, UnsupportedModelError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from vkmoe.generate.tokenizer import Tokenizer

__all__ = ["FINAL", "ChannelText", "ChatTemplate", "ReplyChannels"]

Message = Mapping[str, Any]


class ChatTemplate:
    """Turns messages into a prompt by a compiled chat template.

    `special_tokens` (such as {"bos_token": "<s>"}) are names the template may use.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`. Raises UnsupportedModelError when it is missing or no valid Jinja."""
        if not source:
            raise UnsupportedModelError(
                "the model has no chat template", "use `vkmoe generate` with a plain prompt"
            )
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        from jinja2 import TemplateError

        try:
            self._template = _sandbox().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise UnsupportedModelError(
                f"the model's chat template cannot be used: {_first_line(error)}",
                "use `vkmoe generate` with a plain prompt",
            ) from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """Compile a model file's template; raises ModelFileError if it is not text."""
        source = metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise ModelFileError("the model file's tokenizer.chat_template is not text")
        named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        return cls(
            source, {name: tokenizer.token_text(i) for name, i in named.items() if i is not None}
        )

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Return the prompt for `messages`, each with "role" and "content".

        `kwargs` are further names for the template, such as `enable_thinking=False`.
        Raises PromptError with what the template says it does not like.
        """
        names: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except Exception as error:  # a template is a foreign program: it can raise anything
            raise PromptError(
                f"the model's chat template failed: {_first_line(error)}",
                "it may not allow these roles, their order, or these --chat-template-kwargs",
            ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _sandbox() -> ImmutableSandboxedEnvironment:
    """Make an environment in which a template can neither change objects nor reach outside.

    It has the settings, filters and functions that Hugging Face transformers gives its templates.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """Lets `{% generation %}...{% endgeneration %}` only mark the assistant's text."""

        tags = {"generation"}  # noqa: RUF012  # declared so by the base class

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


# ----- the channels of a reply -----

FINAL = "final"
_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_LONGEST = max(map(len, _MARKS))


class ChannelText(NamedTuple):
    """Holds a part of a reply; `channel` is FINAL for what is meant for the user."""

    channel: str
    text: str


class ReplyChannels:
    """Sorts the text of one reply by channel while it arrives.

    The texts joined are the reply without its marks and headers. Replies of models without such
    marks are one answer.
    """

    def __init__(self, has_channels: bool) -> None:
        """Begin a reply; `has_channels`: the model's vocabulary has the marks."""
        self._has_channels = has_channels
        self._held = ""  # may yet become a mark
        self._header: str | None = None  # of the message to come; None: inside a message
        self._channel = FINAL

    def feed(self, text: str) -> list[ChannelText]:
        """Return the parts that are certain with this text. Mutates."""
        if not self._has_channels:
            return list(self._plain(text))
        self._held += text
        parts = list(self._sorted())
        n_certain = len(self._held) - self._possible_mark()
        parts += self._plain(self._held[:n_certain])
        self._held = self._held[n_certain:]
        return parts

    def finish(self) -> list[ChannelText]:
        """Return what is left when the reply is over."""
        held, self._held = self._held, ""
        return list(self._plain(held))

    def _sorted(self) -> Iterator[ChannelText]:
        """Return all up to the last whole mark."""
        while mark := _MARK.search(self._held):
            yield from self._plain(self._held[: mark.start()])
            self._held = self._held[mark.end() :]
            self._act(mark.group())

    def _act(self, mark: str) -> None:
        if mark == "<|message|>":
            words = (self._header or "").split()
            self._channel, self._header = words[0] if words else FINAL, None
        elif mark == "<|constrain|>":  # the rest of the header says what form a message has
            self._header = f"{self._header or ''} "
        else:
            self._header = ""

    def _plain(self, text: str) -> Iterator[ChannelText]:
        if self._header is not None:
            self._header += text
        elif text:
            yield ChannelText(self._channel, text)

    def _possible_mark(self) -> int:
        """Return the length of the longest end of the held text that begins a mark."""
        for n in range(min(len(self._held), _LONGEST - 1), 0, -1):
            if any(mark.startswith(self._held[-n:]) for mark in _MARKS):
                return n
        return 0
