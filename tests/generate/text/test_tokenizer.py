"""The tokenizer: how words are cut, what is added around a text, and text that streams."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.generate.conftest import tiny_metadata, tokenizer_of, tokens_with
from vkmoe.errors import PromptError, UnsupportedModelError
from vkmoe.generate.text.byte_level import PRE_TOKENIZERS
from vkmoe.generate.text.tokenizer import StreamDetokenizer, Tokenizer

BYTES = list(range(256))
HE, LL, HELL, BOS, IM_END, THINK = range(256, 262)


def tiny(**changes: Any) -> Tokenizer:
    return tokenizer_of(tiny_metadata(**changes))


_OPEN = """
import sys
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import open_gguf
def peak():
    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])
before = peak()
with open_gguf(sys.argv[1]) as file:
    tokenizer = Tokenizer.from_file(file)
assert tokenizer.n_vocab == 151936
print((peak() - before) / 1024)
"""


@pytest.mark.shared
def test_the_large_vocabulary_opens_in_little_memory(shared: Path) -> None:
    path = shared / "vocab" / "ggml-vocab-qwen2.gguf"
    command = [sys.executable, "-c", _OPEN, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 100  # MiB


_ENCODE = """
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import open_gguf
from vkmoe.llm import demo_model_path
def peak():
    return 1024 * int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])
with open_gguf(demo_model_path()) as file:
    tokenizer = Tokenizer.from_file(file)
text = ''.join(f'Text {i} has many words, and the words are many.\\n' for i in range(100_000))
start = text[:200_000]
assert tokenizer.decode(tokenizer.encode(start, add_special=False)) == start
before = peak()
ids = tokenizer.encode(text)
print((peak() - before) / len(text))
"""


def test_a_long_text_takes_memory_for_its_tokens_alone() -> None:
    """Not for what the package of tokenizers knows of each: 200 bytes for each of the text's."""
    command = [sys.executable, "-c", _ENCODE]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 10


def test_a_text_that_cannot_be_cut_is_refused_if_it_is_long() -> None:
    tokenizer = tiny()
    assert tokenizer.encode("he" * 50_000) == [HE] * 50_000
    with pytest.raises(PromptError, match="characters in a row"):
        tokenizer.encode("he" * 200_000)


def test_words_merge_and_spaces_count() -> None:
    assert tiny().encode("hell he") == [HELL, 0x20, HE]
    assert tiny().encode("h e") == [*b"h e"]


def test_any_text_survives() -> None:
    tokenizer, rng = tiny(), random.Random(0)
    for _ in range(200):
        text = "".join(chr(rng.choice((10, 32, 104, 101, 233, 0x3042, 0x1F999))) for _ in range(20))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_parsed_on_request_and_user_defined_ones_always() -> None:
    text = "<think>he<|im_end|>"
    assert tiny().encode(text) == [THINK, HE, IM_END]
    assert tiny().encode(text, parse_special=False) == [THINK, HE, *b"<|im_end|>"]
    assert tiny().decode([THINK, HE, IM_END]) == text


def test_bos_and_eos_are_added_once_and_only_on_request() -> None:
    both = tiny(add_bos_token=True, add_eos_token=True, eos_token_id=IM_END)
    assert both.encode("he") == [BOS, HE, IM_END]
    assert both.encode("<|endoftext|>he<|im_end|>") == [BOS, HE, IM_END]
    assert both.encode("he", add_special=False) == [HE]
    assert both.encode("") == [BOS, IM_END]
    assert tiny().encode("he") == [HE]


def test_llama_bpe_adds_bos_unless_the_file_says_no() -> None:
    assert tiny(pre="llama-bpe").encode("he") == [BOS, HE]
    assert tiny(pre="llama-bpe", add_bos_token=False).encode("he") == [HE]


def test_end_tokens_are_those_declared_and_those_known_by_their_text() -> None:
    assert tiny().end_ids == {BOS, IM_END}
    assert tiny(eos_token_id=5, eot_token_id=6, eom_token_id=7).end_ids == {5, 6, 7, BOS, IM_END}
    assert tiny(token_type=None, eos_token_id=None, bos_token_id=None).end_ids == {BOS, IM_END}
    unknown = {"tokens": tokens_with(_259="<|x|>", _260="<|y|>"), "eos_token_id": None}
    assert tiny(**unknown, bos_token_id=None).end_ids == frozenset()


