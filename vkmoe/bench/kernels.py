"""This module checks every kernel in the shapes of real models against its twin, then times it.

It owns which kernels are run, in which order, and what is written of them. A result that is not
its twin's ends the run before anything of it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from vkmoe.bench.clock import Clock, Memory, Roofline, check_or_raise, last_dispatch
from vkmoe.bench.defaults import LARGEST_MIB, MODEL, REPEATS
from vkmoe.bench.environment import show_card
from vkmoe.bench.measure import Output, Summary, document
from vkmoe.bench.shapes import MODELS, shapes_of
from vkmoe.choices import TuningSource
from vkmoe.devices import open_device
from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import Dispatch
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.families import FAMILIES, selecting
from vkmoe.kernels.family import Setup, Variant, Work
from vkmoe.kernels.shapes import TINY, KernelShapes
from vkmoe.kernels.tuning import Tuning
from vkmoe.models import open_model
from vkmoe.placement.remembered import tuning_for
from vkmoe.selftest.suite import compiled_variants, variants_of

QUICK_TYPES, QUICK_CONTEXT, QUICK_VOCABULARY = ("Q4_K",), 512, 8192
EXPLANATION = (
    "A line is one dispatch: microseconds [95 % interval of the median], GB/s of the bytes it must",
    "read, billions of weights a second (Gw/s), the share of the roofline: the least time (those",
    "bytes at the speed in its first line, or an empty dispatch) over the time it took. Caches are",
    "flushed before each repeat.",
)


@dataclass(frozen=True)
class KernelChoice:
    """Says which kernels are measured, and how often; empty means all."""

    families: Sequence[str] = ()
    types: Sequence[str] = ()
    models: Sequence[str] = (MODEL,)  # names of presets, `all`, `tiny`, or a GGUF file
    all_mappings: bool = False  # variants that this device would not choose too
    shape: str = ""  # only shapes whose text has this in it
    largest_mib: float | None = None  # None: by the kind of device
    repeats: int | None = None  # None: as `quick` has it
    quick: bool = False  # few types, no large matrices, short contexts
    tuning: TuningSource = "remembered"
    threads: int | None = None  # of a CPU; None: one for each physical core

    def __post_init__(self) -> None:
        compiled = {variant.axis for variant in compiled_variants() if variant.axis}
        types = sorted(compiled)
        _refuse_unknown("--family", self.families, FAMILIES)
        _refuse_unknown("--type", [name.upper() for name in self.types], types)
        names = [name for name in self.models if not _is_file(name)]
        _refuse_unknown("--model", names, [*MODELS, "all", "tiny", "FILE.gguf"])

    @property
    def n_repeats(self) -> int:
        return REPEATS.chosen(self.repeats, self.quick)

    def largest_bytes(self, info: DeviceInfo) -> float:
        """Return the size above which matrices are left out."""
        return 2**20 * LARGEST_MIB.chosen(self.largest_mib, self.quick, info.is_cpu)


class Job(NamedTuple):
    """Holds one dispatch of one variant with one model's shape."""

    setup: Setup
    work: Work

    @property
    def name(self) -> str:
        return f"{self.setup.variant.name}, {self.setup.shapes.name} {self.work.what}"


