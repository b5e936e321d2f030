"""Says by plans which quant of a model suits this machine, and what has room beside others.

A plan is the one that a run would have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from vkmoe.catalogue.caches import KeptModel
from vkmoe.choices import ModeName
from vkmoe.config import EngineConfig
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.devices import open_device
from vkmoe.errors import (
    GpuError,
    ModelFileError,
    OutOfMemoryError,
    UnsupportedModelError,
    VkmoeError,
)
from vkmoe.facts import DeviceInfo, MemoryPlan
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import Choosing, decide
from vkmoe.placement.forecast.measured import measure_speeds, recall_speeds
from vkmoe.placement.remembered import tuning_for

if TYPE_CHECKING:
    from vkmoe.catalogue.offers import Offer

log = logging.getLogger("vkmoe")
_UNQUANTISED = {"F32", "F16", "FP16", "BF16"}
_MOST_ERRORS = 5  # of quants of one model: what ails these mostly ails all
_LEAST_SHARE = 0.9  # of the predicted speed without the others, with which a model has room
Quant = TypeVar("Quant", KeptModel, "Offer")


class Rated(NamedTuple):
    """Says what a run of a model would be like on this machine, by its plan."""

    mode: ModeName
    reads_file: bool  # while replying
    rate: float  # tokens per second, as predicted


def best_quant(models: Sequence[KeptModel], config: EngineConfig) -> KeptModel:
    """Return the largest that replies without reading its file; if all read it, the fastest.

    Those that vkmoe cannot run are left out; raises what one of them raises where it runs none.
    """
    return _best(models, _planner(config, models[0].path), lambda model: model.path, models)


def best_offer(
    offers: Sequence[Offer], config: EngineConfig, disk: Path, header_of: Callable[[Offer], Path]
) -> Offer:
    """Return the offer that `best_quant` would take if all were on a `disk`, a folder's.

    `header_of` loads what can be opened as the model. F32, F16 and BF16 are left out where there
    are others, as Q8_0 is as good and half as large. Raises as `best_quant` and `header_of` do.
    """
    log.info("one of %d quants is chosen for this machine", len(offers))
    quantised = [each for each in offers if each.quant not in _UNQUANTISED] or offers
    return _best(quantised, _planner(config, disk), header_of, offers)


def _best(
    models: Sequence[Quant],
    rate: Callable[[ModelFile], Rated],
    file_of: Callable[[Quant], Path],
    there: Sequence[Quant],
) -> Quant:
    """Return the largest that is whole in memory, or else the fastest of those looked at.

    Few files are opened: each one halves the sizes that are in question. `there` is what the log
    says they were chosen of.
    """
    left = sorted(models, key=lambda each: each.n_bytes)
    whole: Quant | None = None
    rates: dict[Quant, float] = {}
    errors: list[VkmoeError] = []
    while left and len(errors) < _MOST_ERRORS:
        middle = len(left) // 2
        model = left[middle]
        try:
            with open_model(file_of(model)) as file:
                plan = rate(file)
        except (ModelFileError, UnsupportedModelError) as error:
            errors.append(error)
            del left[middle]
        except GpuError as error:  # too large for any plan
            errors.append(error)
            left = left[:middle]
        else:
            rates[model] = plan.rate
            whole = whole if plan.reads_file else model
            left = left[:middle] if plan.reads_file else left[middle + 1 :]
    if not rates:
        raise errors[0]
    best = whole or max(rates, key=lambda each: rates[each])
    quants = ", ".join(each.quant for each in there)
    log.info("%s was chosen for this machine, of %s", best.full_name, quants)
    return best


def rated(models: Sequence[KeptModel], config: EngineConfig) -> Iterator[Rated | VkmoeError]:
    """Plan each model on this machine; yields an error for one that cannot be run.

    Memory is measured first, and the disk of the first model, which takes a second or two.
    Raises VkmoeError where there is no device.
    """
    if not models:
        return
    rate = _planner(config, models[0].path)
    for model in models:
        try:
            with open_model(model.path) as file:
                yield rate(file)
        except VkmoeError as error:
            yield error


def _planner(config: EngineConfig, disk: Path) -> Callable[[ModelFile], Rated]:
    """Measure the machine, and a disk by a file on it; return what plans a model."""
    with open_device(config.device, config.validation, config.threads) as device:
        info, speeds = device.info, measure_speeds(device, disk, config.threads)
    corrections = recall_speeds(info, source=config.tuning).corrections
    choosing = Choosing(lambda: speeds, known=True, corrections=corrections)
    tuning = tuning_for(info, config.tuning)

    def plan(file: ModelFile) -> Rated:
        best = decide(config, file, info, tuning, choosing).candidates[0]
        prediction = best.prediction
        return Rated(best.plan.mode.name, prediction.file_share > 0, prediction.rate)

    return plan


# ----- several models at once -----


def has_room(path: Path, config: EngineConfig, loaded: Sequence[MemoryPlan]) -> bool:
    """Say whether a model can be loaded beside others, and is predicted to be nearly as fast so.

    `loaded` are the plans of the others, on the same device. Raises VkmoeError for a model that
    could not run without them either.
    """
    with open_device(config.device, config.validation, config.threads) as device:
        info = device.info
    known, tuning = recall_speeds(info, path, config.tuning), tuning_for(info, config.tuning)
    choosing = Choosing(lambda: known.speeds, known=True, corrections=known.corrections)
    on_device = sum(plan.total("device") for plan in loaded)
    in_host = sum(plan.total("host") for plan in loaded) + (on_device if info.is_uma else 0)
    with_them, without = _heaps(info, on_device)
    free = available_bytes()
    with open_model(path) as file:
        alone = decide(config, file, without, tuning, choosing, False, free + in_host)
        try:
            beside = decide(config, file, with_them, tuning, choosing, False, free)
        except OutOfMemoryError:
            return False
    rates = [decision.candidates[0].prediction.rate for decision in (beside, alone)]
    return rates[0] >= _LEAST_SHARE * rates[1]


def _heaps(info: DeviceInfo, n_bytes: int) -> tuple[DeviceInfo, DeviceInfo]:
    """Return a device as it is while `n_bytes` of it are taken, and as it is without these.

    A driver that reports a budget has left out what is taken; others have not.
    """
    with_them, without = [], []
    for heap in info.heaps:
        if not heap.device_local:
            with_them.append(heap)
            without.append(heap)
        elif heap.budget:
            with_them.append(heap)
            without.append(replace(heap, usage=max(0, (heap.usage or 0) - n_bytes)))
        else:
            with_them.append(replace(heap, size=max(0, heap.size - n_bytes)))
            without.append(heap)
    return replace(info, heaps=tuple(with_them)), replace(info, heaps=tuple(without))
