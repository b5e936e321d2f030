"""Split models: all parts make one model, and parts that do not belong together are refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from vkmoe.errors import ModelFileError
from vkmoe.gguf_file import open_gguf

N_TENSORS = 5


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts as the package's writer makes them: 2, 2 and 1 tensors."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "test", split_max_tensors=2)
    writer.add_string("test.word", "first")
    for index in range(N_TENSORS):
        writer.add_tensor(f"t{index}", np.full((2, 3), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_the_whole_model(parts: list[Path], given: int) -> None:
    with open_gguf(parts[given]) as file:
        assert list(file.paths) == parts
        assert list(file.tensors) == [f"t{index}" for index in range(N_TENSORS)]
        for index in range(N_TENSORS):
            assert (file.data(f"t{index}").view(np.float32) == index).all()
        assert [file.tensors[name].part for name in file.tensors] == [0, 0, 1, 1, 2]
        assert file.require("test.word", str) == "first"


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003\.gguf of 3 is missing"):
        open_gguf(parts[0])


def test_parts_in_the_wrong_order(parts: list[Path]) -> None:
    swapped = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(swapped)
    with pytest.raises(ModelFileError, match=r"should be part 2 of 3 but says split\.no = 2"):
        open_gguf(parts[0])


def test_the_same_part_twice(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelFileError, match="should be part 3 of 3"):
        open_gguf(parts[0])


def test_a_renamed_part(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(ModelFileError, match="one of 3 parts, which its name does not"):
        open_gguf(other)


def test_a_whole_model_named_as_a_part(tmp_path: Path) -> None:
    path = tmp_path / "x-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_tensor("t", np.zeros((1, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"has no split\.count"):
        open_gguf(path)
    alone = path.rename(tmp_path / "x-00001-of-00001.gguf")
    with open_gguf(alone) as file:
        assert list(file.tensors) == ["t"]


def test_a_damaged_later_part_is_named(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-16])
    with pytest.raises(ModelFileError, match=r"model-00003-of-00003\.gguf: tensor 't4'"):
        open_gguf(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    raw = parts[2].read_bytes()
    parts[2].write_bytes(raw.replace(b"t4", b"t0"))
    with pytest.raises(ModelFileError, match="'t0' comes twice"):
        open_gguf(parts[0])
