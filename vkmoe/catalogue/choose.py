"""Chooses the quant of a model that suits this machine, by the plans that runs would have."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from vkmoe.catalogue.caches import KeptModel
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices
from vkmoe.errors import VkmoeError
from vkmoe.models import open_model
from vkmoe.placement.decide import Choosing, decide
from vkmoe.placement.forecast.measured import recall_speeds
from vkmoe.placement.remembered import tuning_for

log = logging.getLogger("vkmoe")


class _Rated(NamedTuple):
    """Says of a model whether its plan reads the file while replying, and how fast it replies."""

    model: KeptModel
    reads_file: bool
    rate: float  # tokens per second, as predicted


def best_quant(models: Sequence[KeptModel], config: EngineConfig) -> KeptModel:
    """Return the largest that replies without reading its file; if all read it, the fastest.

    Those that vkmoe cannot run are left out; raises what the first raises where it runs none.
    """
    rated, errors = list[_Rated](), list[VkmoeError]()
    for model in models:
        try:
            rated.append(_rated(model, config))
        except VkmoeError as error:
            errors.append(error)
    if not rated:
        raise errors[0]
    whole = [each for each in rated if not each.reads_file]
    if whole:
        best = max(whole, key=lambda each: each.model.n_bytes)
    else:
        best = max(rated, key=lambda each: each.rate)
    others = ", ".join(sorted(each.model.quant for each in rated if each is not best))
    log.info("%s:%s was chosen for this machine; %s too", best.model.name, best.model.quant, others)
    return best.model


def _rated(model: KeptModel, config: EngineConfig) -> _Rated:
    info = choose_device(list_devices(), config.device)
    known = recall_speeds(info, model.path, config.tuning)
    choosing = Choosing(lambda: known.speeds, known=True, corrections=known.corrections)
    with ExitStack() as opened:
        file = opened.enter_context(open_model(model.path))
        tuning = tuning_for(info, config.tuning)
        prediction = decide(config, file, info, tuning, choosing).candidates[0].prediction
    return _Rated(model, prediction.file_share > 0, prediction.rate)
