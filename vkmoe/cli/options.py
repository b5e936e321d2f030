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
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vkmoe.catalogue import Choose, KeptModel, fetcher, find_model
from vkmoe.cli.notes import downloading, log_as_notes
from vkmoe.config import OF_OTHER_MODES, EngineConfig, mode_contradicts, prefetch_contradicts
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.generate.chat.named import NAMED_TEMPLATES
from vkmoe.option_fields import environment_name, flags_of, long_flag, option


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
# ruff: noqa: RUF009  (an option is a field of its own, not a default that instances share)


def _argument(metavar: str) -> Any:
    """Declare a field that is given without a flag.

    It is hidden from the list of options, where typer would show its type; the usage line has it.
    """
    return dataclasses.field(default=None, metadata={"argument": metavar})


def _model_option() -> Any:
    """Declare the flag that names the model."""
    return option(
        None,
        "The model: a GGUF file, a folder with one, or a name, OWNER/REPO or OWNER/REPO:QUANT. "
        "A name is looked for where Hugging Face's tools, llama.cpp, LM Studio and Ollama keep "
        "models, and else downloaded. Without a quant the largest is taken that replies without "
        "reading its file.",
        "-m",
        "--model",
        "-hf",
        metavar="MODEL",
    )


@dataclass(frozen=True)
class ModelChoice:
    """Says which model is run."""

    positional: str | None = _argument("[MODEL]")
    model: str | None = _model_option()

    def path(self, context: typer.Context) -> str | None:
        """Choose MODEL or -m; None for the demo model.

        Raises UsageError for two of them, and what `find_model` raises.
        """
        return _chosen_model(context, self.positional, self.model)

    def file(self, context: typer.Context) -> str | Path:
        """Return the path of the file, which may be the demo model's. Raises as `path` does."""
        from vkmoe.llm import demo_model_path

        path = self.path(context)
        return path if path is not None else demo_model_path()


@dataclass(frozen=True)
class PromptChoice:
    """Says which model is run, and where its prompt is."""

    words: list[str] | None = _argument("[MODEL] [-]")
    model: str | None = _model_option()
    prompt: str | None = option(None, "The prompt.", "-p", "--prompt")
    file: str | None = option(None, "Read the prompt from a file.", "-f", "--file", metavar="FILE")

    def path(self, context: typer.Context) -> str | None:
        """Choose the model as ModelChoice does; a word `-` asks for standard input, in any order.

        Raises UsageError for two models.
        """
        models = [word for word in self.words or () if word != "-"]
        if len(models) > 1:
            raise UsageError(
                f"more than one model given: {', '.join(models)}",
                'a prompt needs -p: -p "some text"',
            )
        return _chosen_model(context, models[0] if models else None, self.model)

    def source(self, context: typer.Context, **others: str | None) -> tuple[str, str]:
        """Choose the one source of a prompt that was given, by name; what is typed wins.

        Raises UsageError unless there is exactly one, of these and `others`.
        """
        stdin = "-" if "-" in (self.words or ()) else None
        given = {"prompt": self.prompt, "file": self.file, "stdin": stdin, **others}
        sources = {name: value for name, value in given.items() if value is not None}
        typed = {n: sources[n] for n in sources if n == "stdin" or is_typed(context, n)}
        if len(typed or sources) != 1:
            also = ", --prompts FILE" if "prompts" in given else ""
            raise UsageError(
                f"{'more than one' if sources else 'no'} prompt given",
                f"give exactly one of -p TEXT, -f FILE{also} and - (standard input)",
            )
        ((name, value),) = (typed or sources).items()
        return name, value


@dataclass(frozen=True)
class TemplateChoice:
    """Says how conversations become prompts, if not by the model's own template."""

    chat_template: str | None = option(
        None,
        "Use this chat template in place of the model's: Jinja text, or the name of a common one, "
        f"{', '.join(NAMED_TEMPLATES)}.",
        metavar="JINJA",
    )
    chat_template_file: str | None = option(
        None, "Use the chat template in this file in place of the model's.", metavar="FILE"
    )

    @property
    def text(self) -> str | None:
        """Return the template; None: the model's own.

        Raises UsageError for two of them and for an unknown name, VkmoeError for a file that
        cannot be read.
        """
        given, file = self.chat_template, self.chat_template_file
        if given is not None and file is not None:
            raise UsageError("two chat templates are given", "leave one of them out")
        if file is not None:
            try:
                return Path(file).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
                raise VkmoeError(f"the chat template {file} cannot be read: {reason}") from error
        if given is not None and "{" not in given:
            if given not in NAMED_TEMPLATES:
                raise UsageError(
                    f"there is no chat template called {given!r}",
                    f"name {' or '.join(NAMED_TEMPLATES)}, give its text, or --chat-template-file",
                )
            return NAMED_TEMPLATES[given]
        return given


