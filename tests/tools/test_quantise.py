"""The quantisers: errors against llama.cpp's on stored weights, and the odd inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tools.make_quant_fixtures import QUANTISED, error_measures, widened
from tools.quantise import quantise
from vkmoe.errors import UnsupportedModelError
from vkmoe.quants import TYPES, decode

FIXTURES = Path(__file__).parent.parent / "fixtures" / "quants"
REFERENCE: dict[str, dict[str, list[float]]] = json.loads(
    (FIXTURES / "reference.json").read_text(encoding="utf-8")
)
CASES = [(name, case) for name, cases in REFERENCE.items() for case in cases]
Floats = npt.NDArray[np.float32]


def there_and_back(name: str, x: Floats) -> Floats:
    return decode(name, quantise(name, x), x.size).reshape(x.shape)


def stored(name: str) -> Floats:
    with np.load(FIXTURES / "inputs.npz") as archive:
        return widened(archive[name])


@pytest.mark.parametrize(("name", "case"), CASES)
def test_error_is_at_most_a_tenth_above_llama_cpp(name: str, case: str) -> None:
    x = stored(case)
    found = error_measures(name, x, there_and_back(name, x))
    for ours, theirs in zip(found, REFERENCE[name][case], strict=True):
        assert ours <= 1.1 * theirs


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 1e-30, 1000.0])
def test_constant_rows(name: str, value: float) -> None:
    x = np.full((2, 256), value, np.float32)
    np.testing.assert_allclose(there_and_back(name, x), x, rtol=0.01, atol=1e-9)


@pytest.mark.parametrize("name", QUANTISED)
def test_one_outlier_and_one_sided_groups(name: str) -> None:
    rng = np.random.default_rng(5)
    x = np.abs(rng.standard_normal((4, 256), np.float32)) + 3
    x[1] *= -1
    x[2] = 0
    x[2, 77] = -50
    back = there_and_back(name, x)
    assert np.abs(back - x).max() < 0.12 * np.abs(x).max()
    assert back[2, 77] == pytest.approx(-50, rel=0.05)


@pytest.mark.parametrize("name", sorted({*QUANTISED, "F16", "BF16", "F32"}))
def test_shapes_and_determinism(name: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 5, 512), np.float32)
    found = quantise(name, x)
    assert found.dtype == np.uint8 and found.shape == (3, 5, TYPES[name].row_bytes(512))
    np.testing.assert_array_equal(found, quantise(name, x))
    np.testing.assert_array_equal(found[1, 2], quantise(name, x[1, 2]))


def test_pieces_do_not_show() -> None:
    x = np.random.default_rng(1).standard_normal((300, 512), np.float32)
    rows = np.stack([quantise("Q4_K", row) for row in x[[0, 127, 128, 299]]])
    np.testing.assert_array_equal(quantise("Q4_K", x)[[0, 127, 128, 299]], rows)


def test_plain_types_round_to_nearest() -> None:
    x = np.array([[1.0, 1 + 2**-9, 1 + 3 * 2**-9, -(2.0**-20)]], np.float32)
    np.testing.assert_array_equal(there_and_back("F32", x), x)
    np.testing.assert_array_equal(there_and_back("F16", x), x.astype(np.float16))
    expected = [[1.0, 1.0, 1 + 2**-7 - 2**-8 + 2**-8, -(2.0**-20)]]
    np.testing.assert_array_equal(there_and_back("BF16", x[:, [0, 0, 2, 3]]), expected)


@pytest.mark.parametrize("name", sorted({*QUANTISED, "F16", "BF16", "F32"}))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, 200] = bad
    with pytest.raises(UnsupportedModelError, match="NaN or infinity"):
        quantise(name, x)


@pytest.mark.parametrize("name", sorted({*QUANTISED, "F16"}))
@pytest.mark.parametrize("value", [5e8, 1e30])
def test_weights_beyond_the_type_are_refused(name: str, value: float) -> None:
    x = np.full((1, 256), value, np.float32)
    with pytest.raises(UnsupportedModelError, match=f"too large for {name}"):
        quantise(name, x)


def test_other_refusals_name_what_was_asked() -> None:
    with pytest.raises(UnsupportedModelError, match="Q8_1") as caught:
        quantise("Q8_1", np.zeros((1, 256), np.float32))
    assert "Q4_K" in caught.value.hint
    with pytest.raises(UnsupportedModelError, match="rows of 320"):
        quantise("Q4_K", np.zeros((1, 320), np.float32))
