"""Real vocabularies, token for token: the ids published with them and what llama.cpp makes of
difficult strings (stored by tools/make_tokenizer_goldens.py); and small ones, trained on those
strings, that families' own tokenizers read (tools/make_family_goldens.py).
"""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest

from tests.generate.conftest import tokenizer_of
from tools.make_family_goldens import strings
from tools.make_tokenizer_goldens import KINDS
from tools.pair_vocabulary import pair_vocabulary
from tools.tokenizer_strings import difficult_strings
from vkmoe.generate.text.byte_level import PRE_TOKENIZERS
from vkmoe.generate.text.sentencepiece import SentencePieceCodec
from vkmoe.generate.text.tokenizer import StreamDetokenizer, Tokenizer
from vkmoe.generate.text.vocabulary import TokenType, Vocabulary, read_vocabulary
from vkmoe.gguf_file import open_gguf

GOLDENS = Path(__file__).with_name("tokens")
NAMES = (
    *("deepseek-coder", "deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"),
    "qwen35",
)
PAIRS = tuple(f"pairs-{kind}" for kind in KINDS)
SENTENCEPIECE = ("llama-spm", "phi-3")
SPELLED = (
    *SENTENCEPIECE,
    *(f"pairs-{kind}" for kind in KINDS if PRE_TOKENIZERS[kind].in_characters),
)
# How many strings the families themselves cut in another way than llama.cpp and vkmoe: Kimi's those
# with combining marks, Aya's those with blanks or letters beside a number.
OWN = {"bailingmoe": 0, "exaone-moe": 0, "gemma4": 0, "kimi-k2": 85, "tiny_aya": 11}
# Parameters: those of the folder shared/, and those that need no folder.
THERE = [pytest.param(name, marks=pytest.mark.shared) for name in NAMES]
THERE_SPM = [pytest.param(name, marks=pytest.mark.shared) for name in SENTENCEPIECE]


def golden(name: str) -> Any:
    return json.loads(lzma.decompress((GOLDENS / f"{name}.json.xz").read_bytes()))


def vocabulary(folder: Path, name: str) -> Vocabulary:
    with open_gguf(folder / "vocab" / f"ggml-vocab-{name}.gguf") as file:
        return read_vocabulary(file)


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, name: str) -> Tokenizer:
    """The tokenizer of one vocabulary: large ones take a second, so all its tests follow."""
    if name in PAIRS:
        return tokenizer_of(pair_vocabulary(name.removeprefix("pairs-")))
    return Tokenizer(vocabulary(request.getfixturevalue("shared"), name))


