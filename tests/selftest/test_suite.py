"""The self-test itself: it covers every compiled variant, and it notices what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.gpu.invented import with_matrix_units
from tests.samples import sampled
from tools.compile_shaders import compile_glsl
from vkmoe.errors import GpuError
from vkmoe.gpu import _native as native
from vkmoe.gpu import backend, kernels
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.program import Program
from vkmoe.gpu.runner import Runner, time_recording
from vkmoe.kernels.comparison import Checks
from vkmoe.kernels.families import FAMILIES, selecting
from vkmoe.kernels.family import Variant
from vkmoe.kernels.launches import KEEPING, KernelClass, Launch, MatvecFamily
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.quants import HAS_KERNEL, TYPES
from vkmoe.selftest import suite
from vkmoe.selftest.suite import compiled_variants, run_variant, runnable

NOTHING = """#version 460
layout(local_size_x_id = 0) in;
void main() {}
"""


@pytest.fixture
def nothing(tmp_path: Path) -> bytes:
    """SPIR-V of a shader that leaves every output as it was."""
    source, out = tmp_path / "nothing.comp", tmp_path / "nothing.spv"
    source.write_text(NOTHING)
    compile_glsl(source, out)
    return out.read_bytes()


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(os.environ.get("VKMOE_DEVICE")) as opened:
        yield opened


@pytest.fixture(scope="module")
def own(device: Device) -> Tuning:
    """The device's tuning, whatever is remembered of it."""
    return choose_tuning(device.info)


# Compiling them for all types of caches takes a minute; tests/kernels has other ones.
COMPILED_LONG, SOME_TRIALS = {"attention", "append_rows", "prompt_attention"}, 2


def variants() -> Iterator[Any]:
    """Of each kernel one variant at least, whose types and mappings take turns; CI runs all.

    Those of `tools/test --quick` are always among them.
    """
    ours = (each for each in compiled_variants() if each.suffix != "+matrix")  # see tests/lavapipe
    found = sorted(ours, key=lambda each: each.family)
    groups = [list(group) for _, group in groupby(found, lambda each: each.family)]
    for turn, group in enumerate(groups):
        names = {group[0].family, f"{group[0].family}.q4_k+blocks", "embed.q4_k"}
        quick = [each for each in group if each.name in names]
        often = quick or [group[3 * turn % len(group)]]
        for variant in group:
            marks = [pytest.mark.full] * (variant not in often)
            if variant.family in COMPILED_LONG and variant in often:
                yield pytest.param(variant, None, id=f"{variant.name}, all", marks=pytest.mark.full)
                yield pytest.param(variant, SOME_TRIALS, id=variant.name)
            else:
                yield pytest.param(variant, None, id=variant.name, marks=marks)


@pytest.mark.parametrize(("variant", "most"), [*variants()])
def test_every_variant_agrees_with_its_twin(
    device: Device, own: Tuning, variant: Variant, most: int | None
) -> None:
    """Also: every compiled variant has a case, and CI's device can run all of them."""
    assert runnable(variant, device.info)
    cases = list(islice(run_variant(variant, device, own), most))
    assert cases and all(case.ok for case in cases), cases


