"""This module finds the model and the prompt: in arguments, files, standard input.

It owns the rule of exactly one prompt source, and reading it. Values typed on the command line win
over environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from vkmoe.cli.options import typed
from vkmoe.errors import PromptError, UsageError

__all__ = ["chosen_model", "decoded", "prompt_source", "read_prompt", "split_words"]

STDIN = "-"
_ONE_SOURCE = "give exactly one of -p TEXT, -f FILE and - (standard input)"


def split_words(words: Sequence[str]) -> tuple[str | None, bool]:
    """Return the positional MODEL, and whether a `-` asks for standard input, in any order."""
    models = [word for word in words if word != STDIN]
    if len(models) > 1:
        raise UsageError(
            f"more than one model given: {', '.join(models)}", 'a prompt needs -p: -p "some text"'
        )
    return (models[0] if models else None), STDIN in words


def chosen_model(
    context: typer.Context, positional: str | None, option_value: str | None
) -> str | None:
    """Choose MODEL or -m; None for the demo model. Raises UsageError for two of them."""
    if positional is not None and option_value is not None and typed(context, "model"):
        raise UsageError(
            f"two models given: {positional} and -m {option_value}", "name the model once"
        )
    return positional if positional is not None else option_value


def prompt_source(
    context: typer.Context, text: str | None, file: str | None, stdin: bool
) -> tuple[str, str]:
    """Choose the source: ("text", TEXT), ("file", PATH) or ("stdin", "-").

    Raises UsageError unless there is exactly one.
    """
    given = {"text": text, "file": file, "stdin": STDIN if stdin else None}
    sources = [(kind, value) for kind, value in given.items() if value is not None]
    on_line = [item for item in sources if item[0] == "stdin" or typed(context, _OPTION[item[0]])]
    sources = on_line or sources
    if len(sources) != 1:
        problem = "no prompt" if not sources else "more than one prompt"
        raise UsageError(f"{problem} given", _ONE_SOURCE)
    return ("stdin", STDIN) if sources[0] == ("file", STDIN) else sources[0]


_OPTION = {"text": "prompt", "file": "file"}


def read_prompt(source: tuple[str, str]) -> str:
    """Read the text of a prompt. Raises PromptError if it is empty, unreadable or not UTF-8."""
    kind, value = source
    if kind == "stdin":
        text = decoded(sys.stdin.buffer.read(), "on standard input")
    elif kind == "file":
        text = decoded(_file_bytes(value), f"in {value}")
    else:
        text = decoded(os.fsencode(value), "on the command line")
    if not text:
        raise PromptError("the prompt is empty", "give at least one character")
    return text


def decoded(data: bytes, where: str) -> str:
    """Decode UTF-8 bytes. Raises PromptError naming the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the prompt {where} is not valid UTF-8 (byte {error.start})",
            "convert it: iconv -f latin1 -t utf-8",
        ) from error


def _file_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read: {error.strerror}") from error
