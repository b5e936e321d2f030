"""Chooses where experts are computed if the user leaves that open: by a rule, or as was measured.

Owns which modes come into question and what is remembered of a measurement, in a file for each
device. It measures nothing: engines that do are in mode_trial.py. With --tuning table nothing that
was measured counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from vkmoe import __version__
from vkmoe.choices import ModeName
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import cpu_info
from vkmoe.cpu.variants import has_cpu
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.facts import DeviceInfo, MemoryPlan
from vkmoe.models import ModelFile
from vkmoe.ops.tuning import Tuning
from vkmoe.placement import remembered
from vkmoe.placement.plan import Decision, decide

__all__ = [
    "ModeChoice",
    "ModeQuestion",
    "Times",
    "decide_with",
    "known_choice",
    "mode_question",
]

log = logging.getLogger("vkmoe")
LEAST_EXPERTS = 256 << 20  # bytes in a file; with fewer no mode is slow
FEW_SLOTS = 0.5  # of a layer's experts: with fewer the CPU helps (SharpInference, issue 215)
HYSTERESIS = 0.03  # share of the rule's time that another mode must save
_FORMAT, _VERSION, _MOST_ENTRIES = "vkmoe expert modes", 1, 64
# What changes no token's time, or by the slots alone, which count by themselves.
_OTHER_OPTIONS = (
    "device", "validation", "expert_stats", "expert_profile", "ctx_size", "vram_margin",
    "expert_slots", "expert_cache",
)  # fmt: skip

Times = Mapping[ModeName, float]  # milliseconds of a token, of each mode that could be measured


class ModeChoice(NamedTuple):
    """Holds a mode that the user did not ask for, and why it is chosen."""

    mode: ModeName
    reason: str

    def asked(self, config: EngineConfig) -> EngineConfig:
        """Ask for the mode in a config that leaves it open, unless that leads there by itself."""
        return replace(config, expert_mode=self.mode) if self.mode in ("hybrid", "cpu") else config

    def explain(self, decision: Decision) -> Decision:
        """Give the reason in the decision on what `asked` returned, as no option was the reason."""
        made, option = decision.plan, f"as --expert-mode {self.mode}"
        lines = tuple(
            replace(line, reason="by the choice of mode; --expert-mode changes it")
            if line.reason == option
            else line
            for line in made.lines
        )
        mode = replace(made.mode, reason="") if made.mode.reason == option else made.mode
        made = replace(made, mode=mode, lines=lines, mode_reason=self.reason)
        return replace(decision, plan=made)


@dataclass(frozen=True)
class ModeQuestion:
    """Describes what can be chosen for a model on a device, and what the choice depends on."""

    device: DeviceInfo
    slots: Mapping[ModeName, int]  # of the smallest layer, of each mode that can be chosen
    by_rule: ModeChoice
    model: str  # these two tell when a measurement holds no more
    settings: str

    def answer(self, times: Times, what: str) -> ModeChoice:
        """Choose the mode of the rule, unless another is clearly faster; `what` was measured."""
        best, usual = min(times, key=times.__getitem__), self.by_rule.mode
        if usual in times and times[best] > (1 - HYSTERESIS) * times[usual]:
            best = usual
        others = [f"{mode} {time:.3g}" for mode, time in times.items() if mode != best]
        each = ", ".join([f"{best} {times[best]:.3g} ms", *others])
        return ModeChoice(best, f"measured of {what}: {each}")

    # ----- what is remembered -----

    def recall(self) -> ModeChoice | None:
        """Return what was measured before; None where nothing was, or it holds no more."""
        for entry in self._entries():
            if (entry["model"], entry["settings"]) == (self.model, self.settings):
                return self.answer(entry["times"], entry["what"])
        return None

    def remember(self, times: Times, what: str) -> Path:
        """Write what was measured beside what is remembered of other models. Raises OSError."""
        new = {"model": self.model, "settings": self.settings, "what": what, "times": dict(times)}
        same = self.model, self.settings
        kept = [each for each in self._entries() if (each["model"], each["settings"]) != same]
        document = {**_identity(self.device), "modes": [new, *kept][:_MOST_ENTRIES]}
        return remembered.write_remembered(self._path, document)

    @property
    def _path(self) -> Path:
        return remembered.remembered_path(self.device, "modes")

    def _entries(self) -> list[dict[str, Any]]:
        """Read the file of the device; [] where it is not there, damaged, or does not fit."""
        try:
            with self._path.open("rb") as stream:
                document = json.loads(stream.read(remembered.MAX_BYTES + 1))
            expected = _identity(self.device)
            if {name: document[name] for name in expected} != expected:
                return []
            return [_checked(entry) for entry in document["modes"]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []  # it is measured again, and the file is written anew


def known_choice(question: ModeQuestion | None, config: EngineConfig) -> ModeChoice | None:
    """Return what is chosen without measuring now; None where there is no choice."""
    if question is None:
        return None
    if config.tuning == "table":
        return question.by_rule
    mode, reason = question.by_rule
    return question.recall() or ModeChoice(mode, f"{reason}; the first run measures")


def decide_with(
    choice: ModeChoice | None, config: EngineConfig, decided: Callable[[EngineConfig], Decision]
) -> Decision:
    """Return what is `decided` of a config, in the mode of a choice if there was one.

    Where that has no room any more, as if there was none.
    """
    if choice is not None:
        try:
            return choice.explain(decided(choice.asked(config)))
        except OutOfMemoryError as error:
            log.info("mode %s does not fit any more: %s", choice.mode, str(error))
    return decided(config)


def mode_question(
    config: EngineConfig,
    model: ModelFile,
    device: DeviceInfo,
    tuning: Tuning | None = None,
    available_host_bytes: int | None = None,
) -> ModeQuestion | None:
    """Find which modes can be chosen for a model; None where the choice is made, or matters little.

    It is made where an option says so, where the CPU is the device or cannot compute, where a GPU's
    own memory holds all experts, and where host memory holds but some. Raises what `decide` raises.
    """
    n_bytes = sum(part.n_bytes for layer in model.expert_tensors for part in layer)
    open_question = config.mode == "auto" and device.is_vulkan and has_cpu()
    if not open_question or n_bytes < LEAST_EXPERTS:
        return None

    def planned(asked: EngineConfig) -> MemoryPlan:
        return decide(asked, model, device, tuning, available_host_bytes=available_host_bytes).plan

    usual = planned(config)
    if usual.host_slots or (usual.mode.on_device and not device.is_uma):
        return None
    plans = {usual.mode.name: usual, **_others(config, usual, planned)}
    if len(plans) == 1:
        return None
    slots = {mode: min(made.expert_slots, default=0) for mode, made in plans.items()}
    n_experts = model.spec.experts.n_experts if model.spec.experts else 1
    shares = {mode: n / n_experts for mode, n in slots.items()}
    return ModeQuestion(
        device,
        slots,
        _by_rule(shares, device, usual.mode.on_device),
        _fingerprint(model.spec, model.tensors),
        _settings(config, shares),
    )


def _others(
    config: EngineConfig, usual: MemoryPlan, planned: Callable[[EngineConfig], MemoryPlan]
) -> dict[ModeName, MemoryPlan]:
    """Plan the other modes: those that no other option rules out, and that fit."""
    found: dict[ModeName, MemoryPlan] = {}
    modes: tuple[ModeName, ...] = ("cpu",) if usual.mode.on_device else ("hybrid", "cpu")
    for mode in modes:
        with suppress(UsageError, OutOfMemoryError):
            made = planned(replace(config, expert_mode=mode))
            if made.mode.name == mode:  # without slots hybrid is cpu
                found[mode] = made
    return found


def _by_rule(shares: Mapping[ModeName, float], device: DeviceInfo, all_fit: bool) -> ModeChoice:
    """Choose without a measurement, by the share of experts that have a slot in each mode."""
    if all_fit:
        if device.is_cpu and "cpu" in shares:
            return ModeChoice("cpu", "shaders on a CPU are slower than its own kernels")
        return ModeChoice("resident", "all experts fit")
    share = shares["cache"]
    helping: ModeName = "hybrid" if shares.get("hybrid") else "cpu"
    mode = helping if share < FEW_SLOTS and helping in shares else "cache"
    return ModeChoice(mode, f"{share:.0%} of the experts have a slot")


# ----- what a measurement depends on -----


def _identity(device: DeviceInfo) -> dict[str, Any]:
    """Return what a file begins with, all of which must be as it was."""
    cpu = cpu_info()
    found = remembered.identity(device, _FORMAT, _VERSION)
    return found | {"vkmoe": __version__, "cpu": f"{cpu.name}, {cpu.driver}"}


def _settings(config: EngineConfig, shares: Mapping[ModeName, float]) -> str:
    """Write what a user chose, the threads there are, and the shares of experts that have a slot.

    These are rounded: how much memory is free changes a little from start to start.
    """
    chosen = {
        item.name: getattr(config, item.name)
        for item in fields(config)
        if item.name not in _OTHER_OPTIONS and getattr(config, item.name) != item.default
    }
    slots = {mode: round(8 * share) for mode, share in shares.items()}
    return f"{chosen}, {os.cpu_count()} cores, slots {slots} of 8"


def _fingerprint(*described: object) -> str:
    """Hash a description that has a text of its own."""
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _checked(entry: Any) -> dict[str, Any]:
    """Check what a file has on one model. Raises what reading a damaged one raises."""
    times = {mode: float(time) for mode, time in entry["times"].items()}
    sound = times and set(times) <= set(get_args(ModeName))
    if not sound or not all(0 < time < 1e7 for time in times.values()):
        raise ValueError(entry)
    if not all(isinstance(entry[name], str) for name in ("model", "settings", "what")):
        raise ValueError(entry)
    return {**entry, "times": times}
