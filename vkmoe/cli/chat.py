"""This module is `vkmoe chat`: a conversation through the model's own chat template."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkmoe.cli.generate import note_statistics, reply_limits, watched
from vkmoe.cli.notes import note, opened
from vkmoe.cli.options import (
    IgnoreEos,
    MaxTokens,
    Model,
    Positional,
    Quiet,
    Stop,
    Verbose,
    chosen_model,
    config_options,
    option,
)
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import PromptError, UsageError
from vkmoe.generate.prompts import RESERVED

if TYPE_CHECKING:
    from vkmoe.generate.tools import ReplyEvent
    from vkmoe.llm import LLM

__all__ = ["chat"]


@config_options
def chat(
    context: typer.Context,
    *,
    positional: Positional = None,
    model: Model = None,
    system: Annotated[str | None, option("--system", help="The system message.")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        option(
            "--chat-template-kwargs",
            metavar="JSON",
            help="Names for the chat template, such as '{\"enable_thinking\": false}' for Qwen3.",
        ),
    ] = None,
    max_tokens: MaxTokens = -1,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    sampling: SamplingConfig,
    engine: EngineConfig,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model. /clear begins anew, /exit or Ctrl-D ends, Ctrl-C stops a reply.

    What gpt-oss thinks before it answers goes to stderr; --quiet hides it.
    """
    chosen = chosen_model(context, positional, model)
    names = template_names(chat_template_kwargs)
    limits = reply_limits(max_tokens, stop, ignore_eos)
    with opened(chosen, engine, verbose, quiet) as llm:
        talk = Conversation(llm, system, names, sampling, limits, quiet)
        if not quiet:
            note("/clear begins anew, /exit ends, Ctrl-C stops a reply")
        _loop(talk, shows_statistics=verbose)


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


@dataclass
class Conversation:
    """Holds the messages so far, and gives one reply after the other."""

    llm: LLM
    system: str | None
    names: dict[str, Any]
    sampling: SamplingConfig
    limits: dict[str, Any]
    quiet: bool = False  # neither thoughts nor progress on stderr
    messages: list[dict[str, str]] = field(default_factory=list)
    _thinks: bool = False  # stderr shows the thoughts of a reply

    def __post_init__(self) -> None:
        self.template = self.llm.chat_template  # complains now if there is none
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

        Raises PromptError, with the message taken back, when it cannot be answered.
        """
        from vkmoe.generate.tools import ReplyParser, ToolFamily

        self._add("user", text)
        # Other models show their thoughts as they write them.
        parser = ReplyParser(ToolFamily("harmony" if self.llm.tokenizer.has_channels else "none"))
        answer: list[str] = []
        self._thinks = False
        try:
            prompt = self.template.render(self.messages, **self.names)
            ids = self.llm.tokenizer.encode(prompt, add_special=False)
            has_blank = self.llm.tokenizer.adds_space  # before its first word, not to be shown
            for piece in watched(self.llm, ids, self.sampling, self.limits, self.quiet):
                text = piece.text.removeprefix(" ") if has_blank else piece.text
                has_blank = has_blank and not piece.text
                answer += self._show(parser.feed(text))
            answer += self._show(parser.finish())
        except KeyboardInterrupt:
            note(" [stopped]")
        except PromptError:
            self.messages.pop()
            raise
        typer.echo()
        self._add("assistant", "".join(answer))

    def _show(self, events: Sequence[ReplyEvent]) -> list[str]:
        """Write the answer to stdout and thoughts to stderr. Returns what was answered."""
        from vkmoe.generate.tools import Content, Thought

        for event in events:
            if isinstance(event, Content):
                if self._thinks:
                    sys.stderr.write("\n\n")  # a line between thoughts and answer
                    sys.stderr.flush()
                self._thinks = False
                sys.stdout.write(event.text)
                sys.stdout.flush()
            elif isinstance(event, Thought) and not self.quiet:
                self._thinks = True
                sys.stderr.write(event.text)
                sys.stderr.flush()
        return [event.text for event in events if isinstance(event, Content)]


def _loop(talk: Conversation, shows_statistics: bool) -> None:
    """Read messages until /exit or the end of the input."""
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
            except PromptError as error:
                note(f"error: {error}")
                note(f"hint: {error.hint or 'try /clear'}")
            if shows_statistics and (statistics := talk.llm.last_statistics) is not None:
                note_statistics(talk.llm, statistics.finish_reason)


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
