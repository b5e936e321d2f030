"""Chooses the quant of a model that suits this machine, by the plans that runs would have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vkmoe.catalogue.caches import KeptModel
from vkmoe.choices import ModeName
from vkmoe.config import EngineConfig
from vkmoe.devices import open_device
from vkmoe.errors import GpuError, ModelFileError, UnsupportedModelError, VkmoeError
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import Choosing, decide
from vkmoe.placement.forecast.measured import measure_speeds, recall_speeds
from vkmoe.placement.remembered import tuning_for

if TYPE_CHECKING:
    from vkmoe.catalogue.offers import Offer

log = logging.getLogger("vkmoe")
_UNQUANTISED = {"F32", "F16", "BF16"}
_MOST_ERRORS = 5  # of offers of one model: what ails these mostly ails all


class Rated(NamedTuple):
    """Says what a run of a model would be like on this machine, by its plan."""

    model: KeptModel
    mode: ModeName
    reads_file: bool  # while replying
    rate: float  # tokens per second, as predicted


def best_quant(models: Sequence[KeptModel], config: EngineConfig) -> KeptModel:
    """Return the largest that replies without reading its file; if all read it, the fastest.

    Those that vkmoe cannot run are left out; raises what the first raises where it runs none.
    """
    plans = list(rated(models, config))
    found = [each for each in plans if isinstance(each, Rated)]
    if not found:
        raise next(each for each in plans if isinstance(each, VkmoeError))
    whole = [each for each in found if not each.reads_file]
    if whole:
        best = max(whole, key=lambda each: each.model.n_bytes)
    else:
        best = max(found, key=lambda each: each.rate)
    others = ", ".join(sorted(each.model.quant for each in found if each is not best))
    log.info("%s was chosen for this machine; %s too", best.model.full_name, others)
    return best.model


def best_offer(
    offers: Sequence[Offer], config: EngineConfig, disk: Path, header_of: Callable[[Offer], Path]
) -> Offer:
    """Return the offer that `best_quant` would take if all were on a `disk`, a folder's.

    `header_of` loads what can be opened as the model. F32, F16 and BF16 are left out where there
    are others, as Q8_0 is as good and half as large. Raises as `best_quant` and `header_of` do.
    """
    log.info("one of %d quants is chosen for this machine", len(offers))
    quantised = [each for each in offers if each.quant not in _UNQUANTISED] or offers
    best = _largest_or_fastest(quantised, _planner(config, disk), header_of)
    quants = ", ".join(each.quant for each in offers)
    log.info("%s was chosen for this machine, of %s", best.full_name, quants)
    return best


def _largest_or_fastest(
    offers: Sequence[Offer], rate: Callable[[ModelFile], _Plan], header_of: Callable[[Offer], Path]
) -> Offer:
    """Return the largest that is whole in memory, or else the fastest of those looked at.

    Few headers are loaded: each one halves the sizes that are in question.
    """
    left = sorted(offers, key=lambda each: each.n_bytes)
    whole: Offer | None = None
    rates: dict[Offer, float] = {}
    errors: list[VkmoeError] = []
    while left and len(errors) < _MOST_ERRORS:
        middle = len(left) // 2
        offer = left[middle]
        try:
            with open_model(header_of(offer)) as file:
                plan = rate(file)
        except (ModelFileError, UnsupportedModelError) as error:
            errors.append(error)
            del left[middle]
        except GpuError as error:  # too large for any plan
            errors.append(error)
            left = left[:middle]
        else:
            rates[offer] = plan.rate
            whole = whole if plan.reads_file else offer
            left = left[:middle] if plan.reads_file else left[middle + 1 :]
    if not rates:
        raise errors[0]
    return whole or max(rates, key=lambda each: rates[each])


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
                plan = rate(file)
        except VkmoeError as error:
            yield error
        else:
            yield Rated(model, *plan)


class _Plan(NamedTuple):
    mode: ModeName
    reads_file: bool
    rate: float


def _planner(config: EngineConfig, disk: Path) -> Callable[[ModelFile], _Plan]:
    """Measure the machine, and a disk by a file on it; return what plans a model."""
    with open_device(config.device, config.validation, config.threads) as device:
        info, speeds = device.info, measure_speeds(device, disk, config.threads)
    corrections = recall_speeds(info, source=config.tuning).corrections
    choosing = Choosing(lambda: speeds, known=True, corrections=corrections)
    tuning = tuning_for(info, config.tuning)

    def plan(file: ModelFile) -> _Plan:
        best = decide(config, file, info, tuning, choosing).candidates[0]
        prediction = best.prediction
        return _Plan(best.plan.mode.name, prediction.file_share > 0, prediction.rate)

    return plan
