"""Typed getters: right values, and errors that name the key, the file and what is there."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.gguf_file import samples as make
from vkmoe.errors import ModelFileError
from vkmoe.gguf_file import GgufFile


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GgufFile]:
    pairs = [
        make.pair("int", make.U32, struct.pack("<I", 7)),
        make.pair("float", make.F32, struct.pack("<f", 0.5)),
        make.pair("bool", make.BOOL, b"\1"),
        make.pair("string", make.STRING, make.text("seven")),
        make.pair("nan", make.F32, struct.pack("<f", float("nan"))),
        make.pair("words", make.ARRAY, make.array(make.STRING, 2, make.text("a") + make.text("b"))),
        make.pair("no words", make.ARRAY, make.array(make.STRING, 0)),
        make.pair("numbers", make.ARRAY, make.array(make.I32, 2, struct.pack("<ii", 1, -1))),
        make.pair("bad bool", make.BOOL, b"\2"),
        make.pair("bad bools", make.ARRAY, make.array(make.BOOL, 2, b"\1\7")),
        make.pair("bad text", make.STRING, make.text(b"ab\xff")),
        make.pair("bad words", make.ARRAY, make.array(make.STRING, 1, make.text(b"\xc3"))),
    ]
    with make.opened(tmp_path, make.file_bytes(pairs)) as opened:
        yield opened


def test_values_of_the_right_kind(file: GgufFile) -> None:
    assert file.require("int", int) == 7
    assert file.require("float", float) == 0.5
    assert file.require("bool", bool) is True
    assert file.require("string", str) == "seven"
    assert file.strings("words") == ["a", "b"]
    assert file.strings("no words") == []
    np.testing.assert_array_equal(file.numbers("numbers"), [1, -1])


def test_a_whole_number_will_do_for_a_float(file: GgufFile) -> None:
    value = file.require("int", float)
    assert value == 7 and type(value) is float


def test_defaults_are_for_missing_keys_only(file: GgufFile) -> None:
    assert file.get("int", int, 3) == 7
    assert file.get("other", int, 3) == 3
    with pytest.raises(ModelFileError, match="whole number"):
        file.get("string", int, 3)


@pytest.mark.parametrize(("key", "kind", "words"), [
    ("string", int, "whole number but is string of 5 bytes"),
    ("bool", int, "whole number but is bool True"),
    ("bool", float, "a number but is bool True"),
    ("float", int, "whole number but is float32 0.5"),
    ("int", str, "a string but is uint32 7"),
    ("int", bool, "a bool but is uint32 7"),
    ("words", str, "a string but is array of 2 strings"),
    ("nan", float, "is nan"),
    ("missing", int, "no metadata key 'missing'"),
    ("bad bool", bool, "holds 2"),
    ("bad text", str, "not valid UTF-8"),
])  # fmt: skip
def test_wrong_kinds_are_named(file: GgufFile, key: str, kind: type, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        file.require(key, kind)
    assert key in str(caught.value) and "model.gguf" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("key", ["int", "numbers", "missing", "bad words"])
def test_strings_are_strings(file: GgufFile, key: str) -> None:
    with pytest.raises(ModelFileError, match=key):
        file.strings(key)


@pytest.mark.parametrize("key", ["int", "words", "missing", "bad bools"])
def test_numbers_are_numbers(file: GgufFile, key: str) -> None:
    with pytest.raises(ModelFileError, match=key):
        file.numbers(key)
