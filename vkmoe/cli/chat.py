"""This module is `vkmoe chat`: a conversation with a model here, or with one that a server runs.

The loop and what is shown are the same for both; the server's side is the subject of remote.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.cli.generate import note_statistics, watched
from vkmoe.cli.notes import note, opened
from vkmoe.cli.options import (
    Limits,
    ModelChoice,
    Output,
    TemplateChoice,
    config_options,
    is_given,
    is_typed,
)
from vkmoe.cli.remote import RemoteModel
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import PromptError, ServerError, UsageError
from vkmoe.generate.chat.messages import RESERVED
from vkmoe.option_fields import flags_of, long_flag, option

if TYPE_CHECKING:
    from vkmoe.generate.tools import ReplyEvent
    from vkmoe.llm import LLM

# Control characters, with which a text could give orders to the terminal; not \t, \n and \r.
_ORDERS = (*range(9), 11, 12, *range(14, 32), *range(127, 160))
_HARMLESS = dict.fromkeys(_ORDERS, "\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True)
class _Talk(TemplateChoice):
    system: str | None = option(None, "The system message.")
    chat_template_kwargs: str | None = option(
        None,
        "Names for the chat template, such as '{\"enable_thinking\": false}' for Qwen3.",
        metavar="JSON",
    )
    server: str | None = option(
        None,
        "Talk with the model of a running `vkmoe serve`, or of another server with "
        "/v1/chat/completions; none is loaded here.",
        metavar="URL",
    )
    api_key: str | None = option(None, "The key that --server asks for.", metavar="KEY")


_UNLIMITED = Limits(max_tokens=-1)


@config_options
def chat(
    context: typer.Context,
    *,
    which: ModelChoice,
    talk: _Talk,
    limits: Limits = _UNLIMITED,
    sampling: SamplingConfig,
    engine: EngineConfig,
    output: Annotated[Output, ("verbose", "quiet")],
) -> None:
    """Talk with a model. /clear begins anew, /exit or Ctrl-D ends, Ctrl-C stops a reply.

    What models think before they answer goes to stderr, as far as that can be read out of their
    text; --quiet hides it.
    """
    names = template_names(talk.chat_template_kwargs)
    system, verbose, quiet = talk.system, output.verbose, output.quiet
    if talk.server is not None and not _is_local(context, talk.server):
        values = {**vars(sampling), **limits.of_request, "chat_template_kwargs": names}
        remote = RemoteModel(talk.server, talk.api_key, _options(context, values), quiet)
        _talk(Conversation(remote, system, quiet), verbose)
        return
    if talk.api_key is not None and is_typed(context, "api_key"):
        raise UsageError("--api-key is for --server", "name the server: --server URL")
    path, text = which.path(context), talk.text
    with opened(path, engine, verbose, quiet, chat_template=text) as llm:
        local = LocalModel(llm, names, sampling, limits, quiet)
        _talk(Conversation(local, system, quiet), verbose)


def _is_local(context: typer.Context, server: str) -> bool:
    """Say whether what is typed asks for a model here, against a variable that names a server.

    Raises UsageError where both are typed.
    """
    flags = {item.name: long_flag(flags_of(item), True) for item in fields(EngineConfig)}
    flags |= {"positional": "MODEL", "model": "--model", "chat_template": "--chat-template"}
    flags |= {"chat_template_file": "--chat-template-file"}
    typed = [flag for name, flag in flags.items() if is_typed(context, name)]
    if typed and is_typed(context, "server"):
        raise UsageError(
            f"--server and {typed[0]} contradict each other",
            "the server has its own model and options: leave one of them out",
        )
    return bool(typed)


def _options(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request for the options that were given, in OpenAI's names."""
    given = {name: value for name, value in values.items() if is_given(context, name)}
    given = {name: value for name, value in given.items() if value is not None}
    if "temp" in given:
        given["temperature"] = given.pop("temp")
    if "dry_sequence_breakers" in given:
        given["dry_sequence_breakers"] = json.loads(given["dry_sequence_breakers"])
    return given


def template_names(text: str | None) -> dict[str, Any]:
    """Read the JSON object of --chat-template-kwargs. Raises UsageError if it is none."""
    flag = "--chat-template-kwargs (VKMOE_CHAT_TEMPLATE_KWARGS)"
    example = "give a JSON object, such as '{\"enable_thinking\": false}'"
    try:
        names = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON: {error}", example) from error
    if not isinstance(names, dict):
        raise UsageError(f"{flag} is not a JSON object", example)
    if taken := RESERVED.intersection(names):
        raise UsageError(f"{flag} must not set {min(taken)!r}", example)
    return names