def published(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    path = folder / "vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    ids = [[int(word) for word in line.split()] for line in lines]
    assert len(texts) == len(ids) > 40
    return list(zip(texts, ids, strict=True))


@pytest.mark.shared
def test_every_vocabulary_there_is_tested(shared: Path) -> None:
    paths = (shared / "vocab").glob("*.gguf")
    assert sorted(path.stem.removeprefix("ggml-vocab-") for path in paths) == sorted(NAMES)


@pytest.mark.parametrize("name", THERE, scope="module")
@pytest.mark.sample(3)
def test_the_published_ids(shared: Path, name: str, subject: Tokenizer) -> None:
    for text, ids in published(shared, name):
        for parse_special in (True, False):
            found = subject.encode(text, False, parse_special)
            assert found == ids, text
        assert subject.decode(ids) == text


@pytest.mark.parametrize("name", [*THERE, *PAIRS], scope="module")
@pytest.mark.sample(8)
def test_difficult_strings_become_what_llama_cpp_makes_of_them(
    name: str, subject: Tokenizer
) -> None:
    expected = golden(name)
    strings = [text.encode("latin-1") for text in golden("strings") + expected["special"]]
    assert len(strings) > 500
    for parse_special, key in ((True, "parsed"), (False, "plain")):
        wrong = []
        for raw, right in zip(strings, expected[key], strict=True):
            text = raw.decode(errors="replace")
            ids = subject.encode(text, False, parse_special)
            if ids != right and text.encode() == raw:  # else llama.cpp reads it in its own way
                wrong.append((text, ids, right))
        assert wrong == []


@pytest.mark.parametrize("name", OWN)
def test_difficult_strings_become_what_the_families_own_tokenizers_make_of_them(name: str) -> None:
    stored = golden(f"own-{name}")
    tokenizer = tokenizer_of(own_metadata(name, stored))
    pairs = list(zip(strings(), stored["ids"], strict=True))
    wrong = [text for text, ids in pairs if tokenizer.encode(text, False) != ids]
    assert len(pairs) > 450 and len(wrong) == OWN[name], wrong


def own_metadata(name: str, stored: Any) -> dict[str, Any]:
    """The metadata of a file that has a family's small vocabulary."""
    is_gemma = name == "gemma4"
    tokens = stored["tokens"]
    kinds = [TokenType.BYTE if text.startswith("<0x") else TokenType.NORMAL for text in tokens]
    return {
        "tokenizer.ggml.model": "gemma4" if is_gemma else "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": stored["merges"],
    }


@pytest.mark.parametrize("name", [*THERE, *PAIRS], scope="module")
@pytest.mark.sample(7)
def test_a_text_becomes_the_same_where_it_may_be_cut(name: str, subject: Tokenizer) -> None:
    """So that long ones are encoded in pieces: difficult strings in random order."""
    codec, draw = subject._codec, random.Random(5)  # cuts are not what callers see
    strings = [raw.encode("latin-1").decode(errors="replace") for raw in golden("strings")]
    n_cuts = 0
    for _ in range(60):
        text = "".join(draw.choices(strings, k=4))[:600].replace(
            " ", "▁" if name in SPELLED else " "
        )
        whole, place = codec.encode_piece(text), 1
        while (place := codec.find_cut(text, place, len(text)) or 0) > 0:
            parts = codec.encode_piece(text[:place]) + codec.encode_piece(text[place:])
            assert parts == whole, (text[:place], text[place:])
            place, n_cuts = place + 1, n_cuts + 1
    assert n_cuts > 200


@pytest.mark.parametrize("name", [*THERE, *PAIRS], scope="module")
@pytest.mark.sample(6)
def test_a_text_has_no_fewer_tokens_than_its_bytes_say(name: str, subject: Tokenizer) -> None:
    for raw in golden("strings") + golden(name)["special"]:
        text = raw.encode("latin-1").decode(errors="replace")
        for each in (text, text + " " * 400):
            least, n_tokens = subject.least_tokens(each), len(subject.encode(each, False))
            assert least <= n_tokens and bool(least) >= bool(each.strip())


@pytest.mark.parametrize("name", [*THERE, *PAIRS], scope="module")
def test_how_a_text_begins_and_what_ends_one(name: str, subject: Tokenizer) -> None:
    expected = golden(name)
    assert subject.encode("Hello") == expected["started"]
    assert sorted(subject.end_ids) == expected["ends"]


def test_every_kind_of_pre_tokenizer_is_tested() -> None:
    assert sorted(KINDS) == sorted({spec.name for spec in PRE_TOKENIZERS.values()})


def test_the_stored_strings_are_those_of_the_script() -> None:
    assert golden("strings") == [text.decode("latin-1") for text in difficult_strings()]


@pytest.mark.parametrize("name", THERE, scope="module")
def test_text_survives(shared: Path, name: str, subject: Tokenizer) -> None:
    rng = random.Random(3)
    texts = [text for text, _ in published(shared, name)] + ["", " ", "  x", "▁x"]
    texts += ["".join(rng.choices("aé中🦙 \n\t1▁", k=30)) for _ in range(50)]
    for text in texts:
        ids = subject.encode(text, add_special=False)
        is_exact = name not in SENTENCEPIECE or "▁" not in text  # that mark is a blank there
        assert subject.decode(ids) == (text if is_exact else text.replace("▁", " "))


@pytest.mark.parametrize("name", THERE_SPM, scope="module")
def test_the_package_merges_as_the_plain_twin_does(shared: Path, name: str) -> None:
    codec = SentencePieceCodec(vocabulary(shared, name))
    assert not codec.has_equal_scores
    for raw in golden("strings")[:-40]:
        text = raw.encode("latin-1").decode(errors="ignore").replace(" ", "▁")
        assert codec.encode_plainly(text) == codec.encode(text, after_special=False)


@pytest.mark.parametrize("name", THERE_SPM, scope="module")
def test_a_generated_word_keeps_its_blank(subject: Tokenizer) -> None:
    ids = subject.encode("France is Paris", add_special=False)
    stream = StreamDetokenizer(subject)
    assert "".join(map(stream.feed, ids[2:])) == " Paris"


@pytest.mark.parametrize("name", THERE_SPM, scope="module")
def test_a_character_of_byte_tokens_appears_with_its_last(subject: Tokenizer) -> None:
    ids = subject.encode("🦙x", add_special=False)
    stream = StreamDetokenizer(subject, is_reply=False)
    assert [stream.feed(i) for i in ids] == ["", "", "", "", "🦙", "x"]
