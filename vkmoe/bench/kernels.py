"""This module checks every kernel in the shapes of real models against its twin, then times it.

It owns which kernels are run, in which order, and what is written of them. A result that is not
its twin's ends the run before anything of it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vkmoe.bench.clock import Clock, Memory, Roofline, check_or_raise
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Output, Summary, document
from vkmoe.bench.shapes import MODELS, TINY, ModelShapes, shapes_of
from vkmoe.bench.works import WORKS, Setting, Work, tuning_for
from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner
from vkmoe.models import open_model
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.selftest.families import FAMILIES
from vkmoe.selftest.suite import Variant, compiled_variants, runnable

__all__ = ["DEFAULT_MODEL", "KernelChoice", "run"]

DEFAULT_MODEL = "qwen3-30b-a3b"
LARGEST_MIB_CPU = 256.0  # larger matrices take many seconds on a CPU device
QUICK_TYPES, QUICK_MIB, QUICK_CONTEXT, QUICK_VOCABULARY = ("Q4_K",), 16.0, 512, 8192
CACHE_TYPES = ("", "F16")  # of kernels that read no weights, where only some types are wanted
EXPLANATION = (
    "A line is one dispatch: microseconds [95 % interval of the median], GB/s of the bytes it must",
    "read, and the share of the roofline: the least time (those bytes at the speed of the copy, or",
    "an empty dispatch) over the time it took. Caches are flushed before each repeat.",
)


@dataclass(frozen=True)
class KernelChoice:
    """Says which kernels are measured, and how often; empty means all."""

    families: Sequence[str] = ()
    types: Sequence[str] = ()
    models: Sequence[str] = (DEFAULT_MODEL,)  # names of presets, `all`, `tiny`, or a GGUF file
    all_mappings: bool = False  # variants that this device would not choose too
    shape: str = ""  # only shapes whose text has this in it
    largest_mib: float | None = None
    repeats: int = 2 * MIN_REPEATS
    quick: bool = False  # few types, no large matrices, short contexts

    def __post_init__(self) -> None:
        types = sorted({variant.axis for variant in compiled_variants() if variant.axis})
        _refuse_unknown("--family", self.families, WORKS)
        _refuse_unknown("--type", [name.upper() for name in self.types], types)
        names = [name for name in self.models if not _is_file(name)]
        _refuse_unknown("--model", names, [*MODELS, "all", "tiny", "FILE.gguf"])

    @property
    def n_repeats(self) -> int:
        return min(self.repeats, MIN_REPEATS) if self.quick else self.repeats

    def largest_bytes(self, info: DeviceInfo) -> float:
        """Return the size above which matrices are left out."""
        default = LARGEST_MIB_CPU if info.is_cpu else float("inf")
        return 2**20 * (self.largest_mib or (QUICK_MIB if self.quick else default))


class Asked(NamedTuple):
    """Holds the shapes and the types of weights that a choice comes to; no types: all."""

    shapes: list[ModelShapes]
    types: tuple[str, ...]


class Job(NamedTuple):
    """Holds one dispatch of one variant with one model's shape."""

    setting: Setting
    work: Work

    @property
    def name(self) -> str:
        return f"{self.setting.variant.name}, {self.setting.shapes.name} {self.work.what}"


def run(device_name: str | None, choice: KernelChoice, output: Output) -> dict[str, Any]:
    """Measure the roofline, then check and time job after job; return the document.

    Raises UsageError where nothing passes the filters, WrongResultError, ModelFileError, GpuErrors.
    """
    asked = asked_of(choice)
    with Device(device_name) as device:
        card = describe(device.info)
        print_card(card, output.say)
        jobs, left_out = chosen_jobs(choice, asked, device.info)
        if not jobs:
            raise UsageError("no kernel passes these filters", "; ".join(left_out))
        with Clock(device, choice.n_repeats, Memory.of(device.info, TINY in asked.shapes)) as clock:
            output.progress("measuring the roofline")
            roofline = clock.roofline()
            roofline.show(output)
            results = list(_measure(jobs, clock, roofline, output))
    for why in left_out:
        output.say(f"left out: {why}")
    found = {"roofline": roofline.document(), "left_out": left_out, "kernels": results}
    return document("kernels", card, found)


# ----- what is measured -----


