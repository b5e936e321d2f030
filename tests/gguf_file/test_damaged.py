"""Files that are damaged, hostile or not there: one clear line each, and no memory asked for."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from tests.gguf_file import samples as make
from vkmoe.errors import ModelFileError
from vkmoe.gguf_file import open_gguf
from vkmoe.quants.types import BY_ID, FORMER

HUGE = [1 << 31, 1 << 60, (1 << 63) - 1, (1 << 64) - 1]


def test_a_sound_file_of_these_pieces_opens(tmp_path: Path) -> None:
    raw = make.file_bytes([make.pair("k", make.U8, b"\7")], [make.tensor()], bytes(32))
    with make.opened(tmp_path, raw) as file:
        assert file.require("k", int) == 7
        assert file.tensors["a"].shape == (8,)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.gguf does not exist") as caught:
        open_gguf(tmp_path / "gone.gguf")
    assert caught.value.hint


def test_a_directory_suggests_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "inside.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="is a directory") as caught:
        open_gguf(tmp_path)
    assert "inside.gguf" in caught.value.hint


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error the system gives is raised by hand: the tests may run as root."""
    path = tmp_path / "secret.gguf"
    path.write_bytes(make.file_bytes())

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(ModelFileError, match="permission denied") as caught:
        open_gguf(path)
    assert caught.value.hint


def test_an_empty_file(tmp_path: Path) -> None:
    make.refused(tmp_path, b"", "is empty")


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")


@pytest.mark.parametrize("name", ["nul\0.gguf", "x" * 5000])
def test_impossible_names(name: str) -> None:
    with pytest.raises(ModelFileError, match="cannot be opened"):
        open_gguf(name)


