"""Whether a cache is large enough, and how that is told."""

from __future__ import annotations

import pytest

from vkmoe.experts.decide.settings import recommended_slots, size_cache, sizing_line

MIB = 1 << 20
SIZE = 3 * MIB


def line(slots: tuple[int, ...], asked: str = "") -> str:
    return sizing_line(size_cache(slots, (SIZE,) * len(slots), 128, 8, asked))


def test_twice_what_a_token_uses_is_recommended_if_there_are_so_many() -> None:
    assert recommended_slots(128, 8) == 16
    assert recommended_slots(12, 8) == 12


@pytest.mark.parametrize(
    ("slots", "status", "ratio"),
    [
        ((16, 16), "ok", 1.0),
        ((40, 41), "ok", 2.5),
        ((128, 128), "ok", 8.0),
        ((16, 15), "below_recommended", 15 / 16),
        ((12, 20), "ok", 1.0),
        ((1, 1), "below_recommended", 1 / 16),
        ((0, 0), "budget_exhausted", 0.0),
        ((), "empty", 0.0),
    ],
)
def test_the_average_layer_decides(slots: tuple[int, ...], status: str, ratio: float) -> None:
    sizing = size_cache(slots, (SIZE,) * len(slots), 128, 8)
    assert (sizing.status, sizing.ratio) == (status, ratio)
    assert sizing.n_slots_smallest_layer == min(slots, default=0)
    assert sizing.n_slots_largest_layer == max(slots, default=0)
    assert (sizing.n_slots, sizing.n_total) == (sum(slots), 128 * len(slots))
    assert sizing.n_bytes == sum(slots) * SIZE


def test_mixed_sizes_are_summed_layer_by_layer() -> None:
    assert size_cache((2, 3), (100, 1000), 128, 8).n_bytes == 3200


@pytest.mark.parametrize("slots", [(3, 3), (0, 0)])
def test_the_remedy_is_the_flag_the_user_gave_or_more_room(slots: tuple[int, ...]) -> None:
    sizes = (SIZE,) * 2
    assert size_cache(slots, sizes, 128, 8, "--expert-cache").remedy == "raise --expert-cache"
    assert "--ctx-size" in size_cache(slots, sizes, 128, 8).remedy
    assert size_cache((16, 16), sizes, 128, 8, "--expert-cache").remedy == ""


def test_lines_for_people() -> None:
    assert line((40,) * 48) == (
        "expert cache: 40 of 128 experts per layer (31 %) on the device, 5.6 GiB; "
        "recommended at least 16: ok"
    )
    assert line((4,) * 48, "--expert-slots") == (
        "expert cache: 4 of 128 experts per layer (3 %) on the device, 576.0 MiB; "
        "recommended at least 16: below recommended (0.25 of it); to change that, "
        "raise --expert-slots"
    )
    assert line((0,) * 48, "--expert-cache") == (
        "expert cache: none of 128 experts per layer on the device, all read from host memory; "
        "recommended at least 16: budget exhausted; to change that, raise --expert-cache"
    )
    assert line((), "--expert-slots") == (
        "expert cache: the model has no experts, so leave out --expert-slots: empty"
    )


def test_uneven_slots_name_the_fewest_and_the_most_and_the_share_of_all() -> None:
    assert "40 or 41 of 128 experts per layer (32 %)" in line((41,) * 40 + (40,) * 8)
    assert "38 to 43 of 128 experts per layer (32 %)" in line((43,) * 24 + (38,) * 24)
