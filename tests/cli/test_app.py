"""The root command: help, lazy imports, and how errors leave the program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vkmoe.cli.app import root
from vkmoe.errors import (
    ModelFileError,
    NoDriverError,
    OutOfMemoryError,
    PromptError,
    UsageError,
    VkmoeError,
)

from .conftest import FakeLLM, Run

HEAVY = ("numpy", "tokenizers", "jinja2", "vkmoe.gpu", "vkmoe.llm", "vkmoe.engine", "rich")


def test_root_help_is_a_tutorial_of_a_dozen_lines(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    lines = [line for line in done.out.splitlines() if line.strip().startswith(("vkmoe ", "echo"))]
    lines += [line for line in done.out.splitlines() if "VKMOE_TEMP=0 vkmoe" in line]
    assert 10 <= len(lines) <= 12
    for name in ("generate", "chat", "info", "devices", "selftest", "trace", "simulate"):
        assert any(f"vkmoe {name}" in line for line in lines), name


def test_usage_shows_what_may_be_left_out(run: Run) -> None:
    assert run("generate", "--help").out.startswith("Usage: vkmoe generate [OPTIONS] [MODEL] [-]\n")
    assert run("chat", "-h").out.startswith("Usage: vkmoe chat [OPTIONS] [MODEL]\n")


def test_without_arguments_the_help_appears(run: Run) -> None:
    done = run()
    assert done.code == 2
    assert "vkmoe generate" in done.err + done.out


def test_help_of_every_command_loads_nothing_heavy() -> None:
    code = (
        "import sys; from vkmoe.cli import main\n"
        "for name in sys.argv[1:]: assert main([name, '--help']) == 0\n"
        f"assert main(['--help']) == 0; print([m for m in {HEAVY} if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *root.commands], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VkmoeError("a", "b"), 1),
        (UsageError("a", "b"), 2),
        (ModelFileError("a", "b"), 1),
        (PromptError("a", "b"), 1),
        (NoDriverError("a", "b"), 1),
        (OutOfMemoryError("a", "b"), 1),
    ],
)
def test_errors_are_two_lines_and_their_exit_code(
    run: Run, fake: type[FakeLLM], error: VkmoeError, code: int
) -> None:
    fake.fail_after = (0, error)
    assert run("generate", "-p", "x", "-q") == (code, "", "error: a\nhint: b\n")


def test_an_error_without_a_hint_is_one_line(run: Run, fake: type[FakeLLM]) -> None:
    fake.fail_after = (0, VkmoeError("two\nlines"))
    assert run("generate", "-p", "x", "-q").err == "error: two lines\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("division\nby zero"), "internal error, ZeroDivisionError: division by"),
        (MemoryError(), "out of memory"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_our_own_bugs_show_no_traceback(
    run: Run, fake: type[FakeLLM], error: BaseException, text: str
) -> None:
    fake.fail_after = (0, error)
    done = run("generate", "-p", "x", "-q")
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert text in done.err.splitlines()[0]
    assert "Traceback" not in done.err


def test_the_traceback_shows_on_request(run: Run, fake: type[FakeLLM]) -> None:
    fake.fail_after = (0, VkmoeError("a"))
    assert "Traceback" in run("generate", "-p", "x", VKMOE_DEBUG="1").err


MODEL_COMMANDS = [
    "generate -p x", "chat", "serve", "info", "plan", f"perplexity -f {__file__}",
    "trace -p x -o x", "tune", "tune --device cpu", "tune --forget", "bench kernels",
    "bench decode",
]  # fmt: skip


@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_a_model_that_is_not_there_fails_every_command(run: Run, command: str) -> None:
    """Also those that would have had no use for the file."""
    done = run(*command.split(), "-m", "/nowhere.gguf")
    assert done.code == 1
    assert done.err.endswith("error: /nowhere.gguf does not exist\nhint: check the spelling\n")


# `serve` knows the words of llama-server.
@pytest.mark.parametrize("name", sorted(set(root.commands) - {"bench", "serve"}))
@pytest.mark.parametrize("word", ["-hff", "-fa", "-md", "-sys", "-no-cnv", "-vq", "-pfoo"])
def test_an_option_of_several_letters_is_one_word(run: Run, name: str, word: str) -> None:
    """What llama.cpp takes and vkmoe does not is neither a help text nor another option's value."""
    done = run(name, word, "on")
    hint = f"hint: see `vkmoe {name} --help`"
    assert done == (2, "", f"error: No such option: {word}\n{hint}\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("generate", "-temp", "0"), "error: No such option: -temp\nhint: there is --temp\n"),
        (
            ("generate", "-m"),
            "error: Option '-m' requires an argument.\nhint: see `vkmoe generate --help`\n",
        ),
        (
            ("tune", "--again", "--forget"),
            "error: --again and --forget contradict each other\nhint: give one of them\n",
        ),
    ],
)
def test_wrong_usage_says_what_to_do(run: Run, words: tuple[str, ...], error: str) -> None:
    assert run(*words) == (2, "", error)


def test_a_value_may_look_like_an_option(run: Run, fake: type[FakeLLM]) -> None:
    assert run("generate", "-p", "-hf", "-n4", "-c", "99", "--", "-fa").code == 0
    assert [call.get("model", call.get("prompt")) for call in fake.calls[:2]] == ["-fa", "-hf"]
    assert fake.calls[1]["max_tokens"] == 4


def test_an_unknown_command_is_wrong_usage(run: Run) -> None:
    done = run("generat")
    assert done.code == 2
    assert "generat" in done.err.splitlines()[0]
