"""Messages to prompt text, by the Jinja template inside a model file.

Owns what is given to a template and what its failures mean. Does not own the sandbox it runs in
(template_sandbox.py, with Jinja, imported only when a template is used), the conversation (the
caller) nor tokens (tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        from jinja2 import TemplateError

        from vkmoe.generate.template_sandbox import sandbox

        try:
            self._template = sandbox().from_string(source)
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


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
