"""Chooses where experts are computed if the user leaves that open: by prediction, or as measured.

Owns which modes come into question, when a trial is worth its time, and what its result depends on.
It measures nothing: engines that do are in mode_trial.py. With --tuning table nothing that was
measured counts.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from vkmoe.choices import ModeName, TuningSource
from vkmoe.config import EngineConfig
from vkmoe.cpu.variants import has_cpu
from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import DeviceInfo
from vkmoe.kernels.tuning import Tuning
from vkmoe.models import ModelFile
from vkmoe.placement.decide import Candidate, Choosing, Decision, decide
from vkmoe.placement.forecast.measured import recall_speeds, remember_trial

log = logging.getLogger("vkmoe")
LEAST_EXPERTS = 256 << 20  # bytes in a file; with fewer no mode is slow
MODEL_ERROR = 0.3  # of a predicted time: plans that are nearer to each other are measured
# What changes no token's time, or by the slots alone, which count by themselves.
_OTHER_OPTIONS = (
    "device", "validation", "canary", "expert_stats", "expert_profile", "ctx_size", "vram_margin",
    "expert_slots", "expert_cache", "cache_ram",
)  # fmt: skip

Ratios = Mapping[ModeName, float]  # measured over predicted times of a token, of each mode


class ModeChoice(NamedTuple):
    """Holds a mode that the user did not ask for, and why it is chosen."""

    mode: ModeName
    reason: str
    cpu_layers: int | None = None  # whose experts the CPU computes, if not those of all

    def asked(self, config: EngineConfig) -> EngineConfig:
        """Ask for the mode in a config that leaves it open, unless that leads there by itself."""
        if self.cpu_layers is not None:
            return replace(config, n_cpu_moe=self.cpu_layers)
        return replace(config, expert_mode=self.mode) if self.mode in ("hybrid", "cpu") else config

    def explain(self, decision: Decision) -> Decision:
        """Give the reason in the decision on what `asked` returned, as no option was the reason."""
        made = decision.plan
        options = (f"as --expert-mode {self.mode}", f"as --n-cpu-moe {self.cpu_layers}")
        chosen = "by the choice of mode; --expert-mode changes it"
        lines = tuple(
            replace(line, reason=chosen) if line.reason in options else line for line in made.lines
        )
        mode = replace(made.mode, reason="") if made.mode.reason in options else made.mode
        made = replace(made, mode=mode, lines=lines, mode_reason=self.reason)
        return replace(decision, plan=made)


@dataclass(frozen=True)
class ModeQuestion:
    """Describes what can be chosen for a model on a device, and what the choice depends on."""

    device: DeviceInfo
    decided: Decision  # between all plans
    candidates: Mapping[ModeName, Candidate]  # the best plan of each mode, the fastest first
    key: str  # of another one a measurement holds no more

    @property
    def predicted(self) -> ModeChoice:
        """Return the mode that is predicted to be fastest."""
        rates = (f"{mode} {x.prediction.rate:.3g}" for mode, x in self.candidates.items())
        return self._choice(next(iter(self.candidates)), f"predicted: {', '.join(rates)} tok/s")

    @property
    def close(self) -> dict[ModeName, Candidate]:
        """Return what a trial decides between: plans no further from the best than predictions err.

        {} where there is one, or where one reads the file: the first layers would not show that.
        """
        least = next(iter(self.candidates.values())).prediction.seconds
        most = least * (1 + MODEL_ERROR)
        found = {m: x for m, x in self.candidates.items() if x.prediction.seconds <= most}
        reads = any(each.prediction.file_share for each in found.values())
        return {} if reads or len(found) == 1 else found

    def settled(self, source: TuningSource) -> ModeChoice | None:
        """Return what is chosen without a trial; None where one is to decide."""
        if source == "table":
            return self.predicted
        return self.recall() or (None if self.close else self.predicted)

    def answer(self, ratios: Ratios, what: str) -> ModeChoice:
        """Choose the mode that is fastest as predictions are corrected; `what` was measured."""
        found = {}
        for mode, ratio in ratios.items():
            made = self.candidates[mode].prediction
            rate = made.rate * self.decided.machine.correction(mode) / ratio
            found[mode] = replace(made, rate=rate)
        in_order = sorted(found, key=lambda mode: found[mode].seconds)
        rates = ", ".join(f"{mode} {found[mode].rate:.3g}" for mode in in_order)
        return self._choice(in_order[0], f"measured of {what}: {rates} tok/s")

    def recall(self) -> ModeChoice | None:
        """Return what was chosen by a trial before; None where none was, or it holds no more."""
        found = recall_speeds(self.device).choices.get(self.key)
        return self._choice(*found) if found and found[0] in self.candidates else None

    def remember(self, choice: ModeChoice, ratios: Ratios) -> None:
        """Remember what a trial chose, and by how much predictions of each mode erred."""
        remember_trial(self.device, ratios, self.key, choice.mode, choice.reason)

    def _choice(self, mode: ModeName, reason: str) -> ModeChoice:
        plan = self.candidates[mode].plan
        return ModeChoice(mode, reason, plan.cpu_layers if plan.splits_layers else None)


def known_choice(question: ModeQuestion | None, config: EngineConfig) -> ModeChoice | None:
    """Return what is chosen without measuring now; None where there is no choice."""
    if question is None:
        return None
    predicted = question.predicted
    later = predicted._replace(reason=f"{predicted.reason}; the first run measures")
    return question.settled(config.tuning) or later


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
    choosing: Choosing | None = None,
    available_host_bytes: int | None = None,
) -> ModeQuestion | None:
    """Find which modes can be chosen for a model; None where the choice is made, or matters little.

    It is made where an option says so, where the CPU is the device or cannot compute, and where a
    GPU's own memory holds all experts. Raises what `decide` raises.
    """
    n_bytes = sum(part.n_bytes for layer in model.expert_tensors for part in layer)
    open_question = config.mode == "auto" and config.cpu_moe is None and device.is_vulkan
    if not open_question or not has_cpu() or n_bytes < LEAST_EXPERTS:
        return None
    asked = replace(choosing or Choosing(), beside_cpu=True)
    free = available_host_bytes
    decided = decide(config, model, device, tuning, asked, available_host_bytes=free)
    best: dict[ModeName, Candidate] = {}
    for candidate in decided.candidates:
        best.setdefault(candidate.plan.mode.name, candidate)
    if len(best) == 1 or (next(iter(best)) == "resident" and not device.is_uma):
        return None
    return ModeQuestion(device, decided, best, _key(config, model, best))


def _key(config: EngineConfig, model: ModelFile, best: Mapping[ModeName, Candidate]) -> str:
    """Hash what a measurement depends on: the model, the threads there are, what a user chose, and
    the shares of experts that have a slot.

    These are rounded: how much memory is free changes a little from start to start.
    """
    chosen = {
        item.name: getattr(config, item.name)
        for item in fields(config)
        if item.name not in _OTHER_OPTIONS and getattr(config, item.name) != item.default
    }
    n_experts = model.spec.experts.n_experts if model.spec.experts else 1
    slots = {
        mode: round(8 * min(x.plan.expert_slots, default=0) / n_experts)
        for mode, x in sorted(best.items())
    }
    described = repr((model.spec, model.tensors, chosen, os.cpu_count(), slots))
    return hashlib.sha256(described.encode()).hexdigest()[:16]
