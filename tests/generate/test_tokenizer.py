"""The tokenizer: real vocabularies token for token, special tokens, and damaged metadata."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkmoe.errors import ModelFileError, PromptError, UnsupportedModelError, VkmoeError
from vkmoe.generate.pretokenizer import PRE_TOKENIZERS, pre_tokenizer_spec
from vkmoe.generate.tokenizer import Tokenizer

from .conftest import tiny_metadata

BYTES = list(range(256))
HE, LL, HELL, BOS, IM_END, THINK = range(256, 262)


def tiny(**changes: Any) -> Tokenizer:
    return Tokenizer.from_metadata(tiny_metadata(**changes))


@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "llama-bpe"])
def test_real_vocabularies_token_for_token(shared: Path, name: str) -> None:
    from vkmoe.gguf_file import open_gguf

    path = shared / "vocab" / f"ggml-vocab-{name}.gguf"
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    expected = [[int(word) for word in line.split()] for line in lines]
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text
        assert tokenizer.decode(ids) == text


_OPEN = """
import sys
from vkmoe.generate.tokenizer import Tokenizer
from vkmoe.gguf_file import open_gguf
def peak():
    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])
before = peak()
with open_gguf(sys.argv[1]) as file:
    tokenizer = Tokenizer.from_metadata(file.metadata)
assert tokenizer.n_vocab == 151936
print((peak() - before) / 1024)
"""


@pytest.mark.shared
def test_the_large_vocabulary_opens_in_little_memory(shared: Path) -> None:
    """Its speed is measured by bench/vocabulary.py."""
    path = shared / "vocab" / "ggml-vocab-qwen2.gguf"
    command = [sys.executable, "-c", _OPEN, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 100  # MiB


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
    assert tiny().decode([THINK, HE, IM_END], skip_control=True) == "<think>he"


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
    plain = tiny(token_type=None, eos_token_id=None, bos_token_id=None)
    assert plain.end_ids == frozenset()


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


def test_composing_kinds_join_an_accent_to_its_letter() -> None:
    assert tiny(pre="qwen2").encode("e\u0301") == [*"é".encode()]
    assert tiny(pre="gpt-2").encode("e\u0301") == [*"e\u0301".encode()]


def test_an_unknown_pre_tokenizer_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="'dbrx'") as caught:
        pre_tokenizer_spec("dbrx")
    assert all(name in caught.value.hint for name in PRE_TOKENIZERS)


def test_text_that_is_no_unicode_is_an_error() -> None:
    with pytest.raises(PromptError, match="not valid Unicode"):
        tiny().encode("a\ud800")


def test_a_byte_without_a_token_is_an_error_not_lost_text() -> None:
    metadata = tiny_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[0xC3] = "unused"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("he") == [HE]
    with pytest.raises(PromptError, match="0xc3"):
        tokenizer.encode("é")


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for token_id in (-1, 262):
        with pytest.raises(IndexError):
            tiny().token_bytes(token_id)


def tokens_with(**places: str) -> list[str]:
    tokens = list(tiny_metadata()["tokenizer.ggml.tokens"])
    for place, text in places.items():
        tokens[int(place[1:])] = text
    return tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"tokens": []}, "vocabulary is empty"),
        ({"tokens": "abc"}, "tokens is not a list of strings"),
        ({"tokens": np.zeros(3)}, "tokens is not a list of strings"),
        ({"merges": ["h e", 5]}, "merges is not a list of strings"),
        ({"tokens": tokens_with(_5="he")}, "'he' twice, as 5 and 256"),
        ({"merges": ["h e", "x yz"]}, "merge 1 is not a pair"),
        ({"merges": ["a b"]}, "do not fit"),
        ({"merges": ["nothing"]}, "merge 0 is not a pair"),
        ({"merges": ["h e", " "]}, "merge 1 is not a pair"),
        ({"merges": ["a "]}, "merge 0 is not a pair"),
        ({"merges": [""]}, "merge 0 is not a pair"),
        ({"token_type": [1, 1]}, "262 tokens but 2 token types"),
        ({"token_type": [1] * 261 + [9]}, "token 261 the unknown type 9"),
        ({"token_type": "x"}, "not a list of integers"),
        ({"token_type": ["a"] * 262}, "not a list of integers"),
        ({"bos_token_id": 262}, "bos_token_id is 262"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": 2**64 - 1}, "eos_token_id is 18446744073709551615"),
        ({"eos_token_id": "x"}, "not an integer"),
        ({"eot_token_id": 2.5}, "not an integer"),
        ({"add_bos_token": 3}, "not true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_damaged_metadata_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        tiny(**changes)
    assert "\n" not in str(caught.value)


def test_other_tokenizer_models_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        tiny(model="llama")


def test_mutated_metadata_never_crashes() -> None:
    rng = random.Random(2)
    outcomes = set()
    for _ in range(300):
        metadata = tiny_metadata()
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(sorted(metadata))
            value = metadata[key]
            if isinstance(value, list) and value and rng.random() < 0.8:
                place = rng.randrange(len(value))
                value[place] = rng.choice([value[-1], "", "\x00", "a b", "<|x|>"])
            else:
                metadata[key] = rng.choice([None, 0, -5, 2**40, "gpt2", [], np.zeros(3)])
        try:
            tokenizer = Tokenizer.from_metadata(metadata)
            tokenizer.encode("hell <|im_end|>")
            outcomes.add("works")
        except VkmoeError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"works", "refused"}


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
