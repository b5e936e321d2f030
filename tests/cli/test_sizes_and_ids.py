"""Sizes and ids of experts as text."""

from __future__ import annotations

import pytest

from vkmoe.errors import UsageError
from vkmoe.option_fields import parse_ids, parse_mib, parse_size

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))

# ----- sizes -----


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("6GiB", 6 * GIB), ("500MiB", 500 * MIB), ("3KiB", 3 * KIB), ("2TiB", 2 * TIB),
        ("6GB", 6 * 10**9), ("500MB", 500 * 10**6), ("3kB", 3000), ("1TB", 10**12),
        ("6G", 6 * GIB), ("500m", 500 * MIB), ("3k", 3 * KIB), ("1t", TIB),
        ("1048576", MIB), ("7b", 7), ("7 B", 7), (" 6 gib ", 6 * GIB), ("1.5 GiB", 3 * GIB // 2),
        (".5g", GIB // 2), ("2.g", 2 * GIB), ("0.001kb", 1), ("1.9", 1),
        ("4611686018427387904", 1 << 62),
    ],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "0", "0GiB", "0.4", "-1", "-1GiB", "nan", "nanGiB", "inf", "1e9", "1_000",
     "6 Gi B", "6GiBs", "6EiB", "1,5GiB", "0x10", "5 5", "1.2.3", "٣GiB", ".", ".GiB",
     "99999999TiB", "9" * 500, "9" * 500 + ".5", "1" + "0" * 5000],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert str(caught.value).startswith(repr(text)[:80]) and caught.value.hint


@pytest.mark.parametrize(
    "text", ["6EiB", "9" * 20, "9" * 500 + ".5", "1" + "0" * 5000, "5e", "4611686018427387905"]
)
def test_a_size_that_is_too_large_is_not_called_malformed(text: str) -> None:
    with pytest.raises(UsageError, match="is too large"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0.4", "0GiB"])
def test_a_size_that_is_nothing_is_not_called_malformed(text: str) -> None:
    with pytest.raises(UsageError, match="is less than one byte"):
        parse_size(text)


def test_a_number_alone_may_count_mebibytes() -> None:
    """Where llama.cpp counts them: for prompts in host memory. Of these there may be none."""
    for text, n_bytes in (("100", 100 * MIB), (" 8192 ", 8 * GIB), ("4GiB", 4 * GIB), ("0", 0)):
        assert parse_mib(text) == n_bytes
    assert parse_mib("-1") == 1 << 62
    for text in ("-2", "", "x", "1,5", "9" * 5000, "1 2"):
        with pytest.raises(UsageError) as caught:
            parse_mib(text)
        assert caught.value.hint


# ----- ids -----


@pytest.mark.parametrize(
    ("text", "ids"),
    [("1, 2,,3,", (1, 2, 3)), ("0", (0,)), (" 7 ,7,, 2,7", (7, 2)), (",,5", (5,)), ("007", (7,))],
)
def test_ids(text: str, ids: tuple[int, ...]) -> None:
    assert parse_ids(text) == ids


@pytest.mark.parametrize(
    ("text", "piece"),
    [("1,two", "two"), ("1;2", "1;2"), ("1,-2", "-2"), ("1.5", "1.5"), ("1 2", "1 2"), ("²", "²")],
)  # fmt: skip
def test_what_is_no_id_is_named(text: str, piece: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ids(text)
    assert f"{piece!r} is not an expert's id" in str(caught.value)


def test_an_id_that_is_too_large_is_not_called_malformed() -> None:
    with pytest.raises(UsageError, match=r"'9{30}' is too large"):
        parse_ids("1," + "9" * 30)
    assert parse_ids("0" * 5000 + "7") == (7,)


@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_a_list_without_ids_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no expert"):
        parse_ids(text)
