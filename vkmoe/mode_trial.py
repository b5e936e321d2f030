"""Measures where experts are computed best, where predictions do not tell, and remembers it.

Each mode in question decodes the same text with the first layers of the model, all modes in turns;
the first tokens are not measured, so that caches hold what they come to hold. Measured is from when
the device begins a token to when it ends: submitting and waiting take as long for so few layers as
for all, and on a fast GPU longer than the layers. What is asked and what is remembered are the
subject of placement/mode_choice.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from vkmoe.choices import ModeName
from vkmoe.closing import Closing
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices, open_device
from vkmoe.engine import Engine
from vkmoe.errors import GpuError, VkmoeError
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import Choosing
from vkmoe.placement.forecast.measured import measure_speeds, recall_speeds
from vkmoe.placement.forecast.speeds import Speeds
from vkmoe.placement.mode_choice import ModeChoice, ModeQuestion, mode_question
from vkmoe.placement.remembered import tuning_for
from vkmoe.weights.placer import Progress

log = logging.getLogger("vkmoe")
N_LAYERS = 2  # with experts, that are measured
N_TOKENS = 4  # of a round
# Rounds of each mode, at least and at most: no more begin after so many seconds.
WARM_ROUNDS, WARM_SECONDS = (2, 24), 2.0
ROUNDS, SECONDS = (5, 24), 2.0
MOST_RATIO = 8.0  # of measured and predicted times; what is further off, nothing here explains
N_CONTEXT = N_TOKENS * (WARM_ROUNDS[1] + ROUNDS[1])

# What the measured modes read: any text that a model knows the words of.
TEXT = """
A library in the old harbour district kept its catalogue on paper until last winter. The new keeper,
an engineer by training, wrote a small program to copy it into a database, one drawer after another.
Each card has an author, a title, a year and a shelf; many have notes in the margin, and some of
them contradict each other. She decided to keep every note as it was, and to let readers judge.

def parse_card(line: str) -> dict[str, str]:
    fields = [field.strip() for field in line.split(";")]
    if len(fields) != 4:
        raise ValueError(f"a card has four fields, this one has {len(fields)}")
    return dict(zip(("author", "title", "year", "shelf"), fields))