@pytest.mark.parametrize("family", sampled(get_args(MatvecFamily), "expert_gate_up".__eq__))
def test_every_launch_of_a_tuning_is_compared(
    device: Device, monkeypatch: pytest.MonkeyPatch, family: MatvecFamily
) -> None:
    """The table's, that of matrices of few rows, and measured ones; also of kernels that keep."""
    real, launches = backend.Backend.record, set[tuple[object, ...]]()

    def record(self: backend.Backend, program: Program, *more: Any, **named: Any) -> Any:
        launches.update((x.kernel, *x.constants[:2]) for x in program.dispatches())
        return real(self, program, *more, **named)

    monkeypatch.setattr(backend.Backend, "record", record)
    measured = ((KernelClass(family, "Q8_0", "some", "long"), Launch(32, 8)),)
    table = Tuning("lanes", 64, 4, False, rows_of_few=2, launches=measured)
    for name in filter(None, (family, KEEPING.get(family))):
        cases = list(run_variant(Variant.parse(f"{name}.q8_0"), device, table))
        assert all(case.ok for case in cases), cases
        alone = [case.name for case in cases if "rows of a batch" not in case.name]
        assert alone == [f"{name}.q8_0", f"{name}.q8_0 in 64 x 4", f"{name}.q8_0 in 32 x 8"]
        half = 2 if family == "expert_gate_up" else 1  # rows of both matrices
        wanted = {(name, 64, 2 // half), (name, 32, 8 // half), (name, 64, 4 // half)}
        assert wanted <= launches


def test_the_remembered_tuning_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "tuning_for", lambda info, source: (info.index, source))
    monkeypatch.setattr(suite, "run_variant", lambda variant, device, own: [own])
    taken: list[Any] = list(suite.run(os.environ.get("VKMOE_DEVICE"), "finish"))
    assert [source for _, source in taken] == ["remembered"]


def test_every_kernel_and_every_variant_has_a_family() -> None:
    assert set(FAMILIES) == {variant.family for variant in compiled_variants()}
    assert set(FAMILIES) == set(kernels.KERNELS)


def test_every_kernel_of_weights_is_there_for_every_type() -> None:
    types: dict[str, set[str]] = {}
    for variant in compiled_variants():
        if variant.axis in TYPES:
            types.setdefault(f"{variant.family}{variant.suffix}", set()).add(variant.axis)
    assert len(types) == 45
    assert {name for name, found in types.items() if found != HAS_KERNEL} == set()


def test_a_variant_without_a_case_is_a_failure(device: Device, own: Tuning) -> None:
    (case,) = run_variant(Variant.parse("new_kernel.q4_k"), device, own)
    assert not case.ok and case.name == "new_kernel.q4_k has no case"


@pytest.mark.parametrize(
    ("wanted", "loaded"),
    [
        ("matvec.q5_k", "matvec.q4_k"),
        ("matvec.bf16+blocks", "matvec.f16+blocks"),
        ("matvec_residual.f16", "matvec_residual.bf16"),
        ("embed.q5_k", "embed.q4_k"),
        ("embed.q3_k", "embed.q2_k"),
        ("matvec.q4_0+blocks", "matvec.iq4_nl+blocks"),
        ("matvec_residual.iq4_nl", "matvec_residual.mxfp4"),
        ("expert_gate_up.f16", "expert_gate_up.bf16"),
        ("expert_down.q6_k", "expert_down.q4_k"),
        ("latent_attention", "nothing"),
        ("finish", "nothing"),
        ("read_words", "nothing"),
        ("gather", "nothing"),
        ("bring_experts", "nothing"),
        ("router_topk", "nothing"),
        ("candidates_merge", "nothing"),
    ],
)
@pytest.mark.sample(8)
def test_a_wrong_kernel_is_found(
    device: Device,
    own: Tuning,
    monkeypatch: pytest.MonkeyPatch,
    nothing: bytes,
    wanted: str,
    loaded: str,
) -> None:
    """The kernel of a type that is no larger (it must not read past the end), or one of nothing."""

    def swapped(name: str) -> bytes:
        if name == wanted:
            return nothing if loaded == "nothing" else spirv_words(loaded)
        return spirv_words(name)

    monkeypatch.setattr(gpu_device, "spirv_words", swapped)
    assert not all(case.ok for case in run_variant(Variant.parse(wanted), device, own))


@pytest.mark.parametrize("name", ["matvec.q8_0", "expert_down.q8_0", "gather", "read_words"])
def test_a_device_that_computes_nothing_is_found(
    device: Device, own: Tuning, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(backend.Backend, "run", lambda *_: None)
    chosen = Variant.parse(name + (own.dot_suffix if "." in name else ""))
    cases = list(run_variant(chosen, device, own))
    assert cases and not any(case.ok for case in cases)


def test_a_timestamp_that_was_not_written_is_an_error_to_act_on(device: Device) -> None:
    assert device.native.has_timestamps()
    native.inject_failure("vkGetQueryPoolResults", 1, "VK_NOT_READY")  # the wait looks first
    with Runner(device) as runner, pytest.raises(GpuError, match="VK_NOT_READY while timing"):
        time_recording(device, runner.record(Program("nothing"), timed=True), 1)
    native.clear_injections()


@pytest.mark.parametrize("family", ["expert_gate_up", "expert_down"])
def test_keeping_in_another_order_of_sums_is_found(
    device: Device, own: Tuning, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """As where a driver gives the plain kernel other subgroups than the one that keeps."""
    plain = f"{family}.q8_0+subgroup"

    def swapped(name: str) -> bytes:
        return spirv_words(name.removesuffix("+subgroup") if name == plain else name)

    monkeypatch.setattr(gpu_device, "spirv_words", swapped)
    assert all(case.ok for case in run_variant(Variant.parse(plain), device, own)), "near the twin"
    keeping = Variant.parse(f"{family}_keep.q8_0+subgroup")
    assert not all(case.ok for case in run_variant(keeping, device, own))


def test_what_a_device_lacks_is_left_out(device: Device) -> None:
    poor = replace(device.info, subgroup_arithmetic=False, features=frozenset())
    names = {variant.name for variant in compiled_variants() if runnable(variant, poor)}
    assert "matvec.q4_k" in names and "matvec.q4_k+blocks" in names
    assert not {
        name for name in names if name.endswith(("+subgroup", "+blocks64", "+half", "+matrix"))
    }
    narrow = replace(device.info, subgroup_size=4, features=frozenset({"int64"}))
    assert not runnable(Variant.parse("matvec.q4_k+blocks64"), narrow)
    assert not choose_tuning(narrow).load_64bit


def test_tunings_select_their_variant(device: Device) -> None:
    """On every kind of device, whatever its own tuning is."""
    with_units = with_matrix_units(device.info)
    gpu = replace(with_units, type="discrete", subgroup_size=32, subgroup_range=(32, 32))
    for info in (with_units, gpu):
        for variant in compiled_variants():
            tuning = selecting(variant, choose_tuning(info), info, small=True)
            chosen_by = FAMILIES[variant.family].chosen_by
            assert chosen_by == "nothing" or getattr(tuning, chosen_by) == variant.suffix


def test_comparisons_fail_on_what_is_wrong() -> None:
    checks = Checks()
    one = np.ones(3, np.float32)
    checks.close("near", one + np.float32(1e-6), one, 1.0)
    assert checks.worst.ok
    for wrong in (one + 1e-4, np.array([1, np.nan, 1]), np.array([1, np.inf, 1])):
        failing = Checks()
        failing.close("far", wrong, one, 1.0)
        assert not failing.worst.ok
        with pytest.raises(AssertionError, match="far: error"):
            failing.verify()
    checks.close("no magnitude", np.ones(3) + 1e-9, one, 0.0)
    assert checks.worst.what == "no magnitude" and not checks.worst.ok
    checks.equal("ids", np.arange(4), np.array([0, 1, 2, 4]))
    assert checks.checks[-1].error == 0.25 and not checks.checks[-1].ok
    with pytest.raises(AssertionError, match="nothing was compared"):
        Checks().verify()
