"""`vkmoe generate --prompts`: a file of prompts in, lines of replies out, again and again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vkmoe.batch import RunResult, TokenBatch
from vkmoe.llm import LLM

from .conftest import FakeLLM, Run

pytestmark = pytest.mark.usefixtures("one_device")

LINES = [
    {"prompt": "def add(a, b):\n"},
    {"id": "b", "prompt": [1, 2, 3], "max_tokens": 3, "seed": 5, "temp": 1},
    {"id": "c", "prompt": "class A", "max_tokens": 2},
]
COMMON = ("--temp", "0", "-n", "4", "--ignore-eos")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


def replies(text: str) -> dict[Any, Any]:
    return {line["id"]: line for line in map(json.loads, text.splitlines())}


def test_every_line_gets_a_reply(run: Run, demo: LLM, prompts: Path) -> None:
    done = run("generate", "--prompts", str(prompts), *COMMON)
    assert done.code == 0
    found = replies(done.out)
    assert set(found) == {1, "b", "c"}
    alone = [
        demo.generate("def add(a, b):\n", max_tokens=4, temp=0, ignore_eos=True),
        demo.generate([1, 2, 3], max_tokens=3, temp=1, seed=5, ignore_eos=True),
        demo.generate("class A", max_tokens=2, temp=0, ignore_eos=True),
    ]
    for line, result in zip(found.values(), alone, strict=True):
        assert line["text"] == result.text
        assert line["finish_reason"] == result.finish_reason == "length"
        assert line["n_generated_tokens"] == len(result.token_ids)
        assert line["n_prompt_tokens"] == result.statistics.n_prompt_tokens
    assert found["b"]["seed"] == 5
    assert "3 of 3 replies in " in done.err and "9 tokens generated" in done.err


def test_messages_go_through_the_chat_template(run: Run, demo: LLM, prompts: Path) -> None:
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    done = run("generate", "--prompts", str(prompts), *COMMON)
    if done.code:  # the demo model has no template
        assert f"error: {prompts}, line 1: the model has no chat template" in done.err
    else:
        assert len(replies(done.out)) == 1


def test_a_second_run_goes_on(run: Run, demo: LLM, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "replies.jsonl"
    command = ("generate", "--prompts", str(prompts), "-o", str(output), *COMMON, "--seed", "1")
    assert run(*command).out == ""
    whole = output.read_text()
    output.write_text(whole[:-9])
    done = run(*command)
    assert output.read_text() == whole
    assert f"2 of 3 replies are in {output} already" in done.err
    assert "1 of 1 replies" in done.err
    again = run(*command)
    assert again.code == 0 and "3 of 3 replies are in" in again.err
    assert output.read_text() == whole
    assert run(*command, "-q") == (0, "", "")


def test_ctrl_c_keeps_what_is_finished(
    run: Run, demo: LLM, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, engine_run = tmp_path / "replies.jsonl", demo.engine.run
    command = ("generate", "--prompts", str(prompts), "-o", str(output), *COMMON)

    def interrupted(batch: TokenBatch) -> RunResult:
        if batch.tokens[0] == 1 and batch.positions[0] == 0:
            raise KeyboardInterrupt
        return engine_run(batch)

    with monkeypatch.context() as patch:
        patch.setattr(demo.engine, "run", interrupted)
        done = run(*command)
    assert done.code == 130 and "1 of 3 replies" in done.err
    assert set(replies(output.read_text())) == {1}
    assert run(*command).code == 0
    assert set(replies(output.read_text())) == {1, "b", "c"}


def test_a_damaged_line_is_named_before_a_model_is_loaded(
    run: Run, fake: type[FakeLLM], prompts: Path
) -> None:
    prompts.write_text(prompts.read_text() + '\n{"id": "b", "prompt": "a"}')
    done = run("generate", "--prompts", str(prompts))
    assert (done.code, done.out, fake.calls) == (1, "", [])
    assert f"error: {prompts}, line 4: the id 'b' is that of line 2" in done.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": [1, 1 << 20]}, "line 4: token id 1048576 is not one"),
        ({"prompt": "x " * 200}, "line 4: the prompt has "),
    ],
)
def test_a_prompt_that_cannot_run_is_named_before_any_does(
    run: Run, demo: LLM, prompts: Path, tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    output = tmp_path / "replies.jsonl"
    with prompts.open("a") as file:
        file.write("\n" + json.dumps(line))
    done = run("generate", "--prompts", str(prompts), "-o", str(output), *COMMON)
    assert done.code == 1 and message in done.err
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("-p", "x"), 2, "more than one prompt given"),
        (("-",), 2, "more than one prompt given"),
        (("--output", "PROMPTS"), 2, "--output PROMPTS would overwrite PROMPTS"),
        (("--output", "/nowhere/r"), 1, "the replies cannot be written: no folder"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    run: Run, fake: type[FakeLLM], prompts: Path, options: Any, code: int, message: str
) -> None:
    words = [word.replace("PROMPTS", str(prompts)) for word in options]
    done = run("generate", "--prompts", str(prompts), *words)
    assert (done.code, done.out, fake.calls) == (code, "", [])
    assert message.replace("PROMPTS", str(prompts)) in done.err


def test_what_is_typed_wins_over_a_variable(run: Run, fake: type[FakeLLM], prompts: Path) -> None:
    assert run("generate", "-p", "typed", "-q", VKMOE_PROMPTS=str(prompts)).code == 0
    assert fake.calls[1]["prompt"] == "typed"


def test_prompts_may_come_from_standard_input(run: Run, demo: LLM) -> None:
    text = "\n".join(map(json.dumps, LINES)).encode()
    done = run("generate", "--prompts", "-", *COMMON, stdin=text)
    assert done.code == 0 and set(replies(done.out)) == {1, "b", "c"}


def test_an_id_that_is_no_text_in_utf_8_is_found_again(
    run: Run, demo: LLM, prompts: Path, tmp_path: Path
) -> None:
    prompts.write_text(json.dumps({"id": "\ud800x", "prompt": [1], "max_tokens": 2}))
    command = ("generate", "--prompts", str(prompts), "-o", str(tmp_path / "o"), *COMMON)
    assert run(*command).code == 0
    assert "1 of 1 replies are in" in run(*command).err


def test_an_output_without_prompts_is_refused(run: Run) -> None:
    done = run("generate", "-p", "x", "-o", "out.txt")
    assert done.code == 2 and "--output is for replies to --prompts" in done.err
