"""Latent attention's matrices, from files of both forms: the same numbers for the same model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from numpy.typing import NDArray

from vkmoe.facts import LatentSpec, RopeSpec
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.models.trunk_tensors import FileMatrix, split_heads
from vkmoe.quants import decode, to_device

SHAPE = LatentSpec(3, kv_rank=64, nope_dim=32, value_dim=96, rope=RopeSpec(32))
VALUES = np.random.default_rng(6).standard_normal(
    (SHAPE.n_heads, SHAPE.nope_dim + SHAPE.value_dim, SHAPE.kv_rank), np.float32
)


class Forms(NamedTuple):
    """A file with both forms, and each one's matrices of keys and values."""

    file: GgufFile
    old: tuple[FileMatrix, FileMatrix]
    new: tuple[FileMatrix, FileMatrix]


def written(path: Path, kind: str, both: NDArray[np.float32] = VALUES) -> Forms:
    """The old form in one tensor of this type; the new one turned by who converted the model."""
    as_type = gguf.GGMLQuantizationType[kind]
    keys = both[:, : SHAPE.nope_dim].swapaxes(1, 2)  # [heads, kv_rank, nope_dim]
    writer = gguf.GGUFWriter(path, "deepseek2")
    for name, part in (
        ("kv_b", both.reshape(-1, SHAPE.kv_rank)),
        ("k_b", np.ascontiguousarray(keys)),
        ("v_b", np.ascontiguousarray(both[:, SHAPE.nope_dim :])),
    ):
        writer.add_tensor(name, quantize(part, as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    by_name = file.tensors
    new = FileMatrix(by_name["k_b"]), FileMatrix(by_name["v_b"])
    return Forms(file, split_heads(FileMatrix(by_name["kv_b"]), SHAPE), new)


def values_of(file: GgufFile, heads: FileMatrix) -> NDArray[np.float32]:
    """What the loader hands on, decoded: [heads, rows, columns]."""
    data = heads.data(file)
    assert data.shape[0] == heads.n_rows
    values = decode(heads.type, data, heads.n_rows * heads.n_columns)
    return values.reshape(SHAPE.n_heads, -1, heads.n_columns)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q5_1"])
def test_keys_of_the_old_form_are_turned(kind: str, tmp_path: Path) -> None:
    """Head by head; floats stay what they are, others become F16: off by 2^-11 of what they are."""
    forms = written(tmp_path / "m.gguf", kind)
    with forms.file as file:
        keys, is_float = forms.old[0], kind in ("F32", "BF16")
        assert keys.type == ("F32" if is_float else "F16")
        assert (keys.n_rows, keys.n_columns) == (SHAPE.n_heads * SHAPE.kv_rank, SHAPE.nope_dim)
        whole = decode(kind, file.data("kv_b"), VALUES.size).reshape(VALUES.shape)
        wanted = whole[:, : SHAPE.nope_dim].swapaxes(1, 2)
        found = values_of(file, keys)
        most = 0 if is_float else 2**-11
        assert (np.abs(found - wanted) <= np.abs(wanted) * most).all()
        assert np.ptp(found) > 4


def test_both_forms_of_float32_give_the_same_matrices(tmp_path: Path) -> None:
    forms = written(tmp_path / "m.gguf", "F32")
    with forms.file as file:
        for old, new in zip(forms.old, forms.new, strict=True):
            assert (old.n_rows, old.n_columns) == (new.n_rows, new.n_columns)
            assert np.array_equal(values_of(file, old), values_of(file, new))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q5_0", "Q5_1"])
def test_values_of_both_forms_have_the_same_bytes(kind: str, tmp_path: Path) -> None:
    """Rows are the same ones, in the same type."""
    forms = written(tmp_path / "m.gguf", kind)
    with forms.file as file:
        old, new = forms.old[1], forms.new[1]
        assert old.type == new.type == kind
        found, wanted = (
            to_device(item.type, item.data(file), item.n_columns) for item in (old, new)
        )
        assert np.array_equal(found, wanted)


def test_keys_too_large_for_halves_become_infinite(tmp_path: Path) -> None:
    """Which shows in the answer, and is no crash."""
    both = VALUES.copy()
    both[0, 0, 5] = 1e6
    forms = written(tmp_path / "m.gguf", "Q8_0", both)
    with forms.file as file:
        assert np.isinf(values_of(file, forms.old[0])[0, 5, 0])
