"""`vkmoe bench kernels` times what it has checked, stops at errors, and knows every kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tests.engine.other_types import UNEVEN, of_types
from tests.engine.tiny import rewrite
from tests.gpu.invented import DEVICES, device, with_matrix_units
from vkmoe.bench import kernels
from vkmoe.bench.clock import Clock, Memory, WrongResultError
from vkmoe.bench.copies import measure_link_speeds
from vkmoe.bench.decode import token_bytes
from vkmoe.bench.kernels import KernelChoice
from vkmoe.bench.measure import Mode, Output, Summary
from vkmoe.bench.shapes import MODELS, shapes_of
from vkmoe.bench.transfer import TransferChoice
from vkmoe.choices import TuningSource
from vkmoe.cpu.device import cpu_info, cpu_kernels
from vkmoe.errors import UsageError
from vkmoe.facts import AttentionSpec, DeviceInfo
from vkmoe.gpu import _native as native
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.program import Dispatch
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.families import FAMILIES, selecting
from vkmoe.kernels.family import Setup
from vkmoe.kernels.inputs import ROUNDED_SUMS, WEIGHT_TYPES
from vkmoe.kernels.launches import KernelClass, Launch
from vkmoe.kernels.shapes import TINY, KernelShapes
from vkmoe.kernels.tuning import Tuning, choose_tuning, matrix_tile
from vkmoe.llm import demo_model_path
from vkmoe.models import open_model
from vkmoe.quants import TYPES
from vkmoe.selftest.matrices import works_of
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

    def dispatch_us(self: Clock, runner: Runner, dispatch: Dispatch) -> Summary:
        names.append(dispatch.variant)
        return real(self, runner, dispatch)

    monkeypatch.setattr(Clock, "dispatch_us", dispatch_us)
    return names


@pytest.mark.parametrize("mode", ["gpu_timestamp", "wall"])
def test_a_run_writes_the_roofline_and_then_each_kernel(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """With timestamps, and on a device that has none."""
    if mode == "wall":
        monkeypatch.setattr(native.Device, "has_timestamps", lambda device, queue="compute": False)
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
    assert result["gb_per_s"]["median"] > 0 and 0 < result["share_of_memory"] < 10
    at_best = result["bytes_read"] / result["gb_per_s"]["median"] / 1e3
    least = max(at_best * result["share_of_memory"],
                results["roofline"]["rows"][1]["value"]["median"])  # fmt: skip
    assert result["share_of_roofline"] == pytest.approx(least / result["us"]["median"])
    n_weights = (256 + 128 + 128) * 512
    rate = n_weights / result["us"]["median"] / 1e3
    assert result["billion_weights_per_s"]["median"] == pytest.approx(rate)
    assert out.index("latency mode") < out.index("roofline") < out.index("us per dispatch")
    assert steps[-1].startswith("1/1, ")


def test_a_cpu_has_threads_and_a_roofline_of_its_own(cpu_native: None) -> None:
    """Its memory is read, no link is measured, and types are read that GPUs have no kernel for."""
    lines: list[str] = []
    types = ("q8_0", "iq3_s")
    choice = replace(SMALL, families=("matvec",), types=types, shape="q/k/v", threads=1)
    found = kernels.run("cpu", choice, Output(lines.append))
    roofline, rows = found["results"]["roofline"], found["results"]["kernels"]
    assert found["card"]["threads"] == 1 and roofline["latency_mode"] == "wall"
    assert [row["what"] for row in roofline["rows"]] == [
        "memory read by 1 thread", "empty dispatch", "empty submit and wait",
    ]  # fmt: skip
    assert all(row["value"]["median"] > 0 for row in roofline["rows"])
    n_blocks = (256 + 128 + 128) * 512 // 256
    assert {row["variant"]: row["bytes_read"] for row in rows} == {
        "matvec.q8_0": n_blocks * 8 * 34,
        "matvec.iq3_s": n_blocks * 110,
    }
    assert all(row["error"] <= row["error_limit"] and row["us"]["n"] == 2 for row in rows)
    assert all(row["share_of_memory"] > 0 < row["billion_weights_per_s"]["median"] for row in rows)


def test_every_kernel_of_a_cpu_is_measured_in_every_type(cpu_native: None) -> None:
    info = cpu_info()
    models = kernels.models_of(SMALL)
    found, left_out = kernels.chosen_jobs(SMALL, models, choose_tuning(info), info)
    assert {job.setup.variant.family for job in found} == cpu_kernels() & set(FAMILIES)
    of_weights = {job.setup.variant.axis for job in found if job.work.n_weights}
    assert of_weights == {*WEIGHT_TYPES} - {*ROUNDED_SUMS} and not left_out


def test_idle_threads_are_named() -> None:
    lines: list[str] = []
    kernels.run(None, replace(SMALL, families=("finish",), threads=3), Output(lines.append))
    assert any(line.startswith("--threads has no effect: ") for line in lines)


def test_what_is_remembered_is_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where only the table counts."""

    def tuned(info: DeviceInfo, source: TuningSource) -> Tuning:
        kernel = KernelClass("matvec", "Q8_0", "few", "short")
        table = choose_tuning(info)
        launches = ((kernel, table.table_launch(kernel)._replace(rows=3)),)
        return replace(table, launches=launches if source == "remembered" else ())

    monkeypatch.setattr(kernels, "tuning_for", tuned)
    rows = []
    for source in get_args(TuningSource):
        choice = replace(SMALL, families=("matvec",), types=("q8_0",), shape="q/k/v", tuning=source)
        found = kernels.run(None, choice, Output(lambda line: None))["results"]
        (result,) = found["kernels"]
        assert found["tuning"] == source
        rows.append(result["launch"]["rows"])
    assert rows[0] == 3 != rows[1]


