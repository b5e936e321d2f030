"""Every kernel variant in the shapes of real models: checked against its twin, then timed.

python -m bench.kernels                                  the device's own mapping, one model and
                                                         what only others have
python -m bench.kernels --mapping all --model all        every variant that runs here, all models
python -m bench.kernels --family matvec --type Q4_K,MXFP4
python -m bench.kernels --quick                          tiny shapes: only whether it runs

A result that is not its twin's ends the run before anything of it is timed. GB/s are of bytes that
a dispatch must read; the share is of the bandwidth of a copy within device memory, bytes read plus
bytes written, measured in the same run. Caches are flushed before each repeat.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.environment import describe, print_card
from bench.measure import MIN_REPEATS, Summary, command_line, finish, run_main
from bench.parts.kernel_shapes import MODELS, TINY, ModelShapes
from bench.parts.kernel_times import Clock, Floor, check_or_raise
from bench.parts.kernel_work import Setting, Work, tuning_for
from bench.parts.kernel_works import WORKS
from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.selftest.families import FAMILIES
from vkmoe.selftest.suite import Variant, compiled_variants, runnable

DEFAULT_MODEL = "qwen3-30b-a3b"
LARGEST_MIB_CPU = 256.0  # larger matrices take many seconds on a CPU device
COPY_MIB, COPY_MIB_GPU, COPY_MIB_QUICK = 64, 512, 4
FLUSH_MIB, FLUSH_MIB_GPU, FLUSH_MIB_QUICK = 32, 256, 1


class Job(NamedTuple):
    """One dispatch of one variant with one model's shape."""

    setting: Setting
    work: Work

    @property
    def name(self) -> str:
        return f"{self.setting.variant.name}, {self.setting.shapes.name} {self.work.what}"


def main() -> None:
    """Measure the floor, print the roofline, then check and time job after job."""
    options = _options()
    with Device(options.device) as device:
        card = describe(device.info)
        print_card(card)
        jobs, left_out = _jobs(options, device.info)
        if not jobs:
            raise UsageError("no kernel passes these filters", "; ".join(left_out))
        flush, copy = _memory(options.quick, device.info)
        with Clock(device, options.repeats, flush) as clock:
            floor = clock.floor(copy)
            print(f"latency mode: {clock.explanation}")
            print(f"copy within device memory: {floor.copy_gb_per_s} GB/s read plus written")
            print(f"empty dispatch: {floor.empty_dispatch_us} us (finish: one workgroup)\n")
            _print_roofline(jobs, floor)
            results = list(_measure(jobs, clock, floor, device))
    for why in left_out:
        print(f"left out: {why}")
    found = {
        **floor._asdict(),
        "latency_mode": clock.mode,
        "left_out": left_out,
        "kernels": results,
    }
    print()
    finish("kernels", card, found, options.record)


def _options() -> argparse.Namespace:
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS)
    parser.add_argument("--family", type=_words, default="", help=f"of {', '.join(sorted(WORKS))}")
    parser.add_argument("--type", type=_words, default="", help="weight or cache types")
    parser.add_argument(
        "--model",
        type=_words,
        default=DEFAULT_MODEL,
        help=f"of {', '.join(MODELS)}, or all (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--mapping",
        choices=("own", "all"),
        default="own",
        help="variants of the lane mapping this device uses, or of all that it can run\n"
        "(default: own)",
    )
    parser.add_argument("--shape", default="", help="only shapes whose text has this in it")
    parser.add_argument(
        "--largest-mib",
        type=float,
        help=f"leave out larger matrices (default: {LARGEST_MIB_CPU:g} on a CPU device, else none)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does it run?")
    options = parser.parse_args()
    _refuse_unknown(parser, "--family", options.family, list(WORKS))
    types = sorted({variant.axis for variant in compiled_variants() if variant.axis})
    _refuse_unknown(parser, "--type", [name.upper() for name in options.type], types)
    _refuse_unknown(parser, "--model", options.model, [*MODELS, "all"])
    return options


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _refuse_unknown(
    parser: argparse.ArgumentParser, flag: str, given: list[str], known: list[str]
) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        parser.error(f"{flag}: no {', '.join(unknown)}; there is {', '.join(known)}")


def _memory(quick: bool, info: DeviceInfo) -> tuple[int, int]:
    """MiB that are filled before each repeat, and that are copied for the bandwidth."""
    if quick:
        return FLUSH_MIB_QUICK, COPY_MIB_QUICK
    return (FLUSH_MIB, COPY_MIB) if info.is_cpu else (FLUSH_MIB_GPU, COPY_MIB_GPU)


