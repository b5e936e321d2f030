"""How near the mode that vkmoe chooses by itself comes to the best one.

python -m bench.modes --record
python -m bench.modes --expert-slots 16 --preset qwen3-30b-a3b --record

The model is that of bench.decode unless told otherwise. Its modes are measured anew, as before a
first run, with two of its layers; then the whole model decodes in each mode that was in question,
and in the one that was chosen, in turns. The chosen one must reach 95 % of the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from bench.arms import take_turns
from bench.command import command_line, finish, run_main
from bench.decode import PROMPT_STEP
from bench.models import add_model_options, chosen_model
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices
from vkmoe.engine import Engine
from vkmoe.errors import UsageError
from vkmoe.mode_trial import measure_modes
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.mode_choice import ModeChoice, ModeQuestion, mode_question

CHOSEN, LEAST = "auto", 0.95
N_WARM = 64  # tokens before any is measured, so that caches hold what they come to hold


def main() -> None:
    """Choose, then measure all modes in turns."""
    parser = command_line(__doc__, repeats=2 * MIN_REPEATS)
    add_model_options(parser)
    parser.add_argument("--expert-slots", type=int, help="as for vkmoe")
    parser.add_argument("--tokens", type=int, default=8, help="decoded per repeat (default: 8)")
    options = parser.parse_args()
    device = choose_device(list_devices(), options.device)
    card = describe(device)
    print_card(card)
    n_positions = N_WARM + options.tokens * options.repeats
    config = EngineConfig(options.device, ctx_size=n_positions, expert_slots=options.expert_slots)
    path = chosen_model(options)
    with open_model(path) as model:
        question = mode_question(config, model, device)
        if question is None:
            raise UsageError("there is nothing to choose here", "give --expert-slots")
        choice, seconds = _choose(model, config, question)
    print(f"chosen in {seconds:.1f} s: {choice.mode} ({choice.reason})")
    configs = {mode: replace(config, expert_mode=mode) for mode in question.candidates}
    with ExitStack() as running:
        arms = {
            str(mode): _arm(running.enter_context(Engine(path, asked)), options.tokens)
            for mode, asked in configs.items()
        }
        engine = Engine(path, config, choice=choice)
        arms[CHOSEN] = _arm(running.enter_context(engine), options.tokens)
        speeds = take_turns(arms, options.repeats, "tok/s")
    rows = [Row(name, speeds.summary(name), speeds.unit, "host_wall") for name in speeds.names]
    print(*rows, "", sep="\n")
    ratios: dict[str, Any] = {}
    for mode in configs:
        ratio = ratios[f"{CHOSEN} / {mode}"] = speeds.ratio(CHOSEN, mode, card)
        print(f"{CHOSEN} / {mode} = {ratio} (medians, 95 % interval, in turns; least: {LEAST})")
    found: dict[str, Any] = {"model": path.name, "chosen": choice.mode, "reason": choice.reason}
    found |= {"seconds_to_choose": seconds, "rows": rows, "ratios": ratios}
    finish("modes", card, found, options.record)


def _choose(
    model: ModelFile, config: EngineConfig, question: ModeQuestion
) -> tuple[ModeChoice, float]:
    """Predict, or measure as before a first run, and choose; returns the seconds that takes."""
    began = time.perf_counter()
    if not question.close:
        return question.predicted, time.perf_counter() - began
    found = measure_modes(model, config, question, _tokens(model.spec.n_vocab))
    return question.answer(found, "the first layers"), time.perf_counter() - began


def _tokens(n_vocab: int) -> list[int]:
    return [PROMPT_STEP * index % min(n_vocab, 251) for index in range(1, 252)]


def _arm(engine: Engine, n_tokens: int) -> Callable[[], float]:
    """Decode what comes next of the same tokens; the first ones here, without a clock."""
    text, position = _tokens(engine.n_vocab), 0

    def decode(n: int) -> float:
        nonlocal position
        began = time.perf_counter()
        for _ in range(n):
            engine.run_token(text[position % len(text)], position)
            position += 1
        return n / (time.perf_counter() - began)

    decode(N_WARM)
    return lambda: decode(n_tokens)


if __name__ == "__main__":
    run_main(main)
