"""This module makes command-line options, of the config dataclasses and of what commands share.

Every option is also an environment variable, `VKMOE_` and its name. An empty variable counts as not
set; a malformed one is a usage error that names the variable and the flag. It also finds the model
and the prompt, of which there must be one each; what is typed wins over variables.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vkmoe.config import OF_OTHER_MODES, EngineConfig, mode_contradicts, prefetch_contradicts
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.option_fields import environment_name, flags_of, long_flag

__all__ = [
    "IgnoreEos",
    "Json",
    "MaxTokens",
    "Model",
    "Positional",
    "Prompt",
    "PromptFile",
    "Quiet",
    "Stop",
    "Verbose",
    "Words",
    "check_plot",
    "chosen_model",
    "config_options",
    "is_given",
    "is_typed",
    "option",
    "prompt_source",
    "read_prompt",
    "read_source",
    "split_words",
]

_PASSED_ON = ("help", "minimum", "maximum", "metavar", "check")  # of a field, to its option


def _is_idle_in(mode: str, asked: str, by: Any, value: Any) -> bool:
    """Say whether the option `asked` means a mode that has no use for another one's value."""
    means = {"expert_mode": by, "cpu_moe": "cpu" if by else "", "n_cpu_moe": "cpu" if by else ""}
    return means[asked] == mode and value not in (None, False, "auto")


# Options that may contradict each other, and whether these values of them do.
_RIVALS: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    ("expert_cache", "expert_slots", lambda size, number: None not in (size, number)),
    ("expert_policy", "moe_predict_prefetch", prefetch_contradicts),
    ("expert_mode", "cpu_moe", mode_contradicts),
    ("expert_mode", "n_cpu_moe", lambda mode, n: n is not None and mode_contradicts(mode, True)),
    ("cpu_moe", "n_cpu_moe", lambda all_of_them, n: None not in (all_of_them, n)),
    *(
        (asked, name, functools.partial(_is_idle_in, mode, asked))
        for mode, names in OF_OTHER_MODES.items()
        for name in names
        for asked in ("expert_mode", "cpu_moe", "n_cpu_moe")
    ),
)


def option(
    *flags: str,
    help: str,
    kind: Any = str,
    metavar: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    check: Callable[[str], object] | None = None,
    callback: Callable[..., Any] | None = None,
) -> Any:
    """Make a `typer.Option` for use in `Annotated`, with the variable named after the long flag.

    `kind` is the type of the value: str, bool, int, float or a Literal; bounds are inclusive.
    `check` raises UsageError for a text that is malformed.
    """
    return typer.Option(
        *flags,
        help=help,
        envvar=environment_name(long_flag(flags)[2:].replace("-", "_")),
        metavar=metavar or _placeholder(kind),
        parser=_reader(kind, minimum, maximum, check),
        callback=callback,
    )


def is_typed(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was given on the command line, not by its variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was given at all, on the command line or by its variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _stop_strings(context: typer.Context, stop: list[str]) -> list[str]:
    """Take the texts typed, or the lines of the variable, which typer would split at blanks."""
    if not is_typed(context, "stop"):
        variable = os.environ.get(environment_name("stop"))
        stop = variable.split("\n") if variable else []
    if not all(stop):
        raise UsageError("--stop is empty", "leave it out for no stop string")
    return stop


# ----- reading the text of a value, with errors that name it -----

# typer could read these types too, but what its errors say depends on its version, and not all of
# them name the value; nor does it refuse `nan`. It adds the flag and the variable to each error.
_SWITCH = dict.fromkeys(("1", "true", "t", "yes", "y", "on", "enabled"), True) | dict.fromkeys(
    ("0", "false", "f", "no", "n", "off", "disabled"), False
)


def _placeholder(kind: Any) -> str | None:
    """Choose what stands for the value in help texts; None for a switch, which takes none."""
    if typing.get_origin(kind) is Literal:
        return "/".join(typing.get_args(kind))
    return {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: None}[kind]


def _reader(
    kind: Any,
    minimum: float | None,
    maximum: float | None,
    check: Callable[[str], object] | None,
) -> Callable[[Any], Any] | None:
    """Make a function from text (or the default) to a value, as `option` describes them.

    It raises typer.BadParameter. None for a text without `check`, which needs no reading.
    """
    if kind is str:
        return None if check is None else lambda value: _checked(value, check)
    if kind in (int, float):
        return lambda value: _number(value, kind, minimum, maximum)
    words = _SWITCH if kind is bool else {word: word for word in typing.get_args(kind)}
    return lambda value: _meaning(value, words)


def _meaning(value: Any, words: dict[str, Any]) -> Any:
    """Look a word up, which may be in capitals."""
    text = str(value).strip().lower()
    if text not in words:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(words)}.")
    return words[text]