def _jobs(options: argparse.Namespace, info: DeviceInfo) -> tuple[list[Job], list[str]]:
    """What is to be measured, and what is left out and why."""
    largest = options.largest_mib or (LARGEST_MIB_CPU if info.is_cpu else float("inf"))
    jobs: list[Job] = []
    left_out: dict[str, dict[str, None]] = {}  # types by what and why, each once
    seen: set[tuple[str, str]] = set()  # models share shapes
    for job in _candidates(options, info):
        known = (job.setting.variant.name, job.work.what) in seen
        if known or options.shape not in job.work.what:
            continue
        seen.add((job.setting.variant.name, job.work.what))
        axis, mib = job.setting.variant.axis, job.work.n_bytes / 2**20
        if job.work.misfit or mib > largest:
            why = job.work.misfit or f"larger than --largest-mib {largest:g}"
            what = f"{job.setting.shapes.name} {job.work.what}: {why}"
            name = axis if job.work.misfit else f"{axis} ({mib:.0f} MiB)"
            left_out.setdefault(what, {})[name] = None
        else:
            jobs.append(job)
    return jobs, [f"{what}: {', '.join(types)}" for what, types in left_out.items()]


def _candidates(options: argparse.Namespace, info: DeviceInfo) -> Iterator[Job]:
    """Variants that pass the filters in the models' shapes, or in those of the first that has it:
    latent attention is in few."""
    names = list(MODELS) if "all" in options.model else options.model
    models = [TINY] if options.quick else [MODELS[name] for name in names]
    types = [name.upper() for name in options.type]
    for variant in compiled_variants():
        assert variant.family in WORKS, f"{variant.name} has no shapes in bench/parts"
        wanted = not options.family or variant.family in options.family
        wanted &= not types or variant.axis in types
        wanted &= options.mapping == "all" or _own(variant, info)
        if not wanted or not runnable(variant, info):
            continue
        tuning = tuning_for(variant, info)
        others = (_of_models(variant, tuning, [one]) for one in MODELS.values())
        yield from _of_models(variant, tuning, models) or next(filter(None, others), [])


def _of_models(variant: Variant, tuning: Tuning, models: Sequence[ModelShapes]) -> list[Job]:
    settings = (Setting(variant, tuning, shapes) for shapes in models)
    return [Job(setting, work) for setting in settings for work in WORKS[variant.family](setting)]


def _own(variant: Variant, info: DeviceInfo) -> bool:
    """Whether it is what a model's program would run on this device."""
    chosen_by = FAMILIES[variant.family].chosen_by
    own = choose_tuning(info)
    return chosen_by == "nothing" or getattr(own, chosen_by) == variant.suffix


def _print_roofline(jobs: list[Job], floor: Floor) -> None:
    """The least time each dispatch could take, before any is run."""
    types = sorted({job.setting.variant.axis for job in jobs if job.work.n_bytes})
    rows: dict[str, dict[str, int]] = {}
    for job in jobs:
        if job.work.n_bytes:
            row = rows.setdefault(f"{job.setting.shapes.name} {job.work.what}", {})
            row[job.setting.variant.axis] = job.work.n_bytes
    print("roofline: microseconds that reading the bytes takes at that bandwidth")
    print(f"{'':58}" + "".join(f"{name or 'no type':>10}" for name in types))
    for what, row in rows.items():
        cells = (_short(_bound_us(row[name], floor)) if name in row else "" for name in types)
        print(f"{what:58}" + "".join(f"{cell:>10}" for cell in cells))
    print(flush=True)


def _bound_us(n_bytes: int, floor: Floor) -> float:
    return n_bytes / floor.copy_gb_per_s.median / 1e3


def _measure(
    jobs: list[Job], clock: Clock, floor: Floor, device: Device
) -> Iterator[dict[str, Any]]:
    """Check, time, print each job. Raises WrongKernelError before a wrong one is timed."""
    print(f"{'us per dispatch':>34} {'GB/s':>8} {'of copy':>8}")
    started = time.monotonic()
    for index, job in enumerate(jobs, start=1):
        seconds = time.monotonic() - started
        print(f"{index}/{len(jobs)}, {seconds:.0f} s: {job.name}", file=sys.stderr, flush=True)
        with Runner(device) as runner:
            worst = check_or_raise(runner, job.work.check, job.name)
            took = clock.dispatch_us(runner, job.setting.variant.name)
        speed = _speed(job.work.n_bytes, took)
        share = speed.median / floor.copy_gb_per_s.median if speed else None
        cells = f"{speed.median:8.2f} {share:8.1%}" if speed else f"{'':17}"
        us = f"{_short(took.median)} [{_short(took.low)} .. {_short(took.high)}]"
        print(f"{us:>34} {cells} {job.name}", flush=True)
        yield {
            "variant": job.setting.variant.name,
            "model": job.setting.shapes.name,
            "shape": job.work.what,
            "bytes_read": job.work.n_bytes,
            "us": took,
            "gb_per_s": speed,
            "share_of_copy": share,
            "error": worst.error,
            "error_limit": worst.limit,
            "tuning": str(job.setting.tuning),
        }


def _short(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}"


def _speed(n_bytes: int, took: Summary) -> Summary | None:
    """GB/s; none for what reads next to nothing."""
    if not n_bytes:
        return None
    low, median, high = (n_bytes / us / 1e3 for us in (took.high, took.median, took.low))
    return Summary(median, low, high, took.n)


if __name__ == "__main__":
    run_main(main)
