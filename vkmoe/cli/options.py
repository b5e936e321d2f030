"""Command-line options: those of the config dataclasses, and the few every command shares.

Every option is also an environment variable, `VKMOE_` and its name. An empty variable counts as not
set; a malformed one is a usage error that names the variable and the flag.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import click

from vkmoe.config import EngineConfig, SamplingConfig, environment_name
from vkmoe.errors import UsageError

__all__ = [
    "Function",
    "Lines",
    "check_output",
    "config_options",
    "engine_config",
    "option",
    "output_options",
    "sampling_config",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class Number(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since 8.2
    """A finite number within inclusive bounds."""

    name = "number"

    def __init__(self, minimum: float | None, maximum: float | None) -> None:
        self._minimum = -math.inf if minimum is None else minimum
        self._maximum = math.inf if maximum is None else maximum

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            result = float(value)
        except ValueError:
            result = math.nan
        if not math.isfinite(result):
            self.fail(f"{value!r} is not a number.", param, ctx)
        if not self._minimum <= result <= self._maximum:
            upper = "" if self._maximum == math.inf else f" and at most {self._maximum:g}"
            self.fail(f"{value!r} is not at least {self._minimum:g}{upper}.", param, ctx)
        return result


class Lines(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Text; an environment variable may hold several, one per line."""

    name = "text"
    envvar_list_splitter = "\n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


def option(*flags: str, name: str | None = None, **more: Any) -> Callable[[Function], Function]:
    """`click.option` with its environment variable, named after the long flag or `name`."""
    named = name or next(flag for flag in flags if flag.startswith("--"))[2:].replace("-", "_")
    more.setdefault("envvar", environment_name(named))
    return click.option(*flags, show_envvar=True, **more)


def config_options(config: type[Any]) -> Callable[[Function], Function]:
    """Decorate a command with one option for each field of a config dataclass."""
    hints = typing.get_type_hints(config)

    def decorate(function: Function) -> Function:
        for item in reversed(dataclasses.fields(config)):
            function = _config_option(item, hints[item.name])(function)
        return function

    return decorate


def _config_option(item: dataclasses.Field[Any], hint: Any) -> Callable[[Function], Function]:
    flags = item.metadata["flags"] or ("--" + item.name.replace("_", "-"),)
    kind = _plain_type(hint)
    more: dict[str, Any] = {"help": item.metadata["help"], "default": item.default}
    if kind is bool:
        more["is_flag"] = True
    else:
        more["type"] = _click_type(kind, item.metadata["minimum"], item.metadata["maximum"])
        more["show_default"] = item.default is not None
    return option(*flags, item.name, name=item.name, **more)


def _plain_type(hint: Any) -> Any:
    """The type without `| None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _click_type(kind: Any, minimum: float | None, maximum: float | None) -> click.ParamType[Any]:
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice([str(choice) for choice in typing.get_args(kind)])
    if kind is int:
        low = None if minimum is None else int(minimum)
        return click.IntRange(min=low, max=None if maximum is None else int(maximum))
    if kind is float:
        return Number(minimum, maximum)
    assert kind is str, f"no command-line form for {kind}"
    return click.STRING


def engine_config(values: dict[str, Any]) -> EngineConfig:
    """The EngineConfig of a command's values, which are taken out of `values`."""
    return EngineConfig(**_taken(EngineConfig, values))


def sampling_config(values: dict[str, Any]) -> SamplingConfig:
    """The SamplingConfig of a command's values, which are taken out of `values`."""
    return SamplingConfig(**_taken(SamplingConfig, values))


def _taken(config: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {item.name: values.pop(item.name) for item in dataclasses.fields(config)}


def output_options(function: Function) -> Function:
    """Decorate a command with -v and -q; `check_output` refuses both."""
    function = option("-q", "--quiet", is_flag=True, help="Print errors and the result only.")(
        function
    )
    return option("-v", "--verbose", is_flag=True, help="Print device, memory plan and more.")(
        function
    )


def check_output(verbose: bool, quiet: bool) -> None:
    """Raises UsageError when both were asked for."""
    if verbose and quiet:
        raise UsageError("--verbose and --quiet contradict each other", "give one of them")
