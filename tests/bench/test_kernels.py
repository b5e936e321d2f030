"""bench.kernels: it times what it has checked, stops at what is wrong, and knows every kernel."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench import kernels as bench
from bench.measure import Mode
from bench.parts.kernel_shapes import MODELS, TINY
from bench.parts.kernel_times import Clock, WrongKernelError
from bench.parts.kernel_work import Setting, tuning_for
from bench.parts.kernel_works import WORKS
from tests.gpu.invented import DEVICES, device
from vkmoe.errors import UsageError
from vkmoe.gpu import backend
from vkmoe.gpu.device import spirv_words
from vkmoe.gpu.runner import Runner
from vkmoe.ops.tuning import choose_tuning
from vkmoe.selftest.families import FAMILIES
from vkmoe.selftest.inputs import WEIGHT_TYPES
from vkmoe.selftest.suite import compiled_variants

INFO = device("a CPU with 64-bit loads", "cpu", (), [])
INFO = replace(INFO, features=INFO.features | {"int64"})
QUICK = ["kernels", "--quick", "--repeats", "2"]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that were timed."""
    names: list[str] = []
    real = Clock.dispatch_us

    def dispatch_us(self: Clock, runner: Runner, variant: str):
        names.append(variant)
        return real(self, runner, variant)

    monkeypatch.setattr(Clock, "dispatch_us", dispatch_us)
    return names


@pytest.mark.parametrize("mode", ["gpu_timestamp", "wall"])
def test_a_quick_run_ends_with_one_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: Mode
) -> None:
    """With timestamps, and on a device that has none."""
    if mode == "wall":
        monkeypatch.setattr("bench.parts.kernel_times._has_timestamps", lambda device: False)
    monkeypatch.setattr(
        "sys.argv", [*QUICK, *["--family", "matvec,finish", "--type", "q8_0", "--shape", "q/k/v"]]
    )
    bench.main()
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    results = found["results"]
    assert found["benchmark"] == "kernels" and results["latency_mode"] == mode
    assert results["copy_gb_per_s"]["median"] > 0 and results["empty_dispatch_us"]["median"] > 0
    names = [result["variant"].partition("+")[0] for result in results["kernels"]]
    assert names == ["matvec.q8_0"]
    for result in results["kernels"]:
        assert result["error"] <= result["error_limit"] and result["us"]["n"] == 2
        assert result["gb_per_s"]["median"] > 0 and 0 < result["share_of_copy"] < 10
    assert out.index("latency mode") < out.index("roofline") < out.index("us per dispatch")
    assert err.splitlines()[-1].startswith("1/1, "), "progress goes to stderr"


def test_a_wrong_kernel_ends_the_run_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: list[str]
) -> None:
    """The message names variant, shape, element, expected and found."""

    def swapped(name: str) -> bytes:
        return spirv_words(name.replace("q6_k", "q4_k"))

    monkeypatch.setattr(backend, "spirv_words", swapped)
    monkeypatch.setattr("sys.argv", [*QUICK, "--family", "matvec_residual", "--type", "Q5_K,Q6_K"])
    with pytest.raises(WrongKernelError) as raised:
        bench.main()
    message = str(raised.value)
    assert message.startswith("matvec_residual.q6_k") and "tiny o 512 x 256: hidden" in message
    assert "element [" in message and "expected " in message and "found " in message
    assert [name.partition("+")[0] for name in timed] == ["finish", "matvec_residual.q5_k"]
    assert "{" not in capsys.readouterr().out, "no document of a run that failed"


@pytest.mark.parametrize(
    ("option", "value"), [("--family", "matmul"), ("--type", "Q9_K"), ("--model", "gpt-2")]
)
def test_what_is_not_there_is_refused_with_what_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    monkeypatch.setattr("sys.argv", [*QUICK, option, value])
    with pytest.raises(SystemExit):
        bench.main()
    assert f"{option}: no {value}; there is " in capsys.readouterr().err


def test_filters_that_leave_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [*QUICK, "--family", "finish", "--type", "Q4_K"])
    with pytest.raises(UsageError, match="no kernel"):
        bench.main()


def test_a_kernel_that_the_model_has_not_is_measured_as_another_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", "--family", "latent_attention,router_topk"])
    jobs, _ = bench._jobs(bench._options(), INFO)
    models = {job.setting.variant.family: job.setting.shapes.name for job in jobs}
    assert models == {"latent_attention": "deepseek-v2-lite", "router_topk": "qwen3-30b-a3b"}


def test_every_kernel_has_shapes() -> None:
    assert set(WORKS) == set(FAMILIES)


def test_every_variant_has_work_in_every_model_or_a_reason_for_none() -> None:
    """Shapes are built without a device; every weight type fits at least one model everywhere."""
    fits: dict[str, set[str]] = {}
    for variant in compiled_variants():
        for shapes in (TINY, *MODELS.values()):
            works = list(WORKS[variant.family](Setting(variant, tuning_for(variant, INFO), shapes)))
            assert all(work.what for work in works), variant
            if not all(work.misfit for work in works):
                fits.setdefault(variant.name, set()).add(shapes.name)
    assert all("tiny" in names and len(names) > 1 for names in fits.values())
    assert set(fits) == {variant.name for variant in compiled_variants()}
    assert {variant.axis for variant in compiled_variants()} >= set(WEIGHT_TYPES)


def test_variants_get_the_tuning_of_devices_that_choose_them() -> None:
    """The device's own wherever it selects the variant, on every kind of device."""
    for info in (INFO, *DEVICES):
        own = choose_tuning(info)
        for variant in compiled_variants():
            tuning, chosen_by = tuning_for(variant, info), FAMILIES[variant.family].chosen_by
            if chosen_by == "nothing":
                assert tuning == own
            else:
                assert getattr(tuning, chosen_by) == variant.suffix
                assert (tuning == own) == (getattr(own, chosen_by) == variant.suffix)
