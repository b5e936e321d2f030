"""This module is the root command: its help, its version, and how every error leaves the program.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 after Ctrl-C, 141 when stdout was closed, 143 after
SIGTERM and 129 when the terminal was closed.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, cast

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from vkmoe.cli.bench import bench, decode, kernels, transfer
from vkmoe.cli.cache.simulate import simulate
from vkmoe.cli.cache.trace import trace
from vkmoe.cli.cache.tune import tune
from vkmoe.cli.chat import chat
from vkmoe.cli.devices import devices
from vkmoe.cli.generate import generate
from vkmoe.cli.info import info
from vkmoe.cli.models import models
from vkmoe.cli.perplexity import perplexity
from vkmoe.cli.plan import plan
from vkmoe.cli.pull import pull
from vkmoe.cli.selftest import selftest
from vkmoe.cli.serve.llama_server import translated
from vkmoe.cli.serve.serve import IDLE_FLAGS, serve
from vkmoe.errors import NoDriverError, UsageError, VkmoeError
from vkmoe.interrupts import INTERRUPTED, handle

_EXIT_PIPE_CLOSED = 141
# The parent of all errors of usage, for which typer has no public name.
_WrongUsage = cast(type[typer.BadParameter], typer.BadParameter.__base__)


class _Command(TyperCommand):
    """Is a command whose options are whole words, and which names itself in every error of usage.

    Its usage line shows the metavars of arguments as they are.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words that follow the command. Raises UsageError for what is no option."""
        self._check_words(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except _WrongUsage as error:
            error.ctx = error.ctx or ctx
            raise

    def _check_words(self, ctx: Any, args: list[str]) -> None:
        """Refuse words such as -fa, which typer would read as -f with the value "a"."""
        takes_value = {
            flag: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, TyperOption)
            for flag in (*option.opts, *option.secondary_opts)
        }
        words = iter(args)
        for word in itertools.takewhile(lambda word: word != "--", words):
            if takes_value.get(word):
                next(words, None)  # its value, whatever that looks like
            elif word not in takes_value and re.match("-[a-zA-Z]{2}", word):
                long = f"-{word}" if f"-{word}" in takes_value else None
                raise UsageError(
                    f"No such option: {word}",
                    f"there is {long}" if long else f"see `{ctx.command_path} --help`",
                )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [item for item in self.params if isinstance(item, TyperArgument)]
        return ["[OPTIONS]", *(item.metavar or "" for item in arguments)]


class _ServeCommand(_Command):
    """Is a command that also takes the flags of llama-server."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words behind `serve`; flags that have nothing to do here are noted in `ctx`."""
        words, idle = translated(args)
        if idle:
            ctx.meta[IDLE_FLAGS] = idle
        return super().parse_args(ctx, words)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def tutorial(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the versions of vkmoe, Kompute and the driver."),
    ] = False,
) -> None:
    """Run quantised mixture-of-experts models (GGUF) on any Vulkan device.

    \b
    vkmoe devices                             which Vulkan devices are there
    vkmoe generate -p "def main():"           the built-in demo model writes on
    vkmoe generate model.gguf -f prompt.txt   your own model, the prompt from a file
    echo "import os" | vkmoe generate -       the prompt from a pipe; text goes to stdout
    vkmoe generate --prompts many.jsonl       many prompts, with -o FILE to be gone on with
    vkmoe chat owner/repo                     a model by its name, downloaded if need be
    vkmoe info model.gguf                     what is in a file, and where it would go
    vkmoe plan model.gguf                     the same explained, and how fast that can be
    vkmoe selftest                            does this device compute correctly
    vkmoe trace model.gguf -f prompt.txt      record which experts the tokens use
    vkmoe simulate trace.jsonl                what would a cache of experts do, and how large
    VKMOE_TEMP=0 vkmoe generate -p "x ="      every option is also a variable
    """
    if show_version:
        version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def version() -> None:
    """Show the versions of vkmoe, Kompute and the drivers."""
    from vkmoe import __version__
    from vkmoe.devices import list_devices
    from vkmoe.gpu.device import kompute_version

    typer.echo(f"vkmoe {__version__}")
    try:
        typer.echo(f"Kompute {kompute_version()}")
    except NoDriverError as error:
        typer.echo(f"no Kompute: {error}")
    try:
        for device in list_devices():
            api = f", Vulkan {'.'.join(map(str, device.api_version))}" if device.is_vulkan else ""
            typer.echo(f"device {device.index}: {device.name}, {device.driver}{api}")
    except VkmoeError as error:
        typer.echo(f"no device: {error}")


