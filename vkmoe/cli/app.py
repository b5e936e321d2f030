"""The root command: its help, its version, and how every error leaves the program.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 after Ctrl-C, 141 when stdout was closed.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from vkmoe.cli.chat import chat
from vkmoe.cli.devices import devices
from vkmoe.cli.generate import generate
from vkmoe.cli.info import info
from vkmoe.cli.selftest import selftest
from vkmoe.cli.version import version
from vkmoe.errors import VkmoeError

__all__ = ["main", "root"]

EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 130, 141


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.invoke(version)
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the versions of vkmoe, Kompute and the driver.",
)
def root() -> None:
    """Run quantised mixture-of-experts models (GGUF) on any Vulkan device.

    \b
    vkmoe devices                             which Vulkan devices are there
    vkmoe generate -p "def main():"           the built-in demo model writes on
    vkmoe generate model.gguf -f prompt.txt   your own model, the prompt from a file
    echo "import os" | vkmoe generate -       the prompt from a pipe; text goes to stdout
    vkmoe chat model.gguf                     a conversation; /exit ends it
    vkmoe info model.gguf                     what is in a file, and where it would go
    vkmoe selftest                            does this device compute correctly, how fast
    VKMOE_TEMP=0 vkmoe generate -p "x ="      every option is also a variable
    """


for _command in (generate, chat, info, devices, selftest, version):
    root.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Prints errors, never raises."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    try:
        return _run(arguments)
    except BrokenPipeError:
        # The reader of stdout is gone; Python would complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result = root.main(arguments, prog_name="vkmoe", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "vkmoe"
        return _fail(error.format_message(), f"see `{command} --help`", 2)
    except SystemExit:  # what click makes of a closed stdout, and of nothing else here
        return EXIT_PIPE_CLOSED
    except click.Abort:
        return _fail("interrupted", "", EXIT_INTERRUPTED)
    except click.ClickException as error:
        return _fail(error.format_message(), "", error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", "", EXIT_INTERRUPTED)
    except VkmoeError as error:
        return _fail(str(error), error.hint, error.exit_code)
    except BrokenPipeError:
        raise
    except MemoryError:
        return _fail("out of memory", "close other programs, or take a smaller model", 1)
    except OSError as error:
        return _fail(_os_message(error), "", 1)
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
    click.echo("error: " + " ".join(message.split()), err=True)
    if hint:
        click.echo("hint: " + " ".join(hint.split()), err=True)
    return exit_code


def _os_message(error: OSError) -> str:
    name = f"{error.filename}: " if error.filename else ""
    return f"{name}{error.strerror or error}"
