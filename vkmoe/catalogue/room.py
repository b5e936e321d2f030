"""Says whether a model has room beside others that are loaded, by the plans that it would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vkmoe.config import EngineConfig
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.devices import open_device
from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import DeviceInfo, MemoryPlan
from vkmoe.models import open_model
from vkmoe.placement.decide import Choosing, decide
from vkmoe.placement.forecast.measured import recall_speeds
from vkmoe.placement.remembered import tuning_for

LEAST_SHARE = 0.9  # of the predicted speed without the others, with which a model has room


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
    return rates[0] >= LEAST_SHARE * rates[1]


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