for _command, _summary in {
    generate: "Continue a prompt.",
    chat: "Talk with a model.",
    serve: "Serve a model over HTTP.",
    info: "Describe a model file.",
    plan: "Explain what would go where, and how fast that can be.",
    devices: "List the devices.",
    models: "List the models that are on this machine.",
    pull: "Download a model.",
    perplexity: "Measure how well a model predicts a text.",
    selftest: "Check a device against NumPy.",
    tune: "Measure how kernels run best on a device.",
    trace: "Record which experts are used.",
    simulate: "Replay a trace through the expert cache.",
    version: "Show versions.",
}.items():
    _kind = _ServeCommand if _command is serve else _Command
    app.command(cls=_kind, short_help=_summary)(_command)

_benchmarks = typer.Typer(add_completion=False, rich_markup_mode=None)
_benchmarks.callback(invoke_without_command=True)(bench)
for _command, _summary in {
    kernels: "Time every kernel.",
    transfer: "Time submits, copies and reads of memory.",
    decode: "Time decoding.",
}.items():
    _benchmarks.command(cls=_Command, short_help=_summary)(_command)
app.add_typer(
    _benchmarks, name="bench", short_help="Measure speed, and the distance from the best."
)

root = typer.main.get_group(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Prints errors, never raises."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    try:
        return _run(arguments)
    except BrokenPipeError:
        # The reader of stdout is gone; Python would complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_PIPE_CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _stopped_by_signals(), root.make_context("vkmoe", words) as context:
            root.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as wish:
        sys.stdout.flush()
        return wish.exit_code
    except _WrongUsage as error:
        command = error.ctx.command_path if error.ctx else "vkmoe"
        return _fail(error.format_message(), f"see `{command} --help`", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", "", INTERRUPTED)
    except _Stopped as stopped:
        return _fail(f"ended by {stopped.signal.name}", "", 128 + stopped.signal)
    except VkmoeError as error:
        return _fail(str(error), error.hint, error.exit_code)
    except BrokenPipeError:
        raise
    except MemoryError:
        return _fail("out of memory", "close other programs, or take a smaller model", 1)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{error.strerror or error}", "", 1)
    except Exception as error:  # a bug of ours: one line still, and where to look
        text = " ".join(str(error).split()) or "no message"
        return _fail(
            f"internal error, {type(error).__name__}: {text}",
            "this is a bug in vkmoe; run again with VKMOE_DEBUG=1 and report the traceback",
            1,
        )


def _fail(message: str, hint: str, exit_code: int) -> int:
    """Print one line of error and one of hint; the traceback too under VKMOE_DEBUG=1."""
    sys.stdout.flush()
    if os.environ.get("VKMOE_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    typer.echo("error: " + " ".join(message.split()), err=True)
    if hint:
        typer.echo("hint: " + " ".join(hint.split()), err=True)
    return exit_code


# ----- signals: they end a command in order, and what a run leaves behind is written -----


class _Stopped(BaseException):
    """Says that a signal asked the process to end."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise _Stopped on the first SIGTERM or SIGHUP; later ones are ignored.

    A signal that is ignored already (nohup) or has another handler is left alone. When the
    terminal is gone, output goes nowhere instead of failing.
    """
    terminals = [number for number in (1, 2) if os.isatty(number)]
    ours = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]

    def stop(number: int, _: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # a second one would tear the files
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in terminals:
                os.dup2(nowhere, descriptor)
        raise _Stopped(number)

    for number in ours:
        handle(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
