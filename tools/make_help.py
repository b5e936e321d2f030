#!/usr/bin/env python3
"""Write docs/help.md from the command line's own definition.

Owns the page's form; every word of it comes from vkmoe/cli and vkmoe/config.py. A test compares
the page with what this prints. Run it after a change of options:

    .venv/bin/python tools/make_help.py
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from vkmoe.cli.app import root

PAGE = Path(__file__).resolve().parent.parent / "docs" / "help.md"
NO_WRAP = "\b\n"  # typer's mark for a paragraph whose lines stay as they are
INTRODUCTION = """\
# Commands and options

Made by `tools/make_help.py` from the program itself. Every option is also an environment variable;
a flag on the command line comes first, then the variable, then the default. For a switch, the
variable takes 1 or 0, true or false, yes or no, on or off, enabled or disabled.
"""


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a help text as Markdown; those not to be wrapped become code blocks."""
    for paragraph in cleandoc(text).split("\n\n"):
        if paragraph.startswith(NO_WRAP):
            yield f"```text\n{paragraph.removeprefix(NO_WRAP)}\n```\n"
        else:
            yield paragraph + "\n"


def default_of(option: TyperOption) -> str:
    """The default as a reader would type it; empty where there is none to type."""
    if option.is_flag or option.multiple or not isinstance(option.default, str | int | float):
        return ""
    return f"`{option.default}`"


def flags_of(option: TyperOption) -> str:
    """All spellings, with what they take."""
    flags = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return f"`{flags}`"
    return f"`{flags} {option.metavar}`"


def row(option: TyperOption) -> str:
    """One line of the table of options."""
    variable = f"`{option.envvar}`" if option.envvar else ""
    meaning = (option.help or "").replace("|", "\\|")
    return f"| {flags_of(option)} | {variable} | {default_of(option)} | {meaning} |"


def section(command: TyperCommand | TyperGroup, path: str) -> Iterator[str]:
    """A command's usage, text and options."""
    arguments = [item.metavar or "" for item in command.params if isinstance(item, TyperArgument)]
    yield f"## {path}\n"
    yield f"`{' '.join([path, *arguments, '[OPTIONS]'])}`\n"
    yield from paragraphs(command.help or "")
    options = [item for item in command.params if isinstance(item, TyperOption)]
    if options:
        header = "| option | variable | default | meaning |\n|---|---|---|---|"
        yield "\n".join([header, *(row(option) for option in options)]) + "\n"


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *sections(root, "vkmoe")])


def sections(command: TyperCommand | TyperGroup, path: str) -> Iterator[str]:
    """A command's section, then those of the commands below it."""
    yield from section(command, path)
    for name, below in command.commands.items() if isinstance(command, TyperGroup) else ():
        assert isinstance(below, TyperCommand | TyperGroup)
        yield from sections(below, f"{path} {name}")


if __name__ == "__main__":
    PAGE.write_text(page())