def test_each_queue_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only the compute queue has timestamps."""
    monkeypatch.setattr(
        native.Device, "has_timestamps", lambda device, queue="compute": queue == "compute"
    )
    with Device(None) as device:
        with Clock(device, 2, Memory.of(device.info, tiny=True)) as clock:
            roofline = clock.roofline()
        settings = TransferChoice(repeats=2).settings(device.info)
        link = measure_link_speeds(device, settings)["rows"]
    modes = {row.what: row.mode for row in (*roofline.rows, *link)}
    walls = {what for what, mode in modes.items() if mode == "wall"}
    assert walls == {
        "empty submit and wait",
        "copy host -> device",
        "copies host -> device, upload queue",
    }


def test_a_wrong_kernel_ends_the_run_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, timed: list[str]
) -> None:
    """The message names variant, shape, element, expected and found."""

    def swapped(name: str) -> bytes:
        return spirv_words(name.replace("q6_k", "q4_k"))

    monkeypatch.setattr(gpu_device, "spirv_words", swapped)
    choice = replace(SMALL, families=("matvec_residual",), types=("Q5_K", "Q6_K"))
    with pytest.raises(WrongResultError) as raised:
        kernels.run(None, choice, Output(lambda line: None))
    message = str(raised.value)
    assert message.startswith("matvec_residual.q6_k") and "tiny o 512 x 256: hidden" in message
    assert "element [" in message and "expected " in message and "found " in message
    assert [name.partition("+")[0] for name in timed] == ["finish", "matvec_residual.q5_k"]


def test_kernels_that_the_model_has_not_are_compared_and_timed_too() -> None:
    families = ("delta_inputs", "delta_step")
    found = kernels.run(None, replace(SMALL, families=families), Output(lambda line: None))
    names = [line["variant"].partition("+")[0] for line in found["results"]["kernels"]]
    assert names == list(families)


def test_filters_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="no kernel"):
        kernels.run(None, replace(SMALL, families=("finish",), types=("Q4_K",)), Output(print))


def jobs(choice: KernelChoice) -> list[kernels.Job]:
    return kernels.chosen_jobs(choice, kernels.models_of(choice), choose_tuning(INFO), INFO)[0]


def test_a_kernel_that_the_model_has_not_is_measured_as_another_has_it() -> None:
    found = jobs(KernelChoice(families=("latent_attention", "router_topk")))
    models = {job.setup.variant.family: job.setup.shapes.name for job in found}
    assert models == {"latent_attention": "deepseek-v2-lite", "router_topk": "qwen3-30b-a3b"}


def test_a_quick_run_has_one_type_and_nothing_large() -> None:
    found = jobs(KernelChoice(quick=True))
    assert {job.setup.variant.axis for job in found} == {"", "Q4_K"}
    assert max(job.work.n_bytes for job in found) <= 16 * 2**20
    assert len(found) < len(jobs(KernelChoice())) / 5


def matrices(choice: KernelChoice, model: str) -> set[tuple[str, str]]:
    """Role and type of what is measured of a model."""
    found = [job for job in jobs(choice) if job.work.role and job.setup.shapes.name == model]
    return {(job.work.role, job.setup.variant.axis) for job in found}


def test_a_file_has_its_own_shapes_and_types() -> None:
    """Of each matrix its own types, also beside another model, and of those no file has all."""
    choice = KernelChoice(models=(str(demo_model_path()), "olmoe-1b-7b"))
    with open_model(demo_model_path()) as file:
        shapes, found = shapes_of(file), Counter(works_of(file))
    (mixer,) = shapes.mixers
    assert isinstance(mixer, AttentionSpec) and mixer.qk_norm == "per_head"
    assert (shapes.width, shapes.experts.n_experts) == (256, 32)
    own = matrices(choice, shapes.name)
    families = {"o": "matvec_residual", "gate/up": "expert_gate_up", "down": "expert_down"}
    read = {(work.family, work.type) for work in found}
    assert {(families.get(role, "matvec"), kind) for role, kind in own if role != "embed"} == read
    assert ("router", "F32") in own and ("q/k/v", "F32") not in own
    assert len({kind for _, kind in matrices(choice, "olmoe-1b-7b")}) > 10


def test_a_quick_run_of_a_file_has_its_types() -> None:
    choice = KernelChoice(models=(str(demo_model_path()),))
    with open_model(demo_model_path()) as file:
        name = file.spec.name
    assert matrices(choice, name) == matrices(replace(choice, quick=True), name)


def test_types_are_those_of_the_file(tmp_path: Path) -> None:
    path = rewrite(MODEL_FILES / "moe_plain.gguf", tmp_path / "uneven.gguf", of_types(UNEVEN))
    with open_model(path) as file:
        tensors = [*file.file.tensors.values()]
        kinds = {tensor.type for tensor in tensors}
        assert {kind for _, kind in shapes_of(file).types} == kinds > {"F32", "Q5_1"}
        read = token_bytes(file, "file")
        whole = sum(TYPES[item.type].row_bytes(item.n_weights) for item in tensors)
        experts = file.spec.experts
    assert experts is not None
    unused = read.experts * (experts.n_experts - experts.n_used) // experts.n_used
    row_bytes = file.tensors.embeddings.tensor.n_bytes // file.spec.n_vocab
    assert file.spec.tied_embeddings, "the head reads all of them"
    assert read.total == whole - unused + row_bytes


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
        found = {job.setup.variant.family for job in jobs(choice) if spec.name in job.name}
        assert found >= {"matvec", "expert_down"}


def test_every_variant_has_work_in_every_model_or_a_reason_for_none() -> None:
    """Shapes are built without a device; every weight type fits at least one model everywhere."""
    fits: dict[str, set[str]] = {}
    shapes: KernelShapes
    for variant in compiled_variants():
        tuning = selecting(variant, choose_tuning(INFO), INFO)
        for shapes in (TINY, *MODELS.values()):
            works = list(FAMILIES[variant.family].works(Setup(variant, tuning, shapes)))
            assert all(work.what for work in works), variant
            if not all(work.misfit for work in works):
                fits.setdefault(variant.name, set()).add(shapes.name)
    assert all("tiny" in names and len(names) > 1 for names in fits.values())
    assert set(fits) == {variant.name for variant in compiled_variants()}
    assert {variant.axis for variant in compiled_variants()} >= set(WEIGHT_TYPES)


def test_variants_get_the_tuning_of_devices_that_choose_them() -> None:
    """The device's own wherever it selects the variant, on every kind of device."""
    for info in (INFO, *DEVICES, *map(with_matrix_units, DEVICES)):
        launches = ((KernelClass("matvec", "Q4_K", "few", "long"), Launch(8, 3)),)
        own = replace(choose_tuning(info), launches=launches)
        for variant in compiled_variants():
            if variant.suffix == "+matrix" and matrix_tile(info) is None:
                continue
            tuning, chosen_by = selecting(variant, own, info), FAMILIES[variant.family].chosen_by
            if chosen_by == "nothing":
                assert tuning == own
            else:
                assert getattr(tuning, chosen_by) == variant.suffix
                assert (tuning == own) == (getattr(own, chosen_by) == variant.suffix)
