"""What `vkmoe info` says of host pool, landing slots and executor, here and on invented devices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.tiny import model_path
from tests.gpu.invented import DISCRETE_12, with_matrix_units
from vkmoe.canary.check import passing
from vkmoe.gpu import device
from vkmoe.placement import remembered

from .conftest import Run


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A discrete card instead of the devices that are here."""
    monkeypatch.setattr(device, "list_devices", lambda: [DISCRETE_12])


def test_a_small_pool_and_who_runs_it(run: Run) -> None:
    done = run("info", "--host-pool", "8MiB")
    assert done.code == 0, done.err
    assert " of 192 experts (as --host-pool; the others are read from the file)" in done.out
    assert "reading from the file" in done.out
    assert "\nexecutor      stepped (what a router chooses and the host pool lacks" in done.out
    assert done.out.splitlines()[-1] == (
        "expert cache: 11 of 32 experts per layer (34 %) in the host pool, 7.9 MiB; "
        "recommended at least 8: ok"
    )


def test_a_pool_beside_slots_leaves_the_line_to_the_slots(run: Run) -> None:
    done = run("info", "--host-pool", "8MiB", "--expert-slots", "12")
    assert "host pool, 66 of 192 experts" in done.out
    assert done.out.splitlines()[-1].startswith(
        "expert cache: 12 of 32 experts per layer (38 %) on the device, 8.7 MiB; "
    )


def test_slots_that_a_small_pool_leaves_no_bytes_for_are_told(run: Run) -> None:
    asked = ("--host-pool", "8MiB", "--expert-cache", "1KiB")
    sizing, note = run("info", *asked).out.splitlines()[-2:]
    assert "in the host pool" in sizing
    assert note == "--expert-cache 1KiB has no effect: it is not enough for a slot"


def test_without_slots_a_card_reads_from_the_pool(run: Run, card: None) -> None:
    asked = ("--host-pool", "8MiB", "--expert-cache", "1KiB")
    sizing, note = run("info", *asked).out.splitlines()[-2:]
    assert sizing.startswith(
        "expert cache: none of 32 experts per layer on the device, all read from the host pool; "
    )
    assert sizing.endswith("raise --expert-cache") and "--expert-cache 1KiB has no effect" in note


def test_what_prompts_are_multiplied_in(
    run: Run, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(
        r"^prompts       tiles of 64 x 32 by 64, products of f32$", run("info").out, re.M
    )
    able = replace(DISCRETE_12, features=DISCRETE_12.features | {"float16"})
    monkeypatch.setattr(device, "list_devices", lambda: [able])
    assert ", products of f16, routers' of f32\n" in run("info").out


def test_whether_attention_of_prompts_runs_on_matrix_units(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caches of f32 are not multiplied there."""
    monkeypatch.setattr(device, "list_devices", lambda: [with_matrix_units(DISCRETE_12)])
    tiles = ", products of f16 on matrix units (16x16x16), routers' of f32; attention"
    assert f"{tiles} on matrix units too\n" in run("info").out
    assert f"{tiles} not on matrix units\n" in run("info", "--cache-type-k", "f32").out


def test_the_executor_of_a_model_that_fits(run: Run) -> None:
    assert "\nexecutor      fused (every expert is where the device can" in run("info").out
    asked = run("info", "--executor", "stepped").out
    assert "\nexecutor      stepped (as --executor)\n" in asked


def test_contradictions_and_too_little_are_refused(run: Run) -> None:
    done = run("info", "--host-pool", "8MiB", "--executor", "fused")
    assert done.code == 2 and "--executor fused" in done.err and "--host-pool 8MiB" in done.err
    done = run("info", "--host-pool", "1MB")
    assert done.code == 2 and "--host-pool 1MB is too small" in done.err
    assert "use --host-pool 2MiB or more" in done.err
    done = run("info", "--host-pool", "lots")
    assert done.code == 2 and "'lots' is not a size" in done.err


def test_misses_that_cross_a_bus_have_where_to_land(run: Run, card: None) -> None:
    done = run("info", "--expert-slots", "8", "--miss", "gather")
    assert done.code == 0, done.err
    assert "landing slots, 2 in each layer" in done.out
    assert "gathered experts, 4 at a time" in done.out
    served = "gathered on the device first, and kept where they land (as --miss)"
    assert f"\nmisses        {served}\n" in done.out
    plain = run("info", "--expert-slots", "8", "--no-promote-on-read", "--miss", "read").out
    assert "expert slots, 8 of 32" in plain and "landing" not in plain and "gathered" not in plain
    assert "\nmisses        read in host memory (as --miss)\n" in plain


def test_options_without_effect_are_told(run: Run) -> None:
    said = "all 32 experts of each layer are on the device: --miss has no effect"
    assert run("info", "--miss", "gather").out.splitlines()[-1] == said
    asked = ("--miss", "gather", "--expert-policy", "lru", "--host-pool", "8MiB")
    assert run("info", *asked).out.splitlines()[-1] == "no expert has a slot: --miss has no effect"
    assert "effect" not in run("info", "--miss", "gather", "--expert-slots", "8").out


def test_a_pool_without_effect_is_told(run: Run, card: None) -> None:
    done = run("info", "--host-pool", "8MiB")
    assert done.out.splitlines()[-1] == (
        "--host-pool 8MiB has no effect: all experts are on the device"
    )


def test_info_says_whether_the_device_has_passed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Loading a model compares its kernels; another one has some of its own."""
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="tuning": tmp_path / f"{what}.json"
    )
    line = re.compile(r"^canary        (.*)$", re.M)

    def told(*model: str) -> str:
        found = line.search(run("info", *model).out)
        assert found is not None
        return str(found[1])

    assert re.match(r"0 of \d+ kernels .* compared with NumPy when it is loaded$", told())
    monkeypatch.setattr("vkmoe.engine.passing", passing)
    assert run("generate", "-p", "def", "-n", "1").code == 0
    assert re.match(r"all \d+ kernels of this model have passed with this driver$", told())
    assert re.match(r"[1-9]\d* of \d+ kernels of this model", told(str(model_path("moe_odd"))))
    assert not line.search(run("info", "--device", "cpu").out)