def test_llama_bpe_takes_a_known_word_whole() -> None:
    unmerged = {"merges": ["h e"]}
    assert tiny(**unmerged).encode("hell") == [HE, *b"ll"]
    assert tiny(pre="llama-bpe", add_bos_token=False, **unmerged).encode("hell") == [HELL]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["ab", " 123", "'s", "'", "S", " ", " c", "\n\n"]),
        ("olmo", ["ab", " 123", "'s", "'", "S", " ", " c", "\n\n"]),
        ("qwen2", ["ab", " ", "1", "2", "3", "'s", "'S", " ", " c", "\n\n"]),
        ("llama-bpe", ["ab", " ", "123", "'s", "'S", " ", " c", "\n\n"]),
        ("smollm", ["ab", " ", "1", "2", "3", "'s", "'", "S", " ", " c", "\n\n"]),
    ],
)
def test_how_words_are_cut(name: str, words: list[str]) -> None:
    cut = PRE_TOKENIZERS[name].pre_tokenizer().pre_tokenize_str("ab 123's'S  c\n\n")
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in cut] == words


def test_an_accent_is_not_joined_to_its_letter() -> None:
    """As in llama.cpp; the published tokenizers of these models compose text first (NFC)."""
    for pre in ("qwen2", "olmo"):
        assert tiny(pre=pre).encode("e\u0301") == [*"e\u0301".encode()]


@pytest.mark.parametrize(
    "aliases",
    [
        ["llama-bpe", "llama3", "llama-v3", "lfm2"],
        ["qwen2", "deepseek-r1-qwen", "hunyuan", "stablelm2", "bailingmoe2"],
        ["gpt-4o", "llama4"],
        ["glm4", "glm5"],
        ["chatglm-bpe", "smaug-bpe", "dbrx"],
        ["gpt-2", "phi-2", "olmo"],
        ["smollm", "starcoder", "command-r"],
    ],
)
def test_one_kind_has_several_names(aliases: list[str]) -> None:
    assert {PRE_TOKENIZERS[name].name for name in aliases} == {aliases[0]}


def test_a_file_without_a_kind_gets_the_default_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for missing in (None, ""):
        caplog.clear()
        assert tiny(pre=missing).pre_name == "default"
        assert "answers may be worse" in caplog.text


@pytest.mark.parametrize("name", sorted({spec.name for spec in PRE_TOKENIZERS.values()}))
def test_long_runs_are_cut_in_linear_time(name: str) -> None:
    """A pattern that tried every split would take hours; the time is not measured."""
    cut = PRE_TOKENIZERS[name].pre_tokenizer().pre_tokenize_str
    for unit in (" ", "a", "A", "\n", "é", "中", "1", ".", " \n", "aA", "\t", "'", "\u0301"):
        text = unit * (40_000 // len(unit)) + "x"
        assert sum(end - start for _, (start, end) in cut(text)) == len(text)


def test_an_unknown_pre_tokenizer_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="'falcon'") as caught:
        tiny(pre="falcon")
    assert all(name in caught.value.hint for name in PRE_TOKENIZERS)


def test_a_byte_without_a_token_is_an_error_not_lost_text() -> None:
    metadata = tiny_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[0xC3] = "unused"
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("he") == [HE]
    with pytest.raises(PromptError, match="0xc3"):
        tokenizer.encode("é")


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for token_id in (-1, 262):
        with pytest.raises(IndexError):
            tiny().token_text(token_id)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.finish()]


def test_a_character_appears_with_its_last_byte(tiny_tokenizer: Tokenizer) -> None:
    ids = list("é🦙".encode())
    assert stream(tiny_tokenizer, ids) == ["", "é", "", "", "", "🦙", ""]


def test_an_unfinished_character_shows_at_the_very_end_only(tiny_tokenizer: Tokenizer) -> None:
    assert stream(tiny_tokenizer, [*b"a", 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_become_replacement_characters(tiny_tokenizer: Tokenizer) -> None:
    assert stream(tiny_tokenizer, [0xFF, *b"a", 0xC3, *b"b"]) == ["\ufffd", "a", "", "\ufffdb", ""]


def test_control_tokens_do_not_show(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("he<|im_end|><think>")
    assert "".join(stream(tiny_tokenizer, ids)) == "he<think>"
    assert tiny_tokenizer.decode(ids) == "he<|im_end|><think>"


def test_rows_beyond_the_vocabulary_have_no_text(tiny_tokenizer: Tokenizer) -> None:
    assert "".join(stream(tiny_tokenizer, [*b"a", tiny_tokenizer.n_vocab, *b"b"])) == "ab"


def test_bytes_that_stream_read_as_they_do_at_once(tiny_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tiny_tokenizer.n_vocab) for _ in range(30)]
        raw = b"".join(tiny_tokenizer.token_bytes(i, after_special=False) for i in ids)
        text = raw.decode("utf-8", "replace")
        assert tiny_tokenizer.decode(ids) == text


def test_threads_do_not_mix_their_ways_of_parsing() -> None:
    tokenizer = tiny()
    expected = {flag: tokenizer.encode("<|im_end|>", parse_special=flag) for flag in (True, False)}
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        for _ in range(300):
            if tokenizer.encode("<|im_end|>", parse_special=flag) != expected[flag]:
                wrong.append(flag)

    threads = [threading.Thread(target=work, args=(flag,)) for flag in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
