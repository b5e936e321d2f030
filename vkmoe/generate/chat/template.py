"""This module writes a conversation as a prompt, by the Jinja template inside a model file.

It owns what the template is given and what its failures mean. It does not own the conversation (the
caller), the forms of messages (messages.py), the process in which the template runs
(process.py), nor tokens (../text).
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from vkmoe.errors import PromptError, UnsupportedModelError
from vkmoe.generate.chat.messages import (
    Message,
    MessageForm,
    check_messages,
    prepared_messages,
    prepared_tools,
)
from vkmoe.generate.chat.process import TIME_LIMIT, TemplateFailed, TemplateProcess
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import GgufFile

_PROBE = {"probe_key": "probe value"}
_HINT = "use `vkmoe generate` with a plain prompt"


class ChatTemplate:
    """Turns messages into a prompt by a compiled chat template, whose text is `source`.

    `special_tokens` (such as {"bos_token": "<s>"}) are names the template may use. It may be used
    on any thread.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        seconds: float = TIME_LIMIT,
    ) -> None:
        """Compile `source`. Raises UnsupportedModelError when it is empty or no valid Jinja.

        A rendering may take `seconds`.
        """
        if not source:
            raise UnsupportedModelError("the model has no chat template", _HINT)
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._process = TemplateProcess(source, seconds)
        except TemplateFailed as error:
            raise UnsupportedModelError(
                f"the model's chat template cannot be used: {error}", _HINT
            ) from error

    @classmethod
    def from_file(
        cls, file: GgufFile, tokenizer: Tokenizer, instead: str | None = None
    ) -> ChatTemplate:
        """Compile a model file's template, or another one in its place.

        Raises ModelFileError if the file's is not text.
        """
        named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        texts = {name: tokenizer.token_text(i) for name, i in named.items() if i is not None}
        return cls(instead or file.get("tokenizer.chat_template", str, ""), texts)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt for `messages`, each with "role" and "content", as OpenAI's API has it.

        They may have "tool_calls" and "reasoning_content"; `tools` are those that the model may
        call. `kwargs` are further names for the template, such as `enable_thinking=False`.
        Raises PromptError with what the template says it does not like, for a rendering that takes
        too long, and for messages without a form that it could be given.
        """
        check_messages(messages)
        ready = prepared_messages(messages, self._form(messages))
        names: dict[str, Any] = {
            "documents": None,
            **self._special_tokens,
            **self._unasked,
            **kwargs,
        }
        names |= {"messages": ready, "tools": prepared_tools(tools, self.source)}
        return self._rendered({**names, "add_generation_prompt": add_generation_prompt})

    def _rendered(self, names: dict[str, Any]) -> str:
        try:
            return self._process.render(names, datetime.datetime.now().isoformat())
        except TemplateFailed as error:
            raise PromptError(
                f"the model's chat template failed: {error}",
                "it may not allow these roles, their order, or these --chat-template-kwargs",
            ) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(
                f"messages and names for the chat template are not JSON: {error}",
                "give texts, numbers, lists and objects, not nested too deeply",
            ) from error

    @property
    def _unasked(self) -> dict[str, Any]:
        """Return names that templates take for granted: today, and that the model may think.

        Of those that ask whether `enable_thinking` is defined, each has its own default.
        """
        today = datetime.datetime.now()
        names = {"date_string": f"{today:%d %b %Y}", "datetime": f"{today:%b %d %Y}"}
        asks = re.search(r"enable_thinking\s*(is\s|\|\s*default)", self.source)
        return names if asks else names | {"enable_thinking": True}

    def _form(self, messages: Sequence[Message]) -> MessageForm:
        """Return the form in which the template takes messages."""
        has_calls = any(message.get("tool_calls") for message in messages)
        return (self._form_of_calls if has_calls else MessageForm())._replace(
            short_ids="length != 9" in self.source,
            thinking="message.thinking" in self.source,
        )

    @cached_property
    def _form_of_calls(self) -> MessageForm:
        """Return the form in which the template writes calls.

        Some want arguments as JSON texts: objects fail, or come out as Python's. Some write calls
        only where the content is none. Templates do not say it, so all is tried with a call.
        """
        sound: list[MessageForm] = []
        for is_bare, as_text in itertools.product((False, True), repeat=2):
            form = MessageForm(text_arguments=as_text, bare_calls=is_bare)
            text = self._with_call(form)
            if text is None or repr(_PROBE) in text:
                continue
            if "probe_key" in text:
                return form
            sound.append(form)
        return sound[0] if sound else MessageForm()

    def _with_call(self, form: MessageForm) -> str | None:
        """Return how a call is written, None if the template fails."""
        function = {"name": "probe", "arguments": _PROBE}
        call = {"id": "call12345", "type": "function", "function": function}
        messages: list[Message] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [call]},
        ]
        names = {"tools": None, "documents": None, **self._special_tokens, **self._unasked}
        try:
            return self._rendered(names | {"messages": prepared_messages(messages, form)})
        except PromptError:
            return None
