"""This module reads files of prompts, and keeps files of replies, both of JSON lines.

A line of prompts is an object with "prompt" (text or token ids) or "messages" (for the chat
template), and what differs from the options of the run: "id", "max_tokens", "stop", "ignore_eos",
"chat_template_kwargs" and the fields of SamplingConfig. It owns what may stand in a line and in
which order that is found out; it runs no model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from io import BufferedWriter
from pathlib import Path
from typing import Any

from vkmoe.closing import Closing
from vkmoe.config import SamplingConfig
from vkmoe.errors import PromptError, VkmoeError
from vkmoe.generate.chat.messages import RESERVED, check_messages
from vkmoe.generate.checks import checked_options, token_ids

Id = str | int
_SAMPLING = frozenset(item.name for item in fields(SamplingConfig))
_LIMITS = frozenset(("max_tokens", "stop", "ignore_eos"))
_OTHERS = frozenset(("id", "prompt", "messages", "chat_template_kwargs"))
_EXAMPLE = 'a line is such as {"id": "a", "prompt": "def f():", "max_tokens": 64}'


@dataclass(frozen=True)
class PromptLine:
    """Holds one line of a file of prompts."""

    number: int  # from 1
    id: Id
    prompt: str | tuple[int, ...] | None  # None: messages
    messages: tuple[Mapping[str, Any], ...]
    template_names: Mapping[str, Any]
    sampling: SamplingConfig
    limits: Mapping[str, Any]  # those of `LLM.request`


def read_prompts(
    path: Path, sampling: SamplingConfig, limits: Mapping[str, Any]
) -> list[PromptLine]:
    """Read all lines of a file, or of standard input ("-").

    `sampling` and `limits` hold where a line says nothing else. Empty lines are passed over. The id
    of a line without one is its number. Raises PromptError, which names the line, for the first
    that is damaged, and for a file without any.
    """
    lines: list[PromptLine] = []
    numbers: dict[Id, int] = {}
    for number, text in _numbered(path):
        try:
            line = _line(number, _object(text), sampling, limits)
        except VkmoeError as error:
            raise PromptError(f"{path}, line {number}: {error}", error.hint) from error
        if line.id in numbers:
            raise PromptError(
                f"{path}, line {number}: the id {line.id!r} is that of line {numbers[line.id]}",
                "every line needs an id of its own; without ids they are numbered",
            )
        numbers[line.id] = number
        lines.append(line)
    if not lines:
        raise PromptError(f"{path} has no prompts", _EXAMPLE)
    return lines


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, with their numbers from 1."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}", "") from error
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                message = f"{path}, line {number}: not UTF-8 text"
                raise PromptError(message, "save the file as UTF-8") from error


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"no JSON: {error}", _EXAMPLE) from error
    if not isinstance(found, dict):
        raise PromptError("no JSON object", _EXAMPLE)
    return found


def _line(
    number: int, found: dict[str, Any], sampling: SamplingConfig, limits: Mapping[str, Any]
) -> PromptLine:
    """Check what a line says. Raises PromptError, UsageError."""
    known = _SAMPLING | _LIMITS | _OTHERS
    if unknown := sorted(set(found) - known):
        raise PromptError(f"unknown name {unknown[0]!r}", f"known are {', '.join(sorted(known))}")
    if ("prompt" in found) == ("messages" in found):
        raise PromptError('it needs "prompt" or "messages", one of them', _EXAMPLE)
    name = found.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise PromptError(f"the id is {name!r}", "use a text or a whole number")
    names = found.get("chat_template_kwargs", {})
    if not isinstance(names, dict):
        raise PromptError("chat_template_kwargs is no JSON object", _EXAMPLE)
    if taken := RESERVED.intersection(names):
        raise PromptError(f"chat_template_kwargs must not set {min(taken)!r}", _EXAMPLE)
    changes = {key: value for key, value in found.items() if key in _SAMPLING}
    return PromptLine(
        number=number,
        id=name,
        prompt=_prompt(found["prompt"]) if "prompt" in found else None,
        messages=_messages(found["messages"]) if "messages" in found else (),
        template_names=names,
        sampling=replace(sampling, **changes),
        limits={**limits, **_limits(found)},
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    prompt = value if isinstance(value, str) else tuple(token_ids(value))
    if not prompt:
        raise PromptError("the prompt is empty", _EXAMPLE)
    return prompt


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    check_messages(value)
    if not value:
        raise PromptError("messages is an empty list", _EXAMPLE)
    return tuple(value)


def _limits(found: Mapping[str, Any]) -> dict[str, Any]:
    """Check what ends the reply; -1 tokens mean no limit. Raises UsageError."""
    limits = {name: found[name] for name in _LIMITS if name in found}
    if limits.get("max_tokens") == -1:
        limits["max_tokens"] = None
    return checked_options(limits, n_vocab=0)


class RepliesFile(Closing):
    """Keeps a file of replies, one line each, which a later run goes on with."""

    def __init__(self, path: Path | None) -> None:
        """Read which prompts have a reply; None is standard output, where none has.

        A last line that was not written whole counts as none. Raises PromptError for other lines
        that are damaged.
        """
        self._path = path
        self._file: BufferedWriter | None = None
        self.ids: set[Id] = set()
        data = path.read_bytes() if path is not None and path.is_file() else b""
        self._n_bytes = data.rfind(b"\n") + 1  # of whole lines
        for number, line in enumerate(data[: self._n_bytes].splitlines(), 1):
            try:
                self.ids.add(json.loads(line)["id"])
            except (ValueError, RecursionError, KeyError, TypeError) as error:
                raise PromptError(
                    f"{path}, line {number}: no reply of an earlier run",
                    "give another --output, or remove that line",
                ) from error

    def write(self, reply: Mapping[str, Any]) -> None:
        """Append one line, behind the last whole one. Raises VkmoeError."""
        # Escaped, so that an id that is no text in UTF-8 is the same when it is read again.
        text = json.dumps(reply, ensure_ascii=not str(reply.get("id")).isascii()) + "\n"
        if self._path is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            if self._file is None:
                self._file = self._opened(self._path)
            self._file.write(text.encode("utf-8", "replace"))
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is in the buffer cannot be written either
                self.close()
            raise VkmoeError(
                f"the replies {self._path} cannot be written: {error.strerror}",
                "give another --output, or make room: a later run goes on where this one ended",
            ) from error

    def _opened(self, path: Path) -> BufferedWriter:
        file = path.open("ab")
        if path.is_file():
            file.truncate(self._n_bytes)
        return file

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
