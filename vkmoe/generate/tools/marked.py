"""This module reads tool calls behind the marks of Mistral, DeepSeek and Llama.

[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, ...]
[TOOL_CALLS]add[ARGS]{"a": 1}
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...
<|python_tag|>{"name": "add", "parameters": {"a": 1}}
"""

from __future__ import annotations

from vkmoe.generate.tools.cursor import Cursor, Malformed, Steps
from vkmoe.generate.tools.json_text import read_call, read_value

PYTHON_TAG = "<|python_tag|>"
_KEYS = ("arguments", "parameters")


class MistralMarks:
    """Holds the marks of Mistral's models."""

    calls = "[TOOL_CALLS]"
    arguments = "[ARGS]"
    id = "[CALL_ID]"
    all = (calls, arguments, id)


class DeepSeekMarks:
    """Holds the marks of DeepSeek's models."""

    calls, calls_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    all = (calls, call, separator, call_end, calls_end)


MISTRAL, DEEPSEEK = MistralMarks(), DeepSeekMarks()


def read_mistral(cursor: Cursor) -> Steps[None]:
    """Read the calls behind MISTRAL.calls. Raises Malformed for anything else."""
    yield from cursor.blanks()
    if (yield from cursor.one_of(("[",))) is not None:
        while True:
            yield from read_call(cursor, _KEYS)
            after = yield from cursor.expect(",", "]")
            cursor.end_call()
            if after == "]":
                return
    name, mark = yield from cursor.until((MISTRAL.id, MISTRAL.arguments, "{", "\n"))
    if mark == MISTRAL.id:
        _, mark = yield from cursor.until((MISTRAL.arguments, "{", "\n"))
    if mark != MISTRAL.arguments:
        raise Malformed
    yield from _read_arguments(cursor, name.strip())
    cursor.end_call()


def read_deepseek(cursor: Cursor) -> Steps[None]:
    """Read the calls behind DEEPSEEK.calls. Raises Malformed for anything else.

    V3 and R1 write the word "function" before the mark, and the name and a block of code behind it.
    """
    while (yield from cursor.expect(DEEPSEEK.call, DEEPSEEK.calls_end)) == DEEPSEEK.call:
        head, mark = yield from cursor.until((DEEPSEEK.separator, "\n"))
        if mark != DEEPSEEK.separator:
            raise Malformed
        yield from cursor.blanks()
        is_block = (yield from cursor.peek()) != "{"
        if is_block:
            head, mark = yield from cursor.until(("\n",))
            yield from cursor.expect("```json")
        yield from _read_arguments(cursor, head.strip())
        if is_block:
            yield from cursor.expect("```")
        yield from cursor.expect(DEEPSEEK.call_end)
        cursor.end_call()
        yield from cursor.blanks()
        if not (yield from cursor.peek()):
            return  # a reply may end without the last mark
    cursor.form()


def read_llama(cursor: Cursor) -> Steps[None]:
    """Read calls as Llama 3 writes them, after PYTHON_TAG or at the beginning of a reply.

    Raises Malformed for anything else: a call of a tool that was not offered is an answer in JSON.
    """
    while True:
        yield from cursor.blanks()
        yield from read_call(cursor, ("parameters", "arguments"), only_known=True)
        yield from cursor.blanks()
        goes_on = (yield from cursor.one_of((";",))) is not None
        if not goes_on and (yield from cursor.peek()):
            raise Malformed
        cursor.end_call()
        if not goes_on:
            return


def _read_arguments(cursor: Cursor, name: str) -> Steps[None]:
    """Read the object with the arguments of the tool `name`."""
    yield from cursor.blanks()
    if (yield from cursor.peek()) != "{":
        raise Malformed
    cursor.begin_call(name)
    yield from read_value(cursor, cursor.argument)
