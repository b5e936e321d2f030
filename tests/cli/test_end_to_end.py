"""Every command with the real demo model on the real device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.core import TyperCommand, TyperOption

from tests.experts.invented_traces import drifting, trace_of
from vkmoe.cli.app import root
from vkmoe.experts.records.trace import TraceWriter
from vkmoe.llm import LLM, demo_model_path
from vkmoe.option_fields import environment_name
from vkmoe.selftest import launches as launch_choice
from vkmoe.selftest import suite

from .conftest import Run

pytestmark = pytest.mark.usefixtures("one_device")

# The benchmarks have a test of their own.
COMMANDS = {name: item for name, item in root.commands.items() if isinstance(item, TyperCommand)}
# What each option is given: its default, or a harmless value where the default is "none".
VALUES: dict[str, Any] = {
    "model": str(demo_model_path()),
    "prompt": "def add(a, b):\n",
    "max_tokens": 4,
    "stop": "no such text",
    "seed": 11,
    "salt": "pepper",
    "device": "0",
    "threads": 2,
    "ctx_size": 64,
    "cache_ram": "100",
    "cache_type_v": "q8_0",
    "gpu_layers": 2,
    "ubatch_size": 1,
    "stride": 30,
    "expert_slots": 8,
    "vram_margin": "256MiB",
    "moe_warmpin": 2,
    "host_pool": "1GiB",
    "executor": "stepped",
    "expert_policy": "slru",
    "expert_copies": "wait",
    "system": "Be brief.",
    "chat_template_kwargs": '{"enable_thinking": false}',
    "chat_template": "chatml",
    "output": os.devnull,
    "slots": "8,16",
}
# The prompt comes from -p, -f is tested below; others would contradict those above or leave files.
LEFT_OUT = (
    *("file", "expert_cache", "expert_resident_ids", "expert_profile", "expert_stats"),
    *("moe_predict_prefetch", "plot", "prompts", "cpu_moe", "n_cpu_moe", "device_profile"),
    *("server", "api_key", "draft_model", "chat_template_file"),
)
VARYING = ("load_seconds", "ttft_seconds", "prompt_seconds", "decode_seconds", "prompt_rate",
           "decode_rate")  # fmt: skip


def options_of(command: TyperCommand) -> list[TyperOption]:
    return [
        parameter
        for parameter in command.params
        if isinstance(parameter, TyperOption) and parameter.name not in LEFT_OUT
    ]


def value_of(parameter: TyperOption) -> Any:
    """The value to give; fails for a new option without a default that VALUES does not name."""
    value = VALUES.get(str(parameter.name), parameter.default)
    assert value is not None, f"name a value for {parameter.name} in VALUES"
    return value


def as_flags(command: TyperCommand) -> list[str]:
    words: list[str] = []
    for parameter in options_of(command):
        # Refused where replies are not those to a file of prompts.
        if not parameter.is_flag and (command.name, parameter.name) != ("generate", "output"):
            words += [parameter.opts[-1], str(value_of(parameter))]
    return words


def as_variables(command: TyperCommand) -> dict[str, str]:
    return {
        str(parameter.envvar): str(int(value) if isinstance(value, bool) else value)
        for parameter in options_of(command)
        for value in [False if parameter.is_flag else value_of(parameter)]
    }


def recorded(path: Path) -> Path:
    """A short trace with the demo model's experts."""
    trace = trace_of(drifting(30, 2, 32, 4), 32)
    with TraceWriter(path, trace.header) as writer:
        for routing in trace.routing:
            writer.write(routing, is_prompt=False)
    return path