def _number(
    value: Any, kind: type[int] | type[float], minimum: float | None, maximum: float | None
) -> float:
    try:
        result = kind(value)
    except ValueError:
        result = math.nan
    if result != result or result in (math.inf, -math.inf):
        noun = "a whole number" if kind is int else "a number"
        raise typer.BadParameter(f"{value!r} is not {noun}.")
    if minimum is not None and result < minimum:
        raise typer.BadParameter(f"{value!r} is less than {minimum:g}.")
    if maximum is not None and result > maximum:
        raise typer.BadParameter(f"{value!r} is more than {maximum:g}.")
    return result


def _checked(value: Any, check: Callable[[str], object]) -> str:
    try:
        check(str(value))
    except UsageError as error:
        raise typer.BadParameter(f"{error} ({error.hint}).") from error
    return str(value)


# ----- the options that commands share -----

# Hidden from the list of options, where typer would show its type; the usage line has its metavar.
Positional = Annotated[str | None, typer.Argument(metavar="[MODEL]", hidden=True)]
Words = Annotated[list[str] | None, typer.Argument(metavar="[MODEL] [-]", hidden=True)]
Prompt = Annotated[str | None, option("-p", "--prompt", help="The prompt.")]
PromptFile = Annotated[
    str | None, option("-f", "--file", metavar="FILE", help="Read the prompt from a file.")
]
Model = Annotated[
    str | None, option("-m", "--model", metavar="FILE", help="The model, a GGUF file.")
]
MaxTokens = Annotated[
    int,
    option(
        "-n",
        "--max-tokens",
        kind=int,
        minimum=-1,
        help="Most tokens of a reply; -1: until the context is full.",
    ),
]
Stop = Annotated[
    list[str] | None,
    option(
        "--stop",
        callback=_stop_strings,
        help="End the reply before this text; repeatable (in the variable: one per line).",
    ),
]
IgnoreEos = Annotated[
    bool, option("--ignore-eos", kind=bool, help="Never choose the tokens that end a reply.")
]
Json = Annotated[bool, option("--json", kind=bool, help="Print one JSON document.")]
Verbose = Annotated[
    bool, option("-v", "--verbose", kind=bool, help="Print device, memory plan and more.")
]
Quiet = Annotated[
    bool, option("-q", "--quiet", kind=bool, help="Print errors and the result only.")
]


# ----- files to write -----


