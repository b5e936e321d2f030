"""Files of prompts are checked before anything runs; files of replies are gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vkmoe.config import SamplingConfig
from vkmoe.errors import PromptError, VkmoeError
from vkmoe.generate.prompts import PromptLine, RepliesFile, read_prompts

SAMPLING = SamplingConfig(temp=0.5, top_k=7)
LIMITS = {"max_tokens": 9, "stop": ["x"], "ignore_eos": False}


def read(tmp_path: Path, *lines: Any) -> list[PromptLine]:
    path = tmp_path / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return read_prompts(path, SAMPLING, LIMITS)


def test_a_line_says_what_differs_from_the_run(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hi"}
    first, second, third = read(
        tmp_path,
        {"prompt": "a"},
        "",
        {"id": "two", "prompt": [1, 2], "seed": 3, "temp": 0, "max_tokens": -1, "stop": "."},
        {"id": 7, "messages": [message], "chat_template_kwargs": {"b": 1}, "ignore_eos": True},
    )
    assert (first.number, first.id, first.prompt) == (1, 1, "a")
    assert (first.sampling, first.limits) == (SAMPLING, LIMITS)
    assert (second.number, second.id, second.prompt) == (3, "two", (1, 2))
    assert second.sampling == SamplingConfig(temp=0, top_k=7, seed=3)
    assert second.limits == {"max_tokens": None, "stop": (".",), "ignore_eos": False}
    assert (third.id, third.prompt, third.messages) == (7, None, (message,))
    assert third.template_names == {"b": 1} and third.limits["ignore_eos"] is True


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ([1], "no JSON object"),
        ({"id": 2}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, "a"]}, "neither"),
        ({"prompt": [True]}, "neither"),
        ({"prompt": "a", "tempo": 1}, "'tempo'"),
        ({"prompt": "a", "temp": -1}, "temp is -1"),
        ({"prompt": "a", "seed": "b"}, "seed is 'b'"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": 1}, "stop"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos"),
        ({"prompt": "a", "id": 1.5}, "id"),
        ({"prompt": "a", "id": True}, "id"),
        ({"prompt": "a", "id": "first"}, "line 1"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"prompt": "a", "chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        read(tmp_path, {"id": "first", "prompt": "x"}, "", line)
    assert f"{tmp_path / 'prompts.jsonl'}, line 3: " in str(caught.value)
    assert caught.value.hint


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for data, words in ((b"\n\n", "no prompts"), (b'\n"\xff"', "line 2: not UTF-8")):
        path.write_bytes(data)
        with pytest.raises(PromptError, match=words):
            read_prompts(path, SAMPLING, LIMITS)
    with pytest.raises(PromptError, match="No such file"):
        read_prompts(tmp_path / "none", SAMPLING, LIMITS)
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [line.prompt for line in read_prompts(path, SAMPLING, LIMITS)] == ["a", "b"]


def test_replies_are_appended_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    with RepliesFile(path) as replies:
        assert replies.ids == set() and not path.exists()
        replies.write({"id": 1, "text": "é\u2028\n"})
        assert json.loads(path.read_bytes())["text"] == "é\u2028\n", "not yet flushed"
        replies.write({"id": "b"})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "c", "te')
    with RepliesFile(path) as replies:
        assert replies.ids == {1, "b"}
        replies.write({"id": "c"})
    assert path.read_bytes() == whole + b'{"id": "c"}\n'


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text('{"id": 1}\nbuy milk\n')
    with pytest.raises(PromptError, match="line 2: no reply"):
        RepliesFile(path)
    assert path.read_text() == '{"id": 1}\nbuy milk\n'


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    with pytest.raises(VkmoeError, match="/dev/full cannot be written") as caught:
        RepliesFile(Path("/dev/full")).write({"id": 1})
    assert caught.value.hint


def test_without_a_file_replies_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with RepliesFile(None) as replies:
        replies.write({"id": 1})
    assert capsys.readouterr().out == '{"id": 1}\n'
