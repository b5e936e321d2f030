"""The reader against the `gguf` package: files written by its writer, read by both."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tools.gguf_writer import MetadataValue, describe_tensor, write_gguf
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.gguf_file.header import TensorInfo
from vkmoe.quants import TYPES


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every scalar kind, arrays of every sort and five tensors."""
    path = tmp_path_factory.mktemp("reader") / "all.gguf"
    writer = gguf.GGUFWriter(path, "test")
    for name, value in [("uint8", 200), ("int8", -3), ("uint16", 60000), ("int16", -30000),
                        ("uint32", 4_000_000_000), ("int32", -2), ("uint64", 1 << 63),
                        ("int64", -(1 << 40)), ("float32", 0.25), ("float64", 1e300),
                        ("bool", True), ("string", "grüße\n")]:  # fmt: skip
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    writer.add_array("test.strings", ["", "a", "ünï", "x" * 1000])
    writer.add_array("test.ints", [3, -4, 5])
    writer.add_array("test.floats", [0.5, -1.5])
    writer.add_array("test.bools", [True, False, True])
    writer.add_array("test.nested", [[1, 2], [3]])
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.standard_normal((3, 5), np.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 3, 7)).astype(np.float16))
    writer.add_tensor("four", rng.standard_normal((2, 1, 3, 4), np.float32))
    for name in ("Q6_K", "Q8_0"):
        raw = rng.integers(0, 256, (4, TYPES[name].row_bytes(512)), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_what_the_package_reads(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        theirs = {key: f for key, f in reader.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(theirs)
        assert len(file.metadata) == len(theirs)
        for key, field in theirs.items():
            if key != "test.nested":  # which the package flattens
                np.testing.assert_array_equal(file.metadata[key], field.contents())
        assert [list(item) for item in file.metadata["test.nested"]] == [[1, 2], [3]]  # type: ignore
        assert file.version == 3


def test_scalars_have_python_types(path: Path) -> None:
    with open_gguf(path) as file:
        kinds = {key.split(".")[1]: type(value) for key, value in file.metadata.items()}
    assert kinds["uint64"] is int and kinds["int8"] is int and kinds["bool"] is bool
    assert kinds["float32"] is float and kinds["string"] is str and kinds["strings"] is list
    assert kinds["ints"] is np.ndarray and kinds["bools"] is np.ndarray


def test_tensors_are_what_the_package_reads(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.type == theirs.tensor_type.name
            assert ours.shape == tuple(int(size) for size in reversed(theirs.shape))
            assert ours.n_weights == theirs.n_elements
            assert ours.n_bytes == theirs.n_bytes
            assert file.data(theirs.name).tobytes() == theirs.data.tobytes()


def test_data_is_a_read_only_view(path: Path) -> None:
    with open_gguf(path) as file:
        data = file.data("Q6_K")
        assert data.dtype == np.uint8 and data.shape == (4 * 2 * 210,)
        assert not data.flags.owndata and not data.flags.writeable
        assert np.shares_memory(data, file.data("Q6_K"))


def test_views_outlive_the_file(path: Path) -> None:
    file = open_gguf(path)
    expected = path.read_bytes()[file.tensors["Q8_0"].offset :][: file.tensors["Q8_0"].n_bytes]
    view = file.data("Q8_0")[:34].reshape(2, 17)
    whole = file.data("Q8_0")
    file.close()
    file.close()
    del file
    gc.collect()
    assert whole.tobytes() == expected
    assert view.tobytes() == expected[:34]


def n_mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(str(path))


def test_the_mapping_goes_with_the_last_view(path: Path) -> None:
    before = n_mappings(path)
    file = open_gguf(path)
    assert n_mappings(path) == before + 1
    view = file.data("f32")
    file.close()
    gc.collect()
    assert n_mappings(path) == before + 1
    del view
    gc.collect()
    assert n_mappings(path) == before


def test_a_closed_file_says_so(path: Path) -> None:
    file = open_gguf(path)
    file.close()
    with pytest.raises(AssertionError, match="is closed"):
        file.data("f32")


def test_dropped_pages_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 40 * mmap.PAGESIZE, dtype=np.uint8)
    tensors = [describe_tensor("a", "F32", (10,)), describe_tensor("b", "I8", (len(raw),))]
    path = tmp_path / "pages.gguf"

    def data(tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        return raw if tensor.name == "b" else np.zeros(40, np.uint8)

    write_gguf(path, {"general.architecture": "test"}, tensors, data)
    with open_gguf(path) as file:
        view = file.data("b")
        assert view.sum() == raw.sum()
        file.drop_pages("a")
        file.drop_pages("b")
        assert resident_pages(path) < 20
        np.testing.assert_array_equal(view, raw)
        assert resident_pages(path) >= 39


def resident_pages(path: Path) -> int:
    """Pages of the mapping of `path` in this process's resident memory."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.endswith(str(path)))
    rss = next(line for line in lines[start:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024 // mmap.PAGESIZE


def test_version_2_is_read_alike(path: Path, tmp_path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    other = tmp_path / "two.gguf"
    other.write_bytes(raw)
    with open_gguf(path) as three, open_gguf(other) as two:
        assert two.version == 2
        assert dict(two.tensors) == dict(three.tensors)
        assert two.require("test.string", str) == "grüße\n"


def test_another_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "test")
    writer.add_custom_alignment(256)
    for name in "ab":
        writer.add_tensor(name, np.full((1, 3), ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "aligned.gguf") as file:
        assert file.tensors["b"].offset % 256 == 0
        assert (file.data("b").view(np.float32) == ord("b")).all()


def test_our_own_writing_is_read_by_the_package(tmp_path: Path) -> None:
    path = tmp_path / "ours.gguf"
    metadata: dict[str, MetadataValue] = {
        "general.architecture": "x",
        "x.n": 5,
        "x.f": 0.5,
        "x.b": True,
        "x.s": ["a", "b"],
        "x.i": [1, 2],
    }
    rows = np.arange(2 * 144, dtype=np.uint8)
    write_gguf(path, metadata, [describe_tensor("w", "Q4_K", (2, 256))], lambda _: rows)
    reader = gguf.GGUFReader(path)
    for key, value in metadata.items():
        assert reader.fields[key].contents() == value
    assert reader.tensors[0].data.tobytes() == rows.tobytes()
    with open_gguf(str(path)) as file:
        assert isinstance(file, GgufFile)
        assert file.tensors["w"].shape == (2, 256)
