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
    names_of_fussy_templates,
    prepared_messages,
    prepared_tools,
)
from vkmoe.generate.chat.process import TIME_LIMIT, TemplateFailed, TemplateProcess
from vkmoe.generate.chat.unwritten import writer_of
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import GgufFile

_PROBE = {"probe_key": "probe value"}
_HINT = "use `vkmoe generate` with a plain prompt"


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that a template may use, by the names that it knows them by."""
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: tokenizer.token_text(i) for name, i in named.items() if i is not None}


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
        source = instead or file.get("tokenizer.chat_template", str, "")
        return cls(source, special_tokens(tokenizer))

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
        names |= {"messages": ready, "tools": prepared_tools(tools)}
        if "xml_tools" in self.source:  # the name that SmolLM3 has for them
            names.setdefault("xml_tools", names["tools"])
        return self._rendered({**names, "add_generation_prompt": add_generation_prompt})

    def _rendered(self, names: dict[str, Any]) -> str:
        now = datetime.datetime.now()
        try:
            more = names_of_fussy_templates(names["tools"])
            return self._process.render(names, now.isoformat(), more)
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
            one_text="content and thinking" in self.source,
        )

    @cached_property
    def _form_of_calls(self) -> MessageForm:
        """Return the form in which the template writes calls.

        Some want arguments as JSON texts: objects fail, or come out as Python's. Some write calls
        only where there is no content, and some write none. Templates do not say it, so all is
        tried with a call.
        """
        sound = False  # a call does not fail, and does not show
        shown: list[MessageForm] = []  # it does, though maybe not beside a text
        for is_bare, as_text in itertools.product((False, True), repeat=2):
            form = MessageForm(text_arguments=as_text, bare_calls=is_bare)
            text = self._with_call(form)
            if text is None or repr(_PROBE) in text:
                continue
            sound = sound or "probe" not in text
            if "probe_key" in text:
                shown.append(form)
                if "probe_key" in (self._with_call(form, "Text.") or ""):
                    return form
        if shown:
            return shown[0]
        return MessageForm(writer=writer_of(self.source)) if sound else MessageForm()

    def _with_call(self, form: MessageForm, content: str = "") -> str | None:
        """Return how a call beside a text is written, None if the template fails."""
        function = {"name": "probe", "arguments": _PROBE}
        call = {"id": "call12345", "type": "function", "function": function}
        messages: list[Message] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        names = {"tools": None, "documents": None, **self._special_tokens, **self._unasked}
        try:
            return self._rendered(names | {"messages": prepared_messages(messages, form)})
        except PromptError:
            return None