@pytest.mark.parametrize(("start", "hint"), [
    (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    (b"<!DOCTYPE html>", "web page"),
    (b"PK\3\4", "zip"),
    (b"tjgg\3\0\0\0", "old GGML"),
    (b"\0" * 64, "GGUF"),
    (b"G", "GGUF"),
])  # fmt: skip
def test_other_formats(tmp_path: Path, start: bytes, hint: str) -> None:
    assert hint in make.refused(tmp_path, start, "is not a GGUF file").hint


@pytest.mark.parametrize(("version", "words"), [
    (1, "version 1, which is obsolete"), (0, "version 0"), (4, "version 4"),
    (3 << 24, "big-endian"), (2 << 24, "big-endian"), (0xFFFFFFFF, "version 4294967295"),
])  # fmt: skip
def test_other_versions(tmp_path: Path, version: int, words: str) -> None:
    make.refused(tmp_path, make.file_bytes(version=version), words)


@pytest.mark.parametrize("count", HUGE)
def test_absurd_counts_ask_for_no_memory(tmp_path: Path, count: int) -> None:
    tensors = [make.tensor()]
    files = [
        (make.file_bytes(n_tensors=count), "claims .* tensors"),
        (make.file_bytes(n_pairs=count), "claims .* metadata keys"),
        (make.file_bytes([struct.pack("<Q", count) + b"key"]), "metadata key 0"),
        (make.file_bytes([make.pair("k", make.STRING, struct.pack("<Q", count))]), "'k'"),
        (make.file_bytes(tensors=[struct.pack("<Q", count) + bytes(64)]), "tensor's name"),
    ]
    for kind in (make.U8, make.STRING, make.F64, make.ARRAY, make.BOOL):
        value = make.array(kind, count)
        files.append((make.file_bytes([make.pair("k", make.ARRAY, value)], tensors), "'k'"))
    tracemalloc.start()
    try:
        for raw, words in files:
            make.refused(tmp_path, raw, words)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_a_string_array_that_runs_out_half_way(tmp_path: Path) -> None:
    items = make.text("one") + struct.pack("<Q", 1 << 40) + bytes(64)
    pairs = [make.pair("k", make.ARRAY, make.array(make.STRING, 3, items))]
    make.refused(tmp_path, make.file_bytes(pairs), "'k' of 3 values")


def test_unknown_value_kinds(tmp_path: Path) -> None:
    make.refused(tmp_path, make.file_bytes([make.pair("k", 13, bytes(8))]), "unknown value kind 13")
    inner = make.array(99, 1, bytes(8))
    raw = make.file_bytes([make.pair("k", make.ARRAY, inner)])
    make.refused(tmp_path, raw, "unknown value kind 99")


def nested(depth: int) -> bytes:
    value = make.array(make.ARRAY, 1) * (depth - 1) + make.array(make.U8, 1, b"\5")
    return make.file_bytes([make.pair("k", make.ARRAY, value)])


def test_nested_arrays_have_an_end(tmp_path: Path) -> None:
    with make.opened(tmp_path, nested(4)) as file:
        assert file.metadata["k"] == [[[[5]]]]
    make.refused(tmp_path, nested(5), "more than 4 deep")
    make.refused(tmp_path, nested(100_000), "more than 4 deep")


def test_keys(tmp_path: Path) -> None:
    one = make.pair("k", make.U8, b"\1")
    make.refused(tmp_path, make.file_bytes([one, one]), "'k' comes twice")
    make.refused(tmp_path, make.file_bytes([make.pair("", make.U8, b"\1")]), "is empty")
    make.refused(tmp_path, make.file_bytes([make.pair(b"\xff", make.U8, b"\1")]), "UTF-8")
    long = make.pair("k" * 65536, make.U8, b"\1")
    make.refused(tmp_path, make.file_bytes([long]), "65536 bytes long")


def test_names_are_shown_on_one_short_line(tmp_path: Path) -> None:
    name = "evil\n\x1b[31m" + "x" * 1000
    make.refused(tmp_path, make.file_bytes(tensors=[make.tensor(name, (0,))]), r"evil\\n\\x1b")


@pytest.mark.parametrize(("sizes", "words"), [
    ((0,), "size 0"),
    ((8, 0), "size 0"),
    ((), "0 dimensions"),
    ((1, 1, 1, 1, 1), "5 dimensions"),
    ((1 << 60,), "needs"),
    ((1 << 32, 1 << 32), "needs"),
    ((1 << 63, 1 << 63, 1 << 63, 1 << 63), "needs"),
    (((1 << 64) - 1,), "needs"),
    ((9,), "needs 36 bytes"),
])  # fmt: skip
def test_shapes(tmp_path: Path, sizes: tuple[int, ...], words: str) -> None:
    make.refused(
        tmp_path, make.file_bytes(tensors=[make.tensor("a", sizes)], data=bytes(32)), words
    )


def test_a_count_of_dimensions_without_end(tmp_path: Path) -> None:
    raw = make.file_bytes(tensors=[make.tensor(n_dimensions=0xFFFFFFFF)], data=bytes(32))
    make.refused(tmp_path, raw, "4294967295 dimensions")


def test_rows_that_are_not_whole_blocks(tmp_path: Path) -> None:
    one = make.tensor("a", (128, 2), make.TYPE_Q4_K)
    make.refused(tmp_path, make.file_bytes(tensors=[one], data=bytes(144)), "blocks of 256")


@pytest.mark.parametrize("type_id", sorted({*range(44), 255, 0xFFFFFFFF} - set(BY_ID)))
def test_unknown_weight_types(tmp_path: Path, type_id: int) -> None:
    """They are refused by their number, and by their name where they have had one."""
    raw = make.file_bytes(tensors=[make.tensor(type_id=type_id)], data=bytes(32))
    known = {4: "Q4_2", 31: "Q4_0_4_4", 38: "IQ4_NL_8_8"}
    assert known.items() <= {number: name for number, (name, _) in FORMER.items()}.items()
    wanted = (
        rf"{FORMER[type_id][0]} \({type_id}\)" if type_id in FORMER else f"weight type {type_id}"
    )
    make.refused(tmp_path, raw, wanted)


@pytest.mark.parametrize("offset", [32, 1 << 40, (1 << 64) - 32])
def test_tensors_outside_the_file(tmp_path: Path, offset: int) -> None:
    raw = make.file_bytes(tensors=[make.tensor(offset=offset)], data=bytes(32))
    make.refused(tmp_path, raw, "but the file ends at")


def test_offsets_off_the_grid(tmp_path: Path) -> None:
    raw = make.file_bytes(tensors=[make.tensor(offset=8)], data=bytes(64))
    make.refused(tmp_path, raw, "not a multiple of 32")


@pytest.mark.parametrize(("kind", "value", "words"), [
    (make.U32, struct.pack("<I", 0), "is 0, not a power of two"),
    (make.U32, struct.pack("<I", 24), "is 24, not a power of two"),
    (make.I32, struct.pack("<i", -32), "is -32, not a power of two"),
    (make.F32, struct.pack("<f", 32), "is a float32"),
    (make.STRING, make.text("32"), "is a string"),
    (make.ARRAY, make.array(make.U8, 1, b"\x20"), "is a array|is an array"),
    (make.U64, struct.pack("<Q", 1 << 63), "but the file ends at"),
])  # fmt: skip
def test_alignments(tmp_path: Path, kind: int, value: bytes, words: str) -> None:
    pairs = [make.pair("general.alignment", kind, value)]
    make.refused(tmp_path, make.file_bytes(pairs, [make.tensor()], bytes(64)), words)


@pytest.mark.parametrize("tensors", [
    [make.tensor("a", (16,)), make.tensor("b", (8,), offset=32)],
    [make.tensor("b", (8,), offset=32), make.tensor("a", (16,))],
    [make.tensor("a", (16,)), make.tensor("b", (16,))],
    [make.tensor("a", (24,)), make.tensor("b", (4,), offset=64)],
])  # fmt: skip
def test_tensors_share_no_bytes(tmp_path: Path, tensors: list[bytes]) -> None:
    """Else a small file could claim any number of large tensors."""
    make.refused(tmp_path, make.file_bytes(tensors=tensors, data=bytes(96)), "'a' and 'b' overlap")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    twice = [make.tensor("a"), make.tensor("a", offset=32)]
    make.refused(tmp_path, make.file_bytes(tensors=twice, data=bytes(64)), "'a' comes twice")
    make.refused(tmp_path, make.file_bytes(tensors=[make.tensor("")], data=bytes(64)), "no name")


def test_truncated_anywhere(tmp_path: Path) -> None:
    pairs = [
        make.pair("n", make.U32, bytes(4)),
        make.pair("s", make.ARRAY, make.array(make.STRING, 2, make.text("ab") + make.text(""))),
        make.pair("d", make.ARRAY, make.array(make.F64, 3, bytes(24))),
    ]
    raw = make.file_bytes(pairs, [make.tensor("a"), make.tensor("b", offset=32)], bytes(64))
    for length in range(len(raw)):
        make.refused(tmp_path, raw[:length], "model.gguf")
