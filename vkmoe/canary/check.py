"""Decides with which kernels a model runs: those that compute as their twins do.

Owns what is remembered of a device: the pipelines that have passed. One that failed is compared
anew at each load, so that nothing but a right result is ever believed.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vkmoe.canary.programs import Comparison, comparisons
from vkmoe.cpu.variants import has_cpu
from vkmoe.errors import DeviceLostError, GpuError, MiscompiledError, OutOfMemoryError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.backend import N_COMPILERS
from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner
from vkmoe.interrupts import at_checkpoints, result_of
from vkmoe.kernels.tuning import Tuning, plainer
from vkmoe.models import ModelFile
from vkmoe.placement import remembered
from vkmoe.placement.decide import Decision

log = logging.getLogger("vkmoe")
LONG_S = 1.0  # after which the log says what takes so long
MOST_NAMED = 3  # of the kernels that are wrong
MOST_PASSED = 8192  # keys that are remembered, the newest first
_remembering = threading.Lock()  # models may load at the same time

Decide = Callable[[Tuning], Decision]


def passing(device: Device, model: ModelFile, tuning: Tuning, decide: Decide) -> Decision:
    """Return the decision on the nearest tuning whose kernels compute as their twins do.

    To be called before anything is allocated. Devices that run no shaders are taken as they are:
    no driver compiles their kernels. Raises MiscompiledError where no tuning is right, other
    GpuErrors, and what `decide` raises.
    """
    decision = decide(tuning)
    if not device.info.is_vulkan:
        return decision
    with at_checkpoints():
        return _Search(device, model).nearest(decision, decide)


class State(NamedTuple):
    """Counts the kernels that a model uses, and how many have passed on a device."""

    n_kernels: int
    n_passed: int


def state_of(device: DeviceInfo, model: ModelFile, decision: Decision) -> State:
    """Say how much of a model has passed on a device. Compares nothing."""
    keys = [key for each in comparisons(model, decision) for key in each.kernels]
    passed = set(_passed(device))
    return State(len(keys), sum(key in passed for key in keys))


# ----- what is remembered -----


@dataclass(frozen=True)
class _Passed:
    """Is what a file has."""

    kernels: tuple[str, ...]  # keys, the newest first


def _passed(device: DeviceInfo) -> tuple[str, ...]:
    """Return the keys of what has passed on a device; of a file that does not fit, nothing."""
    try:
        return remembered.read(device, "canary", _Passed).kernels
    except (OSError, remembered.Misfit):
        return ()  # all is compared again, and the file is written anew


def _remember(device: DeviceInfo, keys: Sequence[str]) -> None:
    with _remembering:
        kernels = tuple(dict.fromkeys((*keys, *_passed(device))))[:MOST_PASSED]
        try:
            remembered.write(device, "canary", _Passed(kernels))
        except OSError as error:
            log.info("what has passed cannot be remembered: %s", error.strerror)


# ----- what is compared -----


class _Failure(NamedTuple):
    """Names kernels that are wrong, and says where."""

    variants: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        return f"{' or '.join(self.variants)}: {self.where}"


_Failures = dict[frozenset[str], _Failure]


class _Search:
    """Compares the kernels of one tuning after another, each kernel once."""

    def __init__(self, device: Device, model: ModelFile) -> None:
        self._device, self._model = device, model
        self._passed = set(_passed(device.info))
        # By the keys of a comparison: which of its kernels is wrong it cannot tell.
        self._failed: _Failures = {}

    def nearest(self, decision: Decision, decide: Decide) -> Decision:
        """Find a decision whose kernels are right, from one that is best if they are."""
        failures = self._failures(decision)
        first = list(dict.fromkeys(failures.values()))
        # A device of which nothing has ever passed computes nothing: others would take minutes.
        for change in plainer(decision.tuning) if self._passed else ():
            if not failures:
                break
            other = decide(change(decision.tuning))
            if not self._known_failures(other).keys() < failures.keys():
                continue
            left = self._failures(other)
            if len(left) < len(failures):
                decision, failures = other, left
        if failures:
            raise self._refusal(list(dict.fromkeys(failures.values())))
        if first:
            log.warning(
                "%s; plainer kernels are used in their place (update the driver; `vkmoe selftest` "
                "tells more)",
                self._wrong(first),
            )
        return decision

    def _failures(self, decision: Decision) -> _Failures:
        """Compare what has not been compared; returns all that is wrong."""
        wanted = {x.keys: x for x in comparisons(self._model, decision)}
        unknown = [x for keys, x in wanted.items() if not keys <= self._passed]
        unknown = [x for x in unknown if x.keys not in self._failed]
        if unknown:
            self._compare(unknown)
        return {keys: self._failed[keys] for keys in wanted if keys in self._failed}

    def _known_failures(self, decision: Decision) -> _Failures:
        wanted = (x.keys for x in comparisons(self._model, decision))
        return {keys: self._failed[keys] for keys in wanted if keys in self._failed}

    def _compare(self, unknown: Sequence[Comparison]) -> None:
        """Compare kernels, several at a time: drivers take long to compile them."""
        passed = list[str]()
        for compared, failure in _progressing(self._results(unknown), len(unknown)):
            if failure is None:
                passed += compared.kernels
            else:
                self._failed[compared.keys] = failure
        self._passed |= set(passed)
        if passed:
            _remember(self._device.info, sorted(passed))

    def _results(self, unknown: Sequence[Comparison]) -> Iterator[_Result]:
        with ExitStack() as opened:
            turns = itertools.cycle(self._devices(opened, len(unknown)))
            pool = opened.enter_context(_compilers())
            jobs = [pool.submit(self._result, each, next(turns)) for each in unknown]
            for job in jobs:
                yield result_of(job)

    def _devices(self, opened: ExitStack, n_most: int) -> list[Device]:
        """List the devices that kernels are compared on, which are one.

        Drivers of CPUs compile a kernel when it first runs, on the one thread of a queue: there the
        device is opened for each core, and all of them compile.
        """
        found = [self._device]
        n = min(os.cpu_count() or 1, N_COMPILERS, n_most) if self._device.info.is_cpu else 1
        with suppress(GpuError):
            found += [opened.enter_context(self._device.another()) for _ in range(n - 1)]
        return found

    def _result(self, compared: Comparison, device: Device) -> _Result:
        """Compare once. A driver that refuses to compile a kernel, or hangs, is wrong too."""
        try:
            # What a wrong kernel leaves may be anything; the comparison must come to its end.
            with Runner(device, fills=True) as runner, np.errstate(all="ignore"):
                worst, ran = compared.probe.run(runner).worst, runner.variants
        except OutOfMemoryError:
            raise
        except DeviceLostError as error:
            raise self._refusal([_Failure(compared.variants, str(error))]) from error
        except GpuError as error:
            return _Result(compared, _Failure(compared.variants, str(error)))
        if worst.ok:
            return _Result(compared, None)
        variants = tuple(sorted({*compared.variants, *ran}))
        return _Result(compared, _Failure(variants, worst.what + worst.where))

    def _refusal(self, failures: Sequence[_Failure]) -> MiscompiledError:
        others = "another device (--device cpu)" if has_cpu() else "another device (--device)"
        return MiscompiledError(
            f"{self._wrong(failures)}; no plainer kernels are right",
            f"update the driver, or take {others}; `vkmoe selftest` tells more, and --no-canary "
            "runs the model all the same",
        )

    def _wrong(self, failures: Sequence[_Failure]) -> str:
        """Say which kernels the device computes wrongly."""
        info, named = self._device.info, "; ".join(map(str, failures[:MOST_NAMED]))
        more = f"; and {len(failures) - MOST_NAMED} more" if len(failures) > MOST_NAMED else ""
        return f"{info.name} computes wrongly with the driver {info.driver}: {named}{more}"


@contextmanager
def _compilers() -> Iterator[ThreadPoolExecutor]:
    """Make threads; after Ctrl-C or a failure, what has not begun is dropped."""
    pool = ThreadPoolExecutor(N_COMPILERS, "canary")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Result(NamedTuple):
    compared: Comparison
    failure: _Failure | None


def _progressing(results: Iterator[_Result], n_all: int) -> Iterator[_Result]:
    """Yield results; where they take long, say so once."""
    began, is_logged = time.monotonic(), False
    for n_done, result in enumerate(results, start=1):
        yield result
        if not is_logged and time.monotonic() - began > LONG_S and n_done < n_all:
            is_logged = True
            log.info(
                "comparing the model's kernels with NumPy, once for each driver: %d of %d done",
                n_done,
                n_all,
            )
