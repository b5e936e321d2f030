"""Shares of the sweeps: together they are all tests, and each has every test that always runs."""

from __future__ import annotations

from typing import Any

from tests.conftest import take_share


class Item:
    def __init__(self, name: str, is_full: bool) -> None:
        self.nodeid, self.is_full = name, is_full

    def get_closest_marker(self, name: str) -> bool:
        assert name == "full"
        return self.is_full


def test_each_case_of_a_sweep_is_in_one_share() -> None:
    always = [Item(f"tests/a.py::always[{i}]", False) for i in range(5)]
    sweep = [Item(f"tests/a.py::case[{i}]", True) for i in range(300)]
    found: list[list[Any]] = []
    for index in range(3):
        items: list[Any] = [*always, *sweep]
        left_out = take_share(items, index, 3)
        assert len(left_out) + len(items) == 305
        assert items[:5] == always and 60 < len(items) < 160
        found.append(items[5:])
    assert sorted(item.nodeid for share in found for item in share) == sorted(
        item.nodeid for item in sweep
    )
    assert found[0] != found[1]


def test_the_first_of_one_share_is_all() -> None:
    items: list[Any] = [Item("tests/a.py::one", True), Item("tests/a.py::two", False)]
    take_share(items, 0, 1)
    assert len(items) == 2
