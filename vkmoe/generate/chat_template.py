"""Messages to prompt text, by the Jinja template inside a model file.

Owns the sandbox the template runs in and the functions it may call, the same ones that Hugging
Face transformers offers. Does not own the conversation (the caller) nor tokens (tokenizer.py).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from vkmoe.errors import ModelFileError, PromptError, UnsupportedModelError
from vkmoe.generate.tokenizer import Tokenizer

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template.

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
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
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
        """The prompt for `messages`, each with "role" and "content".

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


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text; it prints as it is."""

    tags = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
