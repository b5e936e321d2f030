"""`vkmoe bench kernels` times what it has checked, stops at errors, and knows every kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.invented import DEVICES, device
from vkmoe.bench import kernels
from vkmoe.bench.clock import Clock, WrongResultError
from vkmoe.bench.kernels import KernelChoice
from vkmoe.bench.measure import Mode, Output
from vkmoe.bench.shapes import MODELS, TINY, ModelShapes, shapes_of
from vkmoe.bench.works import WORKS, Setting, tuning_for
from vkmoe.errors import UsageError
from vkmoe.gpu import backend
from vkmoe.gpu.device import spirv_words
from vkmoe.gpu.runner import Runner
from vkmoe.llm import demo_model_path
from vkmoe.models import open_model
from vkmoe.ops.tuning import choose_tuning
from vkmoe.selftest.families import FAMILIES
from vkmoe.selftest.inputs import WEIGHT_TYPES
from vkmoe.selftest.suite import compiled_variants

INFO = device("a CPU with 64-bit loads", "cpu", (), [])
INFO = replace(INFO, features=INFO.features | {"int64"})
MODEL_FILES = Path(__file__).resolve().parents[1] / "fixtures" / "models"
SMALL = KernelChoice(models=("tiny",), repeats=2)


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
def test_a_run_writes_the_roofline_and_then_each_kernel(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """With timestamps, and on a device that has none."""
    if mode == "wall":
        monkeypatch.setattr("vkmoe.bench.clock.has_timestamps", lambda device: False)
    lines: list[str] = []
    steps: list[str] = []
    choice = replace(SMALL, families=("matvec", "finish"), types=("q8_0",), shape="q/k/v")
    found = kernels.run(None, choice, Output(lines.append, steps.append))
    results, out = found["results"], "\n".join(lines)
    assert found["benchmark"] == "kernels" and results["roofline"]["latency_mode"] == mode
    assert all(row["value"]["median"] > 0 for row in results["roofline"]["rows"])
    (result,) = results["kernels"]
    assert result["variant"].partition("+")[0] == "matvec.q8_0"
    assert result["error"] <= result["error_limit"] and result["us"]["n"] == 2
    assert result["gb_per_s"]["median"] > 0 and 0 < result["share_of_copy"] < 10
    least = max(result["bytes_read"] / result["gb_per_s"]["median"] / 1e3 * result["share_of_copy"],
                results["roofline"]["rows"][1]["value"]["median"])  # fmt: skip
    assert result["share_of_roofline"] == pytest.approx(least / result["us"]["median"])
    assert out.index("latency mode") < out.index("roofline") < out.index("us per dispatch")
    assert steps[-1].startswith("1/1, ")


def test_a_wrong_kernel_ends_the_run_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, timed: list[str]
) -> None:
    """The message names variant, shape, element, expected and found."""

    def swapped(name: str) -> bytes:
        return spirv_words(name.replace("q6_k", "q4_k"))

    monkeypatch.setattr(backend, "spirv_words", swapped)
    choice = replace(SMALL, families=("matvec_residual",), types=("Q5_K", "Q6_K"))
    with pytest.raises(WrongResultError) as raised:
        kernels.run(None, choice, Output(lambda line: None))
    message = str(raised.value)
    assert message.startswith("matvec_residual.q6_k") and "tiny o 512 x 256: hidden" in message
    assert "element [" in message and "expected " in message and "found " in message
    assert [name.partition("+")[0] for name in timed] == ["finish", "matvec_residual.q5_k"]


def test_filters_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="no kernel"):
        kernels.run(None, replace(SMALL, families=("finish",), types=("Q4_K",)), Output(print))


def jobs(choice: KernelChoice) -> list[kernels.Job]:
    return kernels.chosen_jobs(choice, kernels.asked_of(choice), INFO)[0]


def test_a_kernel_that_the_model_has_not_is_measured_as_another_has_it() -> None:
    found = jobs(KernelChoice(families=("latent_attention", "router_topk")))
    models = {job.setting.variant.family: job.setting.shapes.name for job in found}
    assert models == {"latent_attention": "deepseek-v2-lite", "router_topk": "qwen3-30b-a3b"}


def test_a_quick_run_has_one_type_and_nothing_large() -> None:
    found = jobs(KernelChoice(quick=True))
    assert {job.setting.variant.axis for job in found} == {"", "Q4_K", "F16"}
    assert max(job.work.n_bytes for job in found) <= 16 * 2**20
    assert len(found) < len(jobs(KernelChoice())) / 5


def test_a_file_has_its_own_shapes_and_types() -> None:
    found = jobs(KernelChoice(models=(str(demo_model_path()),), families=("expert_down",)))
    with open_model(demo_model_path()) as file:
        spec = file.spec
    assert {job.setting.shapes.name for job in found} == {spec.name}
    assert {job.setting.variant.axis for job in found} == {"Q4_K", "Q5_K", "Q6_K", "Q8_0"}
    shapes = shapes_of(spec)
    assert (shapes.width, shapes.router.n_experts, shapes.norm) == (256, 32, "per_head")


@pytest.mark.parametrize("path", sorted(MODEL_FILES.glob("*.gguf")), ids=lambda path: path.stem)
def test_files_of_every_architecture_have_shapes(path: Path) -> None:
    """Those without experts are refused."""
    choice = KernelChoice(models=(str(path),), families=("matvec", "expert_down", "attention"))
    with open_model(path) as file:
        spec = file.spec
    if spec.experts is None:
        with pytest.raises(UsageError, match="has no experts"):
            jobs(choice)
    else:
        found = {job.setting.variant.family for job in jobs(choice) if spec.name in job.name}
        assert found >= {"matvec", "expert_down"}


def test_every_kernel_has_shapes() -> None:
    assert set(WORKS) == set(FAMILIES)


def test_every_variant_has_work_in_every_model_or_a_reason_for_none() -> None:
    """Shapes are built without a device; every weight type fits at least one model everywhere."""
    fits: dict[str, set[str]] = {}
    shapes: ModelShapes
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
