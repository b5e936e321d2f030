"""This module is a program: it renders one chat template for vkmoe, in a process of its own.

It reads lines of JSON from its input and answers each with one: the limits and the template's
source, then the names for each rendering. It imports nothing of vkmoe, so that it starts quickly.
process.py starts it and says why it exists.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LIST_METHODS = ("append", "pop")  # which templates call on lists of their own


def main() -> None:
    """Compile the template of the first line, then render it for every other one."""
    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"],) * 2)
    seconds: float = first["seconds"]
    made: list[Template] = []
    environment = _Sandbox()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    _answer(seconds, lambda: made.append(environment.from_string(first["source"])))
    for line in sys.stdin if made else ():
        request = json.loads(line)
        environment.given = set(_lists(request))
        made[0].globals["strftime_now"] = datetime.datetime.fromisoformat(request["now"]).strftime
        _answer(seconds, partial(_rendered, made[0], request["names"], request["more"]))


def _rendered(template: Template, names: dict[str, Any], more: dict[str, Any]) -> str:
    """Render a template, and where that fails with `more` names; the first error counts."""
    try:
        return template.render(names)
    except Exception as error:
        try:
            return template.render(names | more)
        except Exception:
            raise error from None


def _answer(seconds: float, work: Callable[[], object]) -> None:
    """Do some work and answer with its result, or with the first line of its error.

    The process dies of the alarm if that takes longer, whatever it does then.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        answer = {"result": work()}
    except BaseException as error:  # a template is a foreign program: it can raise anything
        answer = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
    line = json.dumps(answer)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(line, flush=True)


class _GenerationBlock(Extension):
    """Lets `{% generation %}...{% endgeneration %}` only mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Lets a template neither change what it is given nor reach outside.

    It has the settings, filters and functions that Hugging Face transformers gives its templates,
    and lets a template append to lists that it made itself. `given` are the ids of all others.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self.given: set[int] = set()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Say whether a template may use an attribute."""
        if type(obj) is list and attr in _LIST_METHODS:
            return id(obj) not in self.given
        return super().is_safe_attribute(obj, attr, value)


def _lists(value: object) -> Iterator[int]:
    """Yield the ids of all lists inside a value that was JSON."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            yield id(value)
        if isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter; a generator is a list."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """Return what a filter such as `map` passes on. Raises TypeError for anything else."""
    if not isinstance(value, GeneratorType):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return list(value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