def _refuse_unknown(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UsageError(f"{flag}: no {', '.join(unknown)}", f"there is {', '.join(known)}")


def _is_file(name: str) -> bool:
    return name.endswith(".gguf") or Path(name).is_file()


def asked_of(choice: KernelChoice) -> Asked:
    """Look the models up, and read the one that is a file: its weights say which types."""
    shapes: list[ModelShapes] = []
    types: tuple[str, ...] = QUICK_TYPES if choice.quick else ()
    for name in choice.models:
        if _is_file(name):
            with open_model(Path(name)) as file:
                shapes.append(shapes_of(file.spec))
                types = tuple({tensor.type for tensor in file.file.tensors.values()} - {"F32"})
        else:
            shapes += MODELS.values() if name == "all" else [(MODELS | {"tiny": TINY})[name]]
    if choice.quick:
        shapes = [each if each is TINY else _shortened(each) for each in shapes]
    return Asked(shapes, types)


def _shortened(shapes: ModelShapes) -> ModelShapes:
    contexts = tuple(context for context in shapes.contexts if context <= QUICK_CONTEXT)
    return replace(shapes, contexts=contexts, n_vocab=min(shapes.n_vocab, QUICK_VOCABULARY))


def chosen_jobs(
    choice: KernelChoice, asked: Asked, info: DeviceInfo
) -> tuple[list[Job], list[str]]:
    """List what is to be measured, and what is left out and why."""
    largest = choice.largest_bytes(info)
    jobs: list[Job] = []
    left_out: dict[str, dict[str, None]] = {}  # types by what and why, each once
    seen: set[tuple[str, str]] = set()  # models share shapes
    for job in _candidates(choice, asked, info):
        known = (job.setting.variant.name, job.work.what) in seen
        if known or choice.shape not in job.work.what:
            continue
        seen.add((job.setting.variant.name, job.work.what))
        axis, mib = job.setting.variant.axis, job.work.n_bytes / 2**20
        if job.work.misfit or job.work.n_bytes > largest:
            why = job.work.misfit or f"larger than --largest-mib {largest / 2**20:g}"
            what = f"{job.setting.shapes.name} {job.work.what}: {why}"
            name = axis if job.work.misfit else f"{axis} ({mib:.0f} MiB)".strip()
            left_out.setdefault(what, {})[name] = None
        else:
            jobs.append(job)
    return jobs, [f"{what}: {', '.join(types)}" for what, types in left_out.items()]


def _candidates(choice: KernelChoice, asked: Asked, info: DeviceInfo) -> Iterator[Job]:
    """Yield variants that pass the filters in the models' shapes.

    What none of these models has, such as latent attention, is run in the first shape that has it.
    """
    types = [name.upper() for name in choice.types]
    for variant in compiled_variants():
        assert variant.family in WORKS, f"{variant.name} has no shapes in bench/works.py"
        wanted = not choice.families or variant.family in choice.families
        wanted &= not types or variant.axis in types
        wanted &= choice.all_mappings or _own(variant, info)
        if not wanted or not runnable(variant, info):
            continue
        tuning = tuning_for(variant, info)
        models = [[each] for each in MODELS.values()] if not choice.quick else []
        found = (_of_models(variant, tuning, some) for some in (asked.shapes, *models))
        for job in next(filter(None, found), []):
            if types or not asked.types or _of_types(job, asked.types):
                yield job


def _of_types(job: Job, types: Sequence[str]) -> bool:
    return job.setting.variant.axis in (types if job.work.blocks else CACHE_TYPES)


def _of_models(variant: Variant, tuning: Tuning, models: Sequence[ModelShapes]) -> list[Job]:
    settings = (Setting(variant, tuning, shapes) for shapes in models)
    return [Job(setting, work) for setting in settings for work in WORKS[variant.family](setting)]


def _own(variant: Variant, info: DeviceInfo) -> bool:
    """Say whether it is what a model's program would run on this device."""
    chosen_by = FAMILIES[variant.family].chosen_by
    own = choose_tuning(info)
    return chosen_by == "nothing" or getattr(own, chosen_by) == variant.suffix


# ----- measuring it -----


def _measure(
    jobs: list[Job], clock: Clock, roofline: Roofline, output: Output
) -> Iterator[dict[str, Any]]:
    """Check, time, write each job. Raises WrongResultError before a wrong one is timed."""
    for line in EXPLANATION:
        output.say(line)
    output.say(f"{'us per dispatch':>34} {'GB/s':>8} {'of roof':>8}")
    started = time.monotonic()
    for index, job in enumerate(jobs, start=1):
        seconds = time.monotonic() - started
        output.progress(f"{index}/{len(jobs)}, {seconds:.0f} s: {job.name}")
        with Runner(clock.device) as runner:
            worst = check_or_raise(runner, job.work.check, job.name)
            took = clock.dispatch_us(runner, job.setting.variant.name)
        n_bytes = job.work.n_bytes
        speed = _speed(n_bytes, took)
        least = max(roofline.least_us(n_bytes), roofline.empty_dispatch.value.median)
        share = least / took.median
        cell = f"{speed.median:8.2f}" if speed else f"{'':8}"
        output.say(f"{took!s:>34} {cell} {share:8.1%} {job.name}")
        yield {
            "variant": job.setting.variant.name,
            "model": job.setting.shapes.name,
            "shape": job.work.what,
            "bytes_read": n_bytes,
            "us": took,
            "gb_per_s": speed,
            "share_of_copy": speed.median / roofline.copy_gb_per_s if speed else None,
            "share_of_roofline": share,
            "error": worst.error,
            "error_limit": worst.limit,
            "tuning": str(job.setting.tuning),
        }


def _speed(n_bytes: int, took: Summary) -> Summary | None:
    """Return GB/s; none for what reads next to nothing."""
    if not n_bytes:
        return None
    low, median, high = (n_bytes / us / 1e3 for us in (took.high, took.median, took.low))
    return Summary(median, low, high, took.n)
