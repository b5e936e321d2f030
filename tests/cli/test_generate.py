"""`vkmoe generate` with an invented model: prompts, output, statistics, ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vkmoe.errors import DeviceLostError

from .conftest import FakeLLM, Run

TEXT = "one two thrée!"


def prompts(fake: type[FakeLLM]) -> list[str]:
    return [call["prompt"] for call in fake.calls if "prompt" in call]


def test_text_goes_to_stdout_and_statistics_to_stderr(run: Run, fake: type[FakeLLM]) -> None:
    done = run("generate", "m.gguf", "-p", "hello", "--seed", "5")
    assert (done.code, done.out) == (0, TEXT + "\n")
    assert "no GPU found: running on the CPU" in done.err
    assert "load 0.50 s | first token 0.10 s | prompt 5 tokens, 50.0 tok/s" in done.err
    assert "reply 3 tokens, 5.0 tok/s | ended by length" in done.err
    assert "memory: device 5.0 MiB, host 0.0 MiB | seed 5" in done.err
    assert fake.calls[0]["model"] == "m.gguf"
    assert fake.calls[-1] == {"closed": True}


def test_without_a_model_the_demo_model_is_used_and_said_so(run: Run, fake: type[FakeLLM]) -> None:
    done = run("generate", "-p", "x")
    assert fake.calls[0]["model"] is None
    assert "built-in demo model" in done.err
    assert "seed 77" in done.err


def test_options_reach_the_model(run: Run, fake: type[FakeLLM]) -> None:
    options = ("--temp", "0.5", "--top-k", "7", "--stop", "a b", "--stop", "c", "--ignore-eos")
    run("generate", "-m", "m.gguf", "-p", "x", "-n", "9", "-c", "99", *options)
    assert fake.calls[0]["config"].ctx_size == 99
    call = fake.calls[1]
    assert (call["sampling"].temp, call["sampling"].top_k) == (0.5, 7)
    assert (call["max_tokens"], call["stop"], call["ignore_eos"]) == (9, ["a b", "c"], True)


def test_minus_one_token_means_no_limit(run: Run, fake: type[FakeLLM]) -> None:
    assert run("generate", "-p", "x", "-n", "-1").code == 0
    assert fake.calls[1]["max_tokens"] is None


def test_quiet_leaves_only_the_text(run: Run, fake: type[FakeLLM]) -> None:
    assert run("generate", "-p", "x", "-q") == (0, TEXT + "\n", "")


def test_verbose_tells_device_and_plan(run: Run, fake: type[FakeLLM]) -> None:
    done = run("generate", "-p", "x", "-v")
    assert "device 0: Invented GPU (cpu, driver 1.0)" in done.err
    assert "things (why)" in done.err


def test_json_is_one_document(run: Run, fake: type[FakeLLM]) -> None:
    done = run("generate", "-p", "x", "--json", "--seed", "3")
    document = json.loads(done.out)
    assert document["text"] == TEXT
    assert document["token_ids"] == [0, 1, 2]
    assert (document["finish_reason"], document["seed"]) == ("length", 3)
    assert document["decode_rate"] == pytest.approx(5.0)
    assert document["memory_bytes"] == {"device": 5 << 20, "host": 0}
    assert {"model", "device", "ctx_size", "load_seconds", "ttft_seconds"} <= set(document)


def test_every_prompt_source(run: Run, fake: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("für\n".encode())
    assert run("generate", "-f", str(file)).code == 0
    assert run("generate", "m.gguf", "-", stdin="é\n".encode()).code == 0
    assert run("generate", "-", "m.gguf", stdin=b"two").code == 0
    assert run("generate", "-f", "-", stdin=b"three").code == 0
    assert run("generate", VKMOE_PROMPT="four").code == 0
    assert run("generate", VKMOE_FILE=str(file)).code == 0
    assert run("generate", "-p", "a\udcff").code == run("generate", "-", stdin=b"a\xff").code == 0
    assert prompts(fake) == ["für\n", "é\n", "two", "three", "four", "für\n", *["a\ufffd"] * 2]


def test_the_command_line_wins_over_variables(run: Run, fake: type[FakeLLM]) -> None:
    run("generate", "typed.gguf", "-p", "typed", VKMOE_FILE="x", VKMOE_MODEL="variable.gguf")
    run("generate", "-", stdin=b"piped", VKMOE_PROMPT="variable", VKMOE_MODEL="variable.gguf")
    assert prompts(fake) == ["typed", "piped"]
    assert [call["model"] for call in fake.calls if "model" in call] == [
        "typed.gguf",
        "variable.gguf",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt given"),
        (("-p", "a", "-f", "b"), "more than one prompt given"),
        (("-p", "a", "-"), "more than one prompt given"),
        (("-f", "-", "-"), "more than one prompt given"),
        (("a.gguf", "b.gguf", "-p", "x"), "more than one model given: a.gguf, b.gguf"),
        (("a.gguf", "-m", "b.gguf", "-p", "x"), "two models given: a.gguf and -m b.gguf"),
        (("-p", "x", "-v", "-q"), "--verbose and --quiet contradict"),
        (("-p", "x", "--stop", ""), "--stop is empty"),
        (("-p", "x", "-n", "-2"), "--max-tokens"),
        (("-p", "x", "--nonsense"), "No such option"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    run: Run, fake: type[FakeLLM], arguments: tuple[str, ...], message: str
) -> None:
    done = run("generate", *arguments)
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2
    assert not fake.calls, "the model was loaded before the options were checked"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("-",), b"", "the prompt is empty"),
        (("-p", ""), b"", "the prompt is empty"),
        (("-f", "/nowhere/at/all"), b"", "/nowhere/at/all cannot be read: No such file"),
        (("-f", "/"), b"", "cannot be read: Is a directory"),
        (("-p", "x" * 201), b"", "the prompt has 201 tokens, the context holds 200"),
    ],
)
def test_a_bad_prompt_is_one_line_and_exit_code_1(
    run: Run, fake: type[FakeLLM], arguments: tuple[str, ...], stdin: bytes, message: str
) -> None:
    done = run("generate", "-q", *arguments, stdin=stdin)
    assert (done.code, done.out) == (1, "")
    assert message in done.err.splitlines()[0]
    assert len(done.err.splitlines()) <= 2
    assert "Traceback" not in done.err


def test_ctrl_c_ends_with_the_statistics_and_130(run: Run, fake: type[FakeLLM]) -> None:
    fake.fail_after = (1, KeyboardInterrupt())
    done = run("generate", "-p", "x")
    assert (done.code, done.out) == (130, "one \n")
    assert "ended by interrupt" in done.err
    assert fake.calls[-1] == {"closed": True}


def test_ctrl_c_keeps_the_json_document_whole(run: Run, fake: type[FakeLLM]) -> None:
    fake.fail_after = (1, KeyboardInterrupt())
    done = run("generate", "-p", "x", "--json")
    assert done.code == 130
    assert json.loads(done.out)["finish_reason"] == "interrupt"
    assert json.loads(done.out)["text"] == "one "


def test_an_error_in_the_middle_starts_on_a_line_of_its_own(run: Run, fake: type[FakeLLM]) -> None:
    fake.fail_after = (2, DeviceLostError("the driver reset the device", "try again"))
    done = run("generate", "-p", "x", "-q")
    assert done == (1, "one two\n", "error: the driver reset the device\nhint: try again\n")