By spring, 41,250 cards had been read, and 312 of them could not be understood by the program. Those
she typed herself, in the evenings, with a cup of tea. "The machine is quick," she used to say, "but
it has never been cold in a reading room." In May the first visitors looked up a book from home; the
shelf it stood on was 7 metres long, and the book was there, between two others that had been asked
for last in 1968. What is a catalogue for, if not to find what one did not know was missing?
"""


def choose_mode(
    model: ModelFile,
    config: EngineConfig,
    encode: Callable[[str], list[int]],
    progress: Progress | None = None,
) -> ModeChoice | None:
    """Choose where experts are computed; None where options or the plan leave no choice.

    The mode that is predicted to be fastest is taken, unless another is so near that predictions
    may err about it: these are measured, which takes some seconds, and remembered if none failed. A
    measurement that fails leaves the choice to the prediction. `encode` turns a text into the
    model's tokens, `progress` is called as by the engine while a mode loads its layers. Raises what
    making a plan raises.
    """
    if config.mode != "auto" or model.spec.experts is None:
        return None
    device = choose_device(list_devices(), config.device)
    question = _question(model, config, device)
    if question is None:
        return None
    if (settled := question.settled(config.tuning)) is not None:
        return settled
    log.info("measuring where experts are computed best: some seconds, once for this model here")
    try:
        found = measure_modes(model, config, question, encode(TEXT) or [0], progress)
    except (VkmoeError, OSError, MemoryError) as error:
        log.warning("where experts are computed best cannot be measured: %s", str(error))
        return question.predicted
    if question.predicted.mode not in found:
        return question.predicted  # it may have room where it is alone
    part, n_layers = min(N_LAYERS, len(model.spec.moe_layers)), len(model.spec.moe_layers)
    choice = question.answer(found, f"{part} of {n_layers} layers")
    if set(found) == set(question.close):
        question.remember(choice, found)
    return choice


def _question(model: ModelFile, config: EngineConfig, device: DeviceInfo) -> ModeQuestion | None:
    """Ask which modes there are, at the speeds of this machine; they are measured if they count."""
    tuning, path = tuning_for(device, config.tuning), Path(model.file.path)
    known = recall_speeds(device, path, config.tuning)

    def asked(speeds: Speeds) -> ModeQuestion | None:
        choosing = Choosing(lambda: speeds, corrections=known.corrections)
        return mode_question(config, model, device, tuning, choosing)

    question = asked(known.speeds)
    if question is None or known.measured or config.tuning == "table":
        return question
    log.info("measuring how fast memory is: a second or two, once for this device")
    try:
        with open_device(config.device, config.validation, config.threads) as opened:
            return asked(measure_speeds(opened, path, config.threads))
    except GpuError as error:
        log.warning("the speed of memory cannot be measured: %s", str(error))
        return question


def measure_modes(
    model: ModelFile,
    config: EngineConfig,
    question: ModeQuestion,
    tokens: Sequence[int],
    progress: Progress | None = None,
) -> dict[ModeName, float]:
    """Measure a decoded token in each mode that is close to the best, in turns.

    Return the time of each over the predicted one, both of the first layers and without logits:
    reading the output matrix would be most of so few layers. A mode whose layers cannot be loaded
    beside the others is left out. Raises ModelFileError, and GpuErrors of a device that fails while
    it computes.
    """
    assert tokens and question.close
    text = [tokens[index % len(tokens)] for index in range(N_CONTEXT)]
    with ExitStack() as running:
        arms: dict[ModeName, _ModeArm] = {}
        for mode, candidate in question.close.items():
            asked = _config_of(mode, candidate.plan, config, model.spec)
            part = first_layers(open_model(model.file.path), N_LAYERS)
            try:
                arms[mode] = running.enter_context(_ModeArm(Engine(part, asked, progress), text))
            except GpuError as error:
                log.info("mode %s cannot be measured: %s", mode, str(error))
        _rounds(arms, WARM_ROUNDS, WARM_SECONDS)
        found = _rounds(arms, ROUNDS, SECONDS)
        return {mode: _ratio(times, arms[mode].predicted) for mode, times in found.items()}


def _ratio(seconds: Sequence[float], predicted: float) -> float:
    """Return how much more a token takes than predicted, within what may be believed."""
    return min(max(median(seconds) / predicted, 1 / MOST_RATIO), MOST_RATIO)


def _rounds(
    arms: Mapping[ModeName, _ModeArm], at_least_and_most: tuple[int, int], seconds: float
) -> dict[ModeName, list[float]]:
    """Let each mode decode some tokens in turns; return its seconds of a token in each."""
    least, most = at_least_and_most
    found: dict[ModeName, list[float]] = {mode: [] for mode in arms}
    began = time.perf_counter()
    for index in range(most):
        if index >= least and time.perf_counter() - began > seconds:
            break
        for mode, arm in arms.items():
            found[mode].append(arm.seconds())
    return found


def first_layers(model: ModelFile, n: int) -> ModelFile:
    """Return the model up to the n-th layer with experts; both share the open file."""
    end = model.spec.moe_layers[:n][-1] + 1
    return replace(
        model,
        spec=replace(model.spec, layers=model.spec.layers[:end]),
        tensors=replace(model.tensors, layers=model.tensors.layers[:end]),
    )


def _config_of(
    mode: ModeName, plan: MemoryPlan, config: EngineConfig, spec: ModelSpec
) -> EngineConfig:
    """Ask for a mode with as many slots in a layer as the whole model would have on average.

    Where the CPU computes the experts of some layers, it does so in the same part of these.
    """
    n_layers, n_all = min(N_LAYERS, len(spec.moe_layers)), len(spec.moe_layers)
    n_slots, cached = sum(plan.expert_slots) // n_all, mode in ("cache", "hybrid")
    n_cpu = max(1, round(n_layers * plan.cpu_layers / n_all)) if mode == "cpu" else None
    return replace(
        config,
        expert_mode=mode if n_cpu is None else "auto",
        n_cpu_moe=n_cpu,
        expert_slots=n_slots if cached and n_slots else None,
        expert_cache="1" if cached and not n_slots else None,  # a byte: no slots
        ctx_size=min(N_CONTEXT, spec.context_length),
        parallel=1,
        draft="none",
        validation=False,
        expert_stats=None,
        expert_profile=None,
    )


class _ModeArm(Closing):
    """Decodes a text in one mode; owns the engine. `predicted` are the seconds of a token."""

    def __init__(self, engine: Engine, text: Sequence[int]) -> None:
        self._engine, self._text, self._position = engine, text, 0
        self.predicted = engine.prediction.layer_seconds

    def seconds(self) -> float:
        """Decode the tokens of a round; return the time of one. Raises GpuErrors."""
        total, first = 0.0, self._position
        self._position += N_TOKENS
        for position in range(first, self._position):
            token, place = self._text[position], position % self._engine.ctx_size
            began = time.perf_counter()
            self._engine.run_token(token, place, with_logits=False)
            took, span_ns = time.perf_counter() - began, self._engine.computing().span_ns
            total += took if span_ns is None else span_ns / 1e9
        return total / N_TOKENS

    def close(self) -> None:
        """Free all. May be called twice."""
        self._engine.close()
