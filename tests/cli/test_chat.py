"""`vkmoe chat` with an invented model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.generate.conftest import metadata_with, spm_metadata
from vkmoe.cli.chat import _next_message

from .conftest import FakeLLM, Run


def prompts(fake: type[FakeLLM]) -> list[str]:
    return [call["prompt"] for call in fake.calls if "prompt" in call]


def test_a_conversation_remembers_what_was_said(run: Run, fake: type[FakeLLM]) -> None:
    done = run("chat", "m.gguf", "--system", "S", stdin=b"hi\nyou\n")
    assert (done.code, done.out) == (0, "one two thrée!\n" * 2)
    assert prompts(fake) == [
        "[system: S][user: hi]",
        "[system: S][user: hi][assistant: one two thrée!][user: you]",
    ]


def test_the_blank_a_sentencepiece_model_begins_with_is_dropped(
    run: Run, fake: type[FakeLLM]
) -> None:
    fake.pieces, fake.vocabulary = ("", " Hello", " you"), spm_metadata(["▁"])
    assert run("chat", stdin=b"hi\nyou\n").out == "Hello you!\n" * 2
    assert prompts(fake)[1] == "[user: hi][assistant: Hello you!][user: you]"
    fake.vocabulary = spm_metadata(["▁"], add_space_prefix=False)
    assert run("chat", stdin=b"hi\n").out == " Hello you!\n"


CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def test_marks_of_channels_are_text_in_other_models(run: Run, fake: type[FakeLLM]) -> None:
    fake.pieces = ("Write <|start|>", " first")
    assert run("chat", stdin=b"hi\n").out == "Write <|start|> first!\n"


def test_thoughts_go_to_stderr_and_are_not_remembered(run: Run, fake: type[FakeLLM]) -> None:
    fake.vocabulary = metadata_with(*CHANNELS)  # as gpt-oss
    fake.pieces = ("<|channel|>analysis<|message|>Hm", ".<|end|><|start|>assistant<|channel|>fi",
                   "nal<|message|>Hello")  # fmt: skip
    done = run("chat", stdin=b"hi\nyou\n")
    assert done.out == "Hello!\n" * 2
    assert done.err.count("Hm.\n\n") == 2 and "channel" not in done.err
    assert prompts(fake)[1] == "[user: hi][assistant: Hello!][user: you]"
    done = run("chat", "--quiet", stdin=b"hi\n")
    assert (done.out, done.err) == ("Hello!\n", "")


def test_clear_forgets_all_but_the_system_message(run: Run, fake: type[FakeLLM]) -> None:
    run("chat", "--system", "S", stdin=b"hi\n/clear\nyou\n")
    assert prompts(fake)[1] == "[system: S][user: you]"


def test_exit_ends_and_blank_lines_are_nothing(run: Run, fake: type[FakeLLM]) -> None:
    done = run("chat", stdin=b"\n  \n/exit\nhi\n")
    assert (done.code, prompts(fake)) == (0, [])


def test_an_unknown_command_is_named(run: Run, fake: type[FakeLLM]) -> None:
    done = run("chat", stdin=b"/help me\n")
    assert "unknown command /help; there are /clear and /exit" in done.err
    assert prompts(fake) == []


def test_ctrl_c_stops_the_reply_only(run: Run, fake: type[FakeLLM]) -> None:
    fake.fail_after = (1, KeyboardInterrupt())
    done = run("chat", stdin=b"hi\nyou\n")
    assert (done.code, done.out) == (0, "one \none \n")
    assert prompts(fake)[1] == "[user: hi][assistant: one ][user: you]"


def test_a_message_that_does_not_fit_is_taken_back(run: Run, fake: type[FakeLLM]) -> None:
    done = run("chat", stdin=b"x" * 300 + b"\nhi\n")
    assert done.code == 0
    assert "error: the prompt has 201 tokens" in done.err
    assert prompts(fake)[1] == "[user: hi]"


def test_names_reach_the_template(run: Run, fake: type[FakeLLM]) -> None:
    fake.template = "{{ messages[0].content }} thinking={{ enable_thinking }}"
    run("chat", "--chat-template-kwargs", '{"enable_thinking": false}', stdin=b"hi\n")
    assert prompts(fake) == ["hi thinking=False"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"messages": []}', "must not set 'messages'"),
        ('{"add_generation_prompt": 1}', "must not set 'add_generation_prompt'"),
    ],
)
def test_bad_template_names_are_wrong_usage(
    run: Run, fake: type[FakeLLM], text: str, message: str
) -> None:
    done = run("chat", VKMOE_CHAT_TEMPLATE_KWARGS=text)
    assert done.code == 2
    assert "VKMOE_CHAT_TEMPLATE_KWARGS" in done.err.splitlines()[0]
    assert message in done.err.splitlines()[0]
    assert not fake.calls


def test_a_model_without_a_template_cannot_chat(run: Run, fake: type[FakeLLM]) -> None:
    fake.template = None
    done = run("chat", "-q", stdin=b"hi\n")
    assert done == (1, "", "error: the model has no chat template\nhint: use vkmoe generate\n")


def test_statistics_on_request(run: Run, fake: type[FakeLLM]) -> None:
    assert "tok/s" not in run("chat", stdin=b"hi\n").err
    assert "tok/s" in run("chat", "-v", stdin=b"hi\n").err


def test_at_a_terminal_ctrl_c_asks_again_and_ctrl_d_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[str | BaseException] = iter([KeyboardInterrupt(), "hi", EOFError()])

    def answer(prompt: str) -> str:
        value = next(answers)
        if isinstance(value, BaseException):
            raise value
        return value

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    assert _next_message() == "hi"
    assert "/exit or Ctrl-D" in capsys.readouterr().err
    assert _next_message() is None


def test_a_chat_template_may_be_given(run: Run, fake: type[FakeLLM], tmp_path: Path) -> None:
    """As its text, by a name, or in a file; two of them, an unknown name, no file are refused."""
    file = tmp_path / "mine.jinja"
    file.write_text("FILE{{ messages[0].content }}")
    for words, prompt in (
        (("--chat-template", "TEXT{{ messages[0].content }}"), "TEXThi"),
        (("--chat-template-file", str(file)), "FILEhi"),
        (("--chat-template", "chatml"), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    ):
        assert run("chat", *words, stdin=b"hi\n").code == 0
        assert prompts(fake)[-1] == prompt
    for wrong, code, message in (
        (("--chat-template", "{{x}}", "--chat-template-file", str(file)), 2, "two chat templates"),
        (("--chat-template", "no-such"), 2, "no chat template called 'no-such'"),
        (("--chat-template-file", str(tmp_path / "none")), 1, "cannot be read"),
    ):
        done = run("chat", *wrong, stdin=b"hi\n")
        assert done.code == code and message in done.err, wrong
