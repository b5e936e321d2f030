"""The probes of a model's kernels run the pipelines that the model's programs run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import Lend
from tests.engine.tiny import ONE_OF_EACH, drafter_path, model_path
from tests.models.invented import TUNINGS
from vkmoe.batch import TokenBatch
from vkmoe.canary.check import Decide
from vkmoe.canary.programs import Pipeline, Probed, comparisons, probed
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.execute.recorder import Recorded
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Dispatch, Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner, Words
from vkmoe.kernels.tuning import Tuning
from vkmoe.models import ModelFile, open_model
from vkmoe.models.ahead_file import with_ahead
from vkmoe.models.decoder import Decoder
from vkmoe.placement.decide import Decision, decide

DRAFTER = "gemma4_shared_assistant"
CONFIGS = (
    EngineConfig(),
    EngineConfig(expert_slots=2, parallel=4),
    EngineConfig(expert_mode="hybrid", expert_slots=2),
    EngineConfig(cache_type_k="q8_0", cache_type_v="q8_0", n_cpu_moe=1),
)


class Unrun(Runner):
    """Keeps programs in place of running them; what they would leave is NaN."""

    ran: ClassVar[list[Program]] = []  # by all that are made

    def run(
        self, program: Program, inputs: Mapping[TensorRef, NDArray[np.generic]], *outputs: TensorRef
    ) -> tuple[Words, ...]:
        self.ran.append(program)
        return tuple(np.full(ref.n_words, SENTINEL, np.uint32) for ref in outputs)


def pipeline(command: Dispatch) -> Pipeline:
    return Pipeline(command.variant, command.constants, command.subgroup_size)


def cases() -> list[Any]:
    """Each model in one config and tuning of several, so that all of these take turns."""
    found = []
    for index, name in enumerate(ONE_OF_EACH):
        for turn in range(2):
            config = CONFIGS[(index + turn) % len(CONFIGS)]
            tuning = TUNINGS[(index + 2 * turn) % len(TUNINGS)]
            found.append(pytest.param(name, config, tuning, id=f"{name}-{turn}"))
    return found


@pytest.mark.parametrize(("name", "config", "tuning"), cases())
def test_a_probe_runs_the_pipelines_of_its_dispatches(
    name: str,
    config: EngineConfig,
    tuning: Tuning,
    lend_device: Lend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is compared must be what the driver compiles for the model: constants and all."""
    monkeypatch.setattr(Unrun, "ran", [])
    with lend_device() as device, open_model(model_path(name)) as model:
        if model.spec.experts is None:
            config = EngineConfig()
        decision = decide(config, model, device.info, tuning)
        assert decision.tuning == tuning
        for compared in comparisons(model, decision):
            Unrun.ran.clear()
            with Unrun(device) as runner, np.errstate(all="ignore"):
                compared.probe.run(runner)
            ran = {pipeline(each) for program in Unrun.ran for each in program.dispatches()}
            assert set(compared.kernels.values()) <= ran, compared.probe


ENGINES = {  # each in another mode; what guesses has programs of its own
    "moe_odd": EngineConfig(parallel=3),
    "qwen2moe_top1": EngineConfig(expert_slots=2),
    "deepseek2_v3": EngineConfig(expert_mode="hybrid", expert_slots=2),
    "gptoss_odd": EngineConfig(n_cpu_moe=1),
    "gemma4_dense_inputs": EngineConfig(),
    "gemma4_shared": EngineConfig(draft="mtp", draft_model=str(drafter_path(DRAFTER))),
    "qwen35moe_odd": EngineConfig(draft="mtp"),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.sample(3)
def test_all_that_a_loaded_model_runs_is_compared(
    name: str, one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are described before there is memory: they must be those that run later."""
    described = dict[str, Pipeline]()

    def describing(device: Device, model: ModelFile, tuning: Tuning, decide: Decide) -> Decision:
        decision = decide(tuning)
        for each in comparisons(model, decision):
            described.update(each.kernels)
        return decision

    monkeypatch.setattr("vkmoe.engine.passing", describing)
    config = ENGINES[name]
    with with_ahead(open_model(model_path(name)), config) as model, Engine(model, config) as engine:
        n_guesses = engine.n_guesses
        tokens = [token % engine.n_vocab for token in range(40)]
        engine.run_prompt(tokens)
        rows = tuple(range(engine.max_decode_rows))
        engine.run(TokenBatch((1,) * len(rows), tuple(40 + row for row in rows), (0,) * len(rows),
                              (True,) * len(rows)))  # fmt: skip
        assert (n_guesses > 0) == (config.draft == "mtp")
        if n_guesses:
            engine.guess((1,) * len(rows), (True,) * len(rows), min(2, n_guesses))
        ran = [each for parts in recorded(engine) for each in parts]
    assert len({each.pipeline for each in ran}) > 10
    assert not [each for each in ran if described.get(each.key) != each.pipeline]


def recorded(engine: Engine) -> Iterator[list[Probed]]:
    """The dispatches an engine has recorded: of its own programs, and of those that guess."""
    of_decoders: list[tuple[Decoder, Iterable[Recorded]]] = [
        (engine._programs._recorder.decoder, engine._programs.recorded.values())
    ]
    if (ahead := engine._ahead) is not None:
        of_decoders.append((ahead._decoder, ahead._recorded.values()))
    for decoder, records in of_decoders:
        mixers = [decoder._mixer(index).kernels for index in range(decoder.spec.n_layers)]
        for parts in records:
            commands = [each for of in parts.segments for each in of.program.dispatches()]
            yield list(probed(commands, decoder.tuning, mixers))