def run(device_name: str | None, choice: KernelChoice, output: Output) -> dict[str, Any]:
    """Measure the roofline, then check and time job after job; return the document.

    Raises UsageError where nothing passes the filters, WrongResultError, ModelFileError, GpuErrors.
    """
    with open_device(device_name, n_threads=choice.threads) as device:
        models = models_of(choice)
        card = show_card(device, choice.threads, output)
        own = tuning_for(device.info, choice.tuning)
        jobs, left_out = chosen_jobs(choice, models, own, device.info)
        left_out += _uncompared(models, device.info)
        if not jobs:
            raise UsageError("no kernel passes these filters", "; ".join(left_out))
        with Clock(device, choice.n_repeats, Memory.of(device.info, TINY in models)) as clock:
            output.progress("measuring the roofline")
            roofline = clock.roofline()
            roofline.show(output)
            output.known({"device": card["device"], "clock": roofline.latency_mode})
            output.say(f"tuning: {choice.tuning}; {len(own.launches)} launches are not the table's")
            output.say(f"prompts: {own.tiles_text}")
            results = list(_measure(jobs, clock, roofline, output))
    for why in left_out:
        output.say(f"left out: {why}")
    found = {"roofline": roofline.document(), "left_out": left_out, "kernels": results}
    return document("kernels", card, found | {"tuning": choice.tuning})


# ----- what is measured -----