class LocalModel:
    """Gives the replies of a model that is loaded here."""

    def __init__(
        self,
        llm: LLM,
        names: dict[str, Any],
        sampling: SamplingConfig,
        limits: Limits,
        quiet: bool,
    ) -> None:
        """Take `names` for the template. Raises UnsupportedModelError where there is none."""
        self._llm, self._names, self._quiet = llm, names, quiet
        self._sampling, self._limits = sampling, limits
        self._template = llm.chat_template

    def reply(self, messages: list[dict[str, str]]) -> Generator[ReplyEvent, None, None]:
        """Yield the reply to these messages; closed early, it ends. Raises PromptError."""
        from vkmoe.generate.tools import ReplyParser, ToolFamily

        tokenizer = self._llm.tokenizer
        # Other models show their thoughts as they write them.
        family = ToolFamily(is_harmony=tokenizer.has_channels)
        parser = ReplyParser(family, drops_blank=tokenizer.adds_space)
        prompt = self._template.render(messages, **self._names)
        ids = tokenizer.encode(prompt, add_special=False)
        for piece in watched(self._llm, ids, self._sampling, self._limits, self._quiet):
            yield from parser.feed(piece.text)
        yield from parser.finish()

    def note_statistics(self) -> None:
        """Write what the last reply took to stderr."""
        if (statistics := self._llm.last_statistics) is not None:
            note_statistics(self._llm, statistics.finish_reason)


@dataclass
class Conversation:
    """Holds the messages so far, and shows one reply after the other."""

    model: LocalModel | RemoteModel
    system: str | None
    quiet: bool = False  # no thoughts on stderr
    messages: list[dict[str, str]] = field(default_factory=list)
    _thinks: bool = False  # stderr shows the thoughts of a reply

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = []
        if self.system is not None:
            self._add("system", self.system)

    def _add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def reply(self, text: str) -> None:
        """Answer one message on stdout; Ctrl-C keeps what was answered so far.

        Raises PromptError and ServerError, with the message taken back, when it cannot be answered.
        """
        self._add("user", text)
        answer: list[str] = []
        self._thinks = False
        try:
            with closing(self.model.reply(self.messages)) as events:
                for event in events:
                    self._show(event, answer)
        except KeyboardInterrupt:
            note(" [stopped]")
        except (PromptError, ServerError):
            self.messages.pop()
            if answer or self._thinks:
                typer.echo(err=not answer)  # the error has a line of its own
            raise
        typer.echo()
        self._add("assistant", "".join(answer))

    def _show(self, event: ReplyEvent, answer: list[str]) -> None:
        """Write a part of the answer to stdout, a thought to stderr. Mutates `answer`."""
        from vkmoe.generate.tools import Content, Thought

        if isinstance(event, Content):
            if self._thinks:
                sys.stderr.write("\n\n")  # a line between thoughts and answer
                sys.stderr.flush()
            self._thinks = False
            answer.append(event.text)  # first: Ctrl-C may come as soon as it is written
            sys.stdout.write(event.text.translate(_HARMLESS) if sys.stdout.isatty() else event.text)
            sys.stdout.flush()
        elif isinstance(event, Thought) and not self.quiet:
            self._thinks = True
            sys.stderr.write(event.text.translate(_HARMLESS))
            sys.stderr.flush()


def _talk(talk: Conversation, shows_statistics: bool) -> None:
    """Read messages until /exit or the end of the input."""
    if not talk.quiet:
        note("/clear begins anew, /exit ends, Ctrl-C stops a reply")
    while (text := _next_message()) is not None:
        command = text.strip()
        if command == "/exit":
            return
        if command == "/clear":
            talk.clear()
            note("the conversation begins anew")
        elif command.startswith("/"):
            note(f"unknown command {command.split()[0]}; there are /clear and /exit")
        elif command:
            try:
                talk.reply(text)
            except (PromptError, ServerError) as error:
                note(f"error: {error}")
                note(f"hint: {error.hint or 'try /clear'}")
            if shows_statistics:
                talk.model.note_statistics()


def _next_message() -> str | None:
    """Read one line of standard input without its end; None when there is no more."""
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        return line.decode("utf-8", "replace").rstrip("\r\n") if line else None
    import readline  # noqa: F401  # gives input() its line editing

    prompt = "> " if sys.stdout.isatty() else ""  # input() would write it into a redirected stdout
    while True:
        try:
            if not prompt:
                typer.echo("> ", nl=False, err=True)
            return input(prompt)
        except EOFError:
            note("")
            return None
        except KeyboardInterrupt:
            note("\n/exit or Ctrl-D ends the conversation")