@dataclass(frozen=True)
class Limits:
    """Says what ends a reply."""

    max_tokens: int = option(
        256,
        "Most tokens of a reply; -1: until the context is full.",
        "-n",
        "--max-tokens",
        minimum=-1,
    )
    stop: list[str] | None = option(
        None, "End the reply before this text; repeatable (in the variable: one per line)."
    )
    ignore_eos: bool = option(False, "Never choose the tokens that end a reply.")

    @property
    def of_request(self) -> dict[str, Any]:
        """Return them in the form that `LLM.request` takes."""
        n_tokens = None if self.max_tokens < 0 else self.max_tokens
        return {"max_tokens": n_tokens, "stop": self.stop or [], "ignore_eos": self.ignore_eos}


@dataclass(frozen=True)
class Output:
    """Says what is printed."""

    as_json: bool = option(False, "Print one JSON document.", "--json")
    verbose: bool = option(False, "Print device, memory plan and more.", "-v", "--verbose")
    quiet: bool = option(False, "Print errors and the result only.", "-q", "--quiet")

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise UsageError("--verbose and --quiet contradict each other", "give one of them")


def _chosen_model(context: typer.Context, positional: str | None, named: str | None) -> str | None:
    if positional is not None and named is not None and is_typed(context, "model"):
        raise UsageError(f"two models given: {positional} and -m {named}", "name the model once")
    wanted = positional if positional is not None else named
    if wanted is None:
        return None
    return str(find_model(wanted, _chooser(context), partial(_fetch, context)))


def _fetch(context: typer.Context, name: str, quant: str) -> Path:
    """Download a model for the device that is asked for, and say so on stderr."""
    config = EngineConfig(device=context.params.get("device"))
    with downloading(quiet=bool(context.params.get("quiet"))) as progress:
        return fetcher(config, progress)(name, quant)


def _chooser(context: typer.Context) -> Choose:
    """Return what chooses between quants: by plans for the device that is asked for."""

    def choose(models: Sequence[KeptModel]) -> KeptModel:
        from vkmoe.catalogue.choose import best_quant

        with log_as_notes(quiet=bool(context.params.get("quiet"))):
            return best_quant(models, EngineConfig(device=context.params.get("device")))

    return choose


# ----- files to write -----


def check_output(
    flag: str,
    path: Path,
    what: str,
    inputs: Sequence[str],
    engine: EngineConfig | None = None,
) -> None:
    """Raise VkmoeError before the work where `what` could not be written, or over an input.

    `engine` names further files that are written.
    """
    from vkmoe.experts.records.keeper import (
        check_outputs,
        reason_against_writing,
        record_outputs,
    )

    records = record_outputs(engine) if engine is not None else ()
    check_outputs([(flag, path), *records], inputs)
    if reason := reason_against_writing(path):
        raise VkmoeError(f"{what} cannot be written: {reason}", f"give another {flag}")


def check_plot(plot: str, inputs: Sequence[str]) -> None:
    """Raise VkmoeError before the work where the plot could not be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise VkmoeError("--plot needs matplotlib", 'pip install "vkmoe[plot]"')
    if Path(plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot is {plot!r}, not a picture", "name it .png, .svg or .pdf")
    check_output("--plot", Path(plot), "the plot", inputs)


def read_source(name: str, value: str, what: str = "prompt") -> str:
    """Read a prompt, or `what` it is, from what `PromptChoice.source` chose.

    What is no UTF-8 is replaced. Raises PromptError if it is empty or unreadable.
    """
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
    and called with the config made of their values. A config as the parameter's default has the
    defaults. `Annotated[EngineConfig, NAMES]` has options for the fields in the tuple NAMES alone;
    the others keep their defaults.
    """
    signature = inspect.signature(function, eval_str=True)
    configs: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for item in signature.parameters.values():
        config, *extras = typing.get_args(item.annotation) or (item.annotation,)
        if isinstance(config, type) and dataclasses.is_dataclass(config):
            made = _fields(config, item.default)
            options = [known for known in made if not extras or known.name in extras[0]]
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


def _fields(config: type[Any], defaults: Any) -> Iterator[Parameter]:
    """Make one parameter of a command for each field of a config dataclass."""
    hints = typing.get_type_hints(config)
    for item in dataclasses.fields(config):
        about, hint = item.metadata, hints[item.name]
        if "argument" in about:
            made = typer.Argument(metavar=about["argument"], hidden=True)
        else:
            made = _option(item, hint)
        yield Parameter(
            item.name,
            Parameter.KEYWORD_ONLY,
            default=getattr(defaults, item.name, item.default),
            annotation=Annotated[hint, made],  # type: ignore[valid-type,unused-ignore]
        )


def _option(item: dataclasses.Field[Any], hint: Any) -> Any:
    """Make a `typer.Option` of a field, with the variable named after its long flag."""
    flags, about, kind = flags_of(item), item.metadata, _plain_type(hint)
    is_list = typing.get_origin(kind) is list
    kind = str if is_list else kind
    return typer.Option(
        *flags,
        help=about["help"],
        envvar=environment_name(long_flag(flags)[2:].replace("-", "_")),
        metavar=about["metavar"] or _placeholder(kind),
        parser=_reader(kind, about["minimum"], about["maximum"], about["check"]),
        callback=_stop_strings if is_list else None,
    )


def _plain_type(hint: Any) -> Any:
    """Return the type without `| None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