def _refuse_unknown(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UsageError(f"{flag}: no {', '.join(unknown)}", f"there is {', '.join(known)}")


def _is_file(name: str) -> bool:
    return name.endswith(".gguf") or Path(name).is_file()


def models_of(choice: KernelChoice) -> list[KernelShapes]:
    """Look the models up, and read those that are files: these have types of their own."""
    models: list[KernelShapes] = []
    for name in choice.models:
        if _is_file(name):
            with open_model(Path(name)) as file:
                models.append(shapes_of(file))
        else:
            models += MODELS.values() if name == "all" else [(MODELS | {"tiny": TINY})[name]]
    if choice.quick:
        return [each if each is TINY else _shortened(each) for each in models]
    return models


def _shortened(shapes: KernelShapes) -> KernelShapes:
    contexts = tuple(context for context in shapes.contexts if context <= QUICK_CONTEXT)
    return replace(shapes, contexts=contexts, n_vocab=min(shapes.n_vocab, QUICK_VOCABULARY))


def chosen_jobs(
    choice: KernelChoice, models: Sequence[KernelShapes], own: Tuning, info: DeviceInfo
) -> tuple[list[Job], list[str]]:
    """List what is to be measured in a device's `own` tuning, and what is left out and why."""
    largest = choice.largest_bytes(info)
    jobs: list[Job] = []
    left_out: dict[str, dict[str, None]] = {}  # types by what and why, each once
    seen: set[tuple[str, str]] = set()  # models share shapes
    for job in _candidates(choice, models, own, info):
        known = (job.setup.variant.name, job.work.what) in seen
        if known or choice.shape not in job.work.what:
            continue
        seen.add((job.setup.variant.name, job.work.what))
        axis, mib = job.setup.variant.axis, job.work.n_bytes / 2**20
        if job.work.misfit or job.work.n_bytes > largest:
            why = job.work.misfit or f"larger than --largest-mib {largest / 2**20:g}"
            what = f"{job.setup.shapes.name} {job.work.what}: {why}"
            name = axis if job.work.misfit else f"{axis} ({mib:.0f} MiB)".strip()
            left_out.setdefault(what, {})[name] = None
        else:
            jobs.append(job)
    return jobs, [f"{what}: {', '.join(types)}" for what, types in left_out.items()]


def _uncompared(models: Sequence[KernelShapes], info: DeviceInfo) -> Iterator[str]:
    """Name types of files that no case compares: what is not checked is not timed."""
    compared = {variant.axis for variant in variants_of(info)}
    for shapes in models:
        if others := sorted({kind for _, kind in shapes.types} - compared):
            yield f"{shapes.name}: no case compares {', '.join(others)} with NumPy"


def _candidates(
    choice: KernelChoice, models: Sequence[KernelShapes], own: Tuning, info: DeviceInfo
) -> Iterator[Job]:
    """Yield variants that pass the filters in the models' shapes.

    What none of these models has, such as latent attention, is run in the first shape that has it.
    """
    types = [name.upper() for name in choice.types]
    few = choice.quick or any(shapes.types for shapes in models)
    for variant in variants_of(info):
        assert variant.family in FAMILIES, f"{variant.name} is of no family"
        wanted = not choice.families or variant.family in choice.families
        wanted &= not types or variant.axis in types
        wanted &= choice.all_mappings or _selects(own, variant)
        if not wanted:
            continue
        tuning = selecting(variant, own, info)
        others = [[each] for each in MODELS.values()] if not choice.quick else []
        found = (_of_models(variant, tuning, some) for some in (models, *others))
        for job in next(filter(None, found), []):
            if types or _is_usual(job, choice.quick, few):
                yield job


def _is_usual(job: Job, quick: bool, few: bool) -> bool:
    """Say whether a job's type is its file's in this role, or one of those without a file."""
    axis, role, of_file = job.setup.variant.axis, job.work.role, job.setup.shapes.types
    if not role:
        return not few or job.work.is_usual
    return (role, axis) in of_file if of_file else not quick or axis in QUICK_TYPES


def _of_models(variant: Variant, tuning: Tuning, models: Sequence[KernelShapes]) -> list[Job]:
    setups = (Setup(variant, tuning, shapes) for shapes in models)
    return [Job(setup, work) for setup in setups for work in FAMILIES[variant.family].works(setup)]


def _selects(own: Tuning, variant: Variant) -> bool:
    """Say whether a model's program would run the variant in this tuning."""
    chosen_by = FAMILIES[variant.family].chosen_by
    return chosen_by == "nothing" or getattr(own, chosen_by) == variant.suffix


# ----- measuring it -----


def _measure(
    jobs: list[Job], clock: Clock, roofline: Roofline, output: Output
) -> Iterator[dict[str, Any]]:
    """Check, time, write each job. Raises WrongResultError before a wrong one is timed."""
    for line in EXPLANATION:
        output.say(line)
    output.say(f"{'us per dispatch':>34} {'GB/s':>8} {'Gw/s':>8} {'of roof':>8}")
    started = time.monotonic()
    for index, job in enumerate(jobs, start=1):
        seconds = time.monotonic() - started
        output.progress(f"{index}/{len(jobs)}, {seconds:.0f} s: {job.name}")
        with Runner(clock.device) as runner:
            worst = check_or_raise(runner, job.work.check, job.name)
            dispatch = last_dispatch(runner, job.setup.variant.name)
            took, launch = clock.dispatch_us(runner, dispatch), _launch(dispatch)
        n_bytes = job.work.n_bytes
        speed, weights = _rate(n_bytes, took), _rate(job.work.n_weights, took)
        least = max(roofline.least_us(n_bytes), roofline.empty_dispatch.value.median)
        share = least / took.median
        cells = " ".join(f"{rate.median:8.2f}" if rate else f"{'':8}" for rate in (speed, weights))
        output.say(f"{took!s:>34} {cells} {share:8.1%} {job.name}")
        yield {
            "variant": job.setup.variant.name,
            "model": job.setup.shapes.name,
            "shape": job.work.what,
            "bytes_read": n_bytes,
            "us": took,
            "gb_per_s": speed,
            "billion_weights_per_s": weights,
            "share_of_memory": speed.median / roofline.gb_per_s if speed else None,
            "share_of_roofline": share,
            "error": worst.error,
            "error_limit": worst.limit,
            "launch": launch,
        }


def _launch(dispatch: Dispatch) -> dict[str, int]:
    """Name what a dispatch was specialised for, as it was timed."""
    names = KERNELS[dispatch.kernel].constants
    found = dict(zip(names, dispatch.constants, strict=True))
    return found | {"subgroup_size": dispatch.subgroup_size, "groups": prod(dispatch.groups)}


def _rate(amount: int, took: Summary) -> Summary | None:
    """Return billions in a second, such as GB/s; none for next to nothing."""
    if not amount:
        return None
    low, median, high = (amount / us / 1e3 for us in (took.high, took.median, took.low))
    return Summary(median, low, high, took.n)