def check_plot(plot: str, inputs: Sequence[str]) -> None:
    """Raise VkmoeError before the work where the plot could not be drawn."""
    from importlib.util import find_spec

    from vkmoe.experts.records.keeper import check_outputs, reason_against_writing

    if find_spec("matplotlib") is None:
        raise VkmoeError("--plot needs matplotlib", 'pip install "vkmoe[plot]"')
    if Path(plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot is {plot!r}, not a picture", "name it .png, .svg or .pdf")
    check_outputs([("--plot", Path(plot))], inputs)
    if reason := reason_against_writing(Path(plot)):
        raise VkmoeError(f"the plot cannot be written: {reason}", "give another --plot")


# ----- the model and the prompt -----


def split_words(words: Sequence[str]) -> tuple[str | None, bool]:
    """Return the positional MODEL, and whether a `-` asks for standard input, in any order."""
    models = [word for word in words if word != "-"]
    if len(models) > 1:
        raise UsageError(
            f"more than one model given: {', '.join(models)}", 'a prompt needs -p: -p "some text"'
        )
    return (models[0] if models else None), "-" in words


def chosen_model(
    context: typer.Context, positional: str | None, option_value: str | None
) -> str | None:
    """Choose MODEL or -m; None for the demo model. Raises UsageError for two of them."""
    if positional is not None and option_value is not None and is_typed(context, "model"):
        raise UsageError(
            f"two models given: {positional} and -m {option_value}", "name the model once"
        )
    return positional if positional is not None else option_value


def read_prompt(context: typer.Context, text: str | None, file: str | None, stdin: bool) -> str:
    """Read the prompt from TEXT, a file or standard input; what is no UTF-8 is replaced.

    Raises UsageError unless there is exactly one source, PromptError if it is empty or unreadable.
    """
    return read_source(*prompt_source(context, prompt=text, file=file, stdin="-" * stdin or None))


def prompt_source(context: typer.Context, **given: str | None) -> tuple[str, str]:
    """Choose the one source of a prompt that was given, by name; what is typed wins.

    Raises UsageError unless there is exactly one.
    """
    sources = {name: value for name, value in given.items() if value is not None}
    typed = {name: sources[name] for name in sources if name == "stdin" or is_typed(context, name)}
    if len(typed or sources) != 1:
        others = ", --prompts FILE" if "prompts" in given else ""
        raise UsageError(
            f"{'more than one' if sources else 'no'} prompt given",
            f"give exactly one of -p TEXT, -f FILE{others} and - (standard input)",
        )
    ((name, value),) = (typed or sources).items()
    return name, value


def read_source(name: str, value: str, what: str = "prompt") -> str:
    """Read a prompt, or `what` it is, from what `prompt_source` chose. Raises PromptError."""
    if name == "prompt":
        data = os.fsencode(value)
    elif value == "-":
        data = sys.stdin.buffer.read()
    else:
        try:
            data = Path(value).read_bytes()
        except OSError as error:
            raise PromptError(
                f"the {what} file {value} cannot be read: {error.strerror}"
            ) from error
    if not data:
        raise PromptError(f"the {what} is empty", "give at least one character")
    return data.decode("utf-8", "replace")


# ----- the options of a config -----


def config_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: each parameter that is a config dataclass becomes its fields' options.

    `def f(*, sampling: SamplingConfig)` is shown to typer as `f(*, temp: float, top_k: int, ...)`
    and called with the config made of their values. `Annotated[EngineConfig, NAMES]` has options
    for the fields in the tuple NAMES alone; the others keep their defaults.
    """
    signature = inspect.signature(function, eval_str=True)
    configs: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for item in signature.parameters.values():
        config, *extras = typing.get_args(item.annotation) or (item.annotation,)
        if isinstance(config, type) and dataclasses.is_dataclass(config):
            options = [known for known in _fields(config) if not extras or known.name in extras[0]]
            configs[item.name] = config, [known.name for known in options]
            parameters += options
        else:
            parameters.append(item.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        if "context" in values:
            _drop_rivals(values["context"], values)
        for name, (config, names) in configs.items():
            values[name] = config(**{field_name: values.pop(field_name) for field_name in names})
        function(**values)

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _drop_rivals(context: typer.Context, values: dict[str, Any]) -> None:
    """Forget what a variable says where the command line says something else."""
    for first, second, contradict in _RIVALS:
        if first in values and second in values and contradict(values[first], values[second]):
            given = [name for name in (first, second) if is_typed(context, name)]
            if len(given) == 1:
                name = second if given[0] == first else first
                values[name] = EngineConfig.__dataclass_fields__[name].default


def _fields(config: type[Any]) -> Iterator[Parameter]:
    """Make one parameter of a command for each field of a config dataclass."""
    hints = typing.get_type_hints(config)
    for item in dataclasses.fields(config):
        more = {name: item.metadata[name] for name in _PASSED_ON}
        hint = hints[item.name]
        annotation = Annotated[hint, option(*flags_of(item), kind=_plain_type(hint), **more)]  # type: ignore[valid-type,unused-ignore]
        yield Parameter(
            item.name, Parameter.KEYWORD_ONLY, default=item.default, annotation=annotation
        )


def _plain_type(hint: Any) -> Any:
    """Return the type without `| None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
