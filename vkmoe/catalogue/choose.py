"""Chooses the quant of a model that suits this machine, by the plans that runs would have."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vkmoe.catalogue.caches import KeptModel
from vkmoe.choices import ModeName
from vkmoe.config import EngineConfig
from vkmoe.devices import open_device
from vkmoe.errors import VkmoeError
from vkmoe.models import open_model
from vkmoe.placement.decide import Choosing, decide
from vkmoe.placement.forecast.measured import measure_speeds, recall_speeds
from vkmoe.placement.remembered import tuning_for

log = logging.getLogger("vkmoe")


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
    log.info("%s:%s was chosen for this machine; %s too", best.model.name, best.model.quant, others)
    return best.model


def rated(models: Sequence[KeptModel], config: EngineConfig) -> Iterator[Rated | VkmoeError]:
    """Plan each model on this machine; yields an error for one that cannot be run.

    Memory is measured first, and the disk of the first model, which takes a second or two.
    Raises VkmoeError where there is no device.
    """
    if not models:
        return
    with open_device(config.device, config.validation, config.threads) as device:
        info, speeds = device.info, measure_speeds(device, models[0].path, config.threads)
    corrections = recall_speeds(info, source=config.tuning).corrections
    choosing = Choosing(lambda: speeds, known=True, corrections=corrections)
    tuning = tuning_for(info, config.tuning)
    for model in models:
        try:
            with open_model(model.path) as file:
                best = decide(config, file, info, tuning, choosing).candidates[0]
        except VkmoeError as error:
            yield error
        else:
            prediction = best.prediction
            reads_file = prediction.file_share > 0
            yield Rated(model, best.plan.mode.name, reads_file, prediction.rate)