# What serves does not end, and what pulls needs a hub, which tests/catalogue has.
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"serve", "pull"}))
@pytest.mark.sample(2)
def test_every_command_with_its_defaults_and_with_its_variables(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the self-test a few kernels: tests/docs/test_readme.py runs all of them as a command."""
    command = COMMANDS[name]
    few = suite.compiled_variants()[::200]
    monkeypatch.setattr(suite, "compiled_variants", lambda: few)
    # What is fastest goes by a clock, and so does how much is measured: here there is time for all.
    monkeypatch.setattr(launch_choice, "choose", lambda times, table: ([*times][-1], 0.25))
    looks = count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) / 10, perf_counter=time.perf_counter)
    monkeypatch.setattr(launch_choice, "time", clock)
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 10)
    kept = tmp_path / "models--some-one--demo/snapshots/main/demo-Q4_K_M.gguf"
    kept.parent.mkdir(parents=True)
    kept.symlink_to(demo_model_path())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    words = {
        "simulate": [str(recorded(tmp_path / "trace.jsonl"))],
        "perplexity": ["-f", str(text)],
    }.get(name, [])
    by_flag = run(name, *words, *as_flags(command), stdin=b"hi\n/clear\nhi\n/exit\n")
    assert by_flag.code == 0, by_flag.err
    assert by_flag.out.strip()
    by_variable = run(name, *words, stdin=b"hi\n/clear\nhi\n/exit\n", **as_variables(command))
    assert by_variable.code == 0, by_variable.err
    if name not in ("selftest", "plan", "models"):  # which print speeds
        assert by_variable.out == by_flag.out


def test_all_options_are_covered() -> None:
    for name, command in COMMANDS.items():
        for parameter in options_of(command):
            names = [flag.lstrip("-").replace("-", "_") for flag in parameter.opts]
            assert parameter.envvar in [environment_name(item) for item in names], name


def test_the_same_seed_gives_the_same_document(run: Run, demo: LLM) -> None:
    arguments = ("generate", "-p", "import os\n", "-n", "6", "--seed", "4", "--json", "-q")
    first, second = (json.loads(run(*arguments).out) for _ in range(2))
    for document in (first, second):
        assert len(document["token_ids"]) == document["n_generated_tokens"] == 6
        del document["n_reused_tokens"]
        for name in VARYING:
            assert document.pop(name) > 0
    assert first == second
    other = json.loads(run(*arguments[:-4], "--seed", "5", "--json", "-q").out)
    assert other["text"] != first["text"]


def test_a_full_context_ends_with_length(run: Run) -> None:
    arguments = ("-p", "x = 1\n", "-c", "16", "-n", "-1", "--ignore-eos", "--json", "-q")
    document = json.loads(run("generate", *arguments).out)
    assert document["finish_reason"] == "length"
    assert document["n_prompt_tokens"] + document["n_generated_tokens"] in (16, 17)


def test_a_stop_string_ends_the_text_before_it(run: Run, demo: LLM) -> None:
    arguments = ("generate", "-p", "def add(a, b):\n", "--temp", "0", "-n", "8", "-q")
    text = run(*arguments).out
    middle = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = json.loads(run(*arguments, "--stop", middle, "--json").out)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.find(middle)]


def test_prompts_from_file_and_pipe_agree(run: Run, demo: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("import sys\n")
    common = ("generate", "-n", "3", "--temp", "0", "-q")
    from_file = run(*common, "-f", str(file))
    assert from_file.out == run(*common, "-", stdin=b"import sys\n").out
    assert from_file.out == run(*common, "-p", "import sys\n").out
    assert from_file.out.strip()


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("generate", "-p", "x " * 2000), b"", "the context holds 1024"),
        (("generate", "-p", "x " * 20, "-c", "8"), b"", "the context holds 8"),
        (("generate", "-"), b"", "prompt is empty"),
        (("generate", "/dev", "-p", "x"), b"", "/dev"),
        (("generate", "/nowhere.gguf", "-p", "x"), b"", "/nowhere.gguf"),
        (("generate", "-p", "x", "--device", "no such thing"), b"", "no such thing"),
        (("info", "/nowhere.gguf"), b"", "/nowhere.gguf"),
        (("info", "--device", "99"), b"", "99"),
        (("devices", "--device", "99"), b"", "99"),
    ],
)
def test_mistakes_are_one_clear_line(
    run: Run, arguments: tuple[str, ...], stdin: bytes, message: str
) -> None:
    done = run(*arguments, stdin=stdin)
    assert done.code == 1
    assert "Traceback" not in done.err
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_context_beyond_what_the_model_was_trained_for_is_noted(run: Run) -> None:
    done = run("generate", "-p", "x", "-c", "1100", "-n", "1")
    assert done.code == 0 and "was trained for 1024" in done.err
    assert run("generate", "-p", "x", "-c", "99999999999").code == 2


def test_devices_as_json_marks_one(run: Run) -> None:
    found = json.loads(run("devices", "--json").out)
    assert sum(device["chosen"] for device in found) == 1
    assert all("buffer_device_address" in device["features"] for device in found[:1])


def test_info_shows_what_the_file_holds(run: Run) -> None:
    out = run("info").out
    for part in ("qwen3moe", "Q4_K", "32 per layer, 4 used", "<|endoftext|> (0)", "KV cache"):
        assert part in out


def test_chat_without_a_model_replies(run: Run) -> None:
    done = run("chat", "-n", "4", "--temp", "0", "-q", stdin=b"write a function\n")
    assert (done.code, done.err) == (0, "")
    assert done.out.strip()


def test_version_names_all_three(run: Run) -> None:
    out = run("--version").out
    assert out.splitlines()[0].startswith("vkmoe ")
    assert "Kompute 0.9.0" in out
    assert "Vulkan 1." in out


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "vkmoe", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_ctrl_c_ends_a_generation_cleanly() -> None:
    with start("generate", "-p", "import os\n", "-n", "900", "--ignore-eos") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        err = process.stderr.read()
    assert process.returncode == 130
    assert "ended by interrupt" in err
    assert "tok/s" in err
    assert "Traceback" not in err


def test_ctrl_c_in_a_chat_stops_the_reply_only() -> None:
    with start("chat", "-n", "900", "--ignore-eos") as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("hi\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdin.write("/exit\n")
        process.stdin.close()
        process.stdout.read()
        err = process.stderr.read()
    assert process.returncode == 0, err
    assert "[stopped]" in err
    assert "Traceback" not in err


def test_a_closed_pipe_ends_it_quietly() -> None:
    with start("generate", "-p", "import os\n", "-n", "200", "--ignore-eos", "-q") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert err == ""


def test_a_run_under_validation_is_silent(run: Run) -> None:
    done = run("generate", "-p", "x", "-n", "2", "-c", "64", "--validation")
    assert done.code == 0, done.err
    assert "validation: no messages" in done.err
