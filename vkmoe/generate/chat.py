"""This module writes a conversation as a prompt, by the Jinja template inside a model file.

It owns what the template is given, the sandbox it runs in and what its failures mean. It does not
own the conversation (the caller) nor tokens (tokenizer.py).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vkmoe.errors import PromptError, UnsupportedModelError
from vkmoe.generate.tokenizer import Tokenizer
from vkmoe.gguf_file import GgufFile

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]


class ChatTemplate:
    """Turns messages into a prompt by a compiled chat template.

    `special_tokens` (such as {"bos_token": "<s>"}) are names the template may use.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`. Raises UnsupportedModelError when it is empty or no valid Jinja."""
        self.source = source
        hint = "use `vkmoe generate` with a plain prompt"
        if not source:
            raise UnsupportedModelError("the model has no chat template", hint)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _sandbox().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise UnsupportedModelError(
                f"the model's chat template cannot be used: {_first_line(error)}", hint
            ) from error

    @classmethod
    def from_file(cls, file: GgufFile, tokenizer: Tokenizer) -> ChatTemplate:
        """Compile a model file's template; raises ModelFileError if it is not text."""
        named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        texts = {name: tokenizer.token_text(i) for name, i in named.items() if i is not None}
        return cls(file.get("tokenizer.chat_template", str, ""), texts)

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


class _GenerationBlock(Extension):
    """Lets `{% generation %}...{% endgeneration %}` only mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _sandbox() -> ImmutableSandboxedEnvironment:
    """Make an environment in which a template can neither change objects nor reach outside.

    It has the settings, filters and functions that Hugging Face transformers gives its templates.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
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
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
