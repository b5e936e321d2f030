"""A driver that miscompiles a kernel: the kernel is replaced or the device refused, and no model
writes wrong text. Faults are planted in copies of the SPIR-V modules that the demo model runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.canary.conftest import Modules
from tests.canary.faults import Fault, chosen, faults
from tests.conftest import Lend
from vkmoe.canary.check import passing
from vkmoe.canary.programs import comparisons
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import MiscompiledError
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.llm.files import demo_model_path
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import Decision, decide

pytestmark = pytest.mark.usefixtures("one_device")
TOKENS = range(40, 64)
N_FAULTS = 20
ROUNDING = 1e-4  # of the largest logit
# GPUs run other kernels than the drivers of CPUs; lavapipe runs these too.
LIKE_A_GPU = Tuning("lanes", 64, 4, True, subgroup_size=8, rows_of_few=1, most_columns=4)


class Demo(NamedTuple):
    """The demo model on a device, in a tuning."""

    device: Device
    model: ModelFile
    tuning: Tuning
    sound: dict[Tuning, NDArray[np.float32]]  # logits without a fault

    def decide(self, tuning: Tuning) -> Decision:
        return decide(EngineConfig(), self.model, self.device.info, tuning)

    def passing(self) -> Decision:
        return passing(self.device, self.model, self.tuning, self.decide)

    def variants(self, decision: Decision) -> set[str]:
        return {name for each in comparisons(self.model, decision) for name in each.variants}

    def logits(self, tuning: Tuning) -> NDArray[np.float32]:
        """Logits behind a prompt and behind tokens."""
        with Engine(demo_model_path(), EngineConfig(canary=False), tuning=tuning) as engine:
            engine.run_prompt(TOKENS)
            of_prompt = engine.full_logits()
            engine.run_tokens(TOKENS[:3], len(TOKENS))
            return np.concatenate([of_prompt, engine.full_logits()])


def outcome(demo: Demo, modules: Modules, variant: str, fault: Fault) -> str:
    """Plant a fault and see what becomes of it: "refused", "replaced" or "harmless".

    A fault is harmless where the model's logits stay what they are but for rounding: in code for
    what the model does not have, or where it cancels out. All else must be noticed.
    """
    with modules.planted(variant, fault):
        try:
            tuning = demo.passing().tuning
        except MiscompiledError as error:
            assert variant in str(error) and demo.device.info.driver in str(error), str(error)
            return "refused"
        if tuning != demo.tuning and variant not in demo.variants(demo.decide(tuning)):
            return "replaced"
        logits = demo.logits(tuning)
    if tuning not in demo.sound:
        demo.sound[tuning] = demo.logits(tuning)
    off = np.abs(logits - demo.sound[tuning]).max() / np.abs(demo.sound[tuning]).max()
    assert off <= ROUNDING, f"{variant} passes with a fault: {fault.what}, {off}"
    return "harmless" if tuning == demo.tuning else "replaced"


def noticed(demo: Demo, modules: Modules, n: int, seed: int) -> list[str]:
    """Plant faults in different kernels until `n` were refused or replaced."""
    found = demo.passing()
    assert found.tuning == demo.tuning, "the sound modules do not pass"
    of_model = {name: spirv_words(name) for name in sorted(demo.variants(found))}
    outcomes: list[str] = []
    for variant, fault in chosen(of_model, 3 * n, seed):
        outcomes.append(outcome(demo, modules, variant, fault))
        if len(outcomes) - outcomes.count("harmless") == n:
            return outcomes
    raise AssertionError(f"too few faults do any harm: {outcomes}")


@pytest.fixture
def demo(lend_device: Lend) -> Iterator[Demo]:
    with lend_device() as device, open_model(demo_model_path()) as model:
        yield Demo(device, model, choose_tuning(device.info), {})


def test_no_planted_fault_writes_text(demo: Demo, modules: Modules) -> None:
    outcomes = noticed(demo, modules, N_FAULTS, seed=1)
    assert {"refused", "replaced"} <= set(outcomes)


@pytest.mark.full
def test_a_missing_barrier_is_noticed_whatever_others_left(demo: Demo, modules: Modules) -> None:
    """Sums whose other parts are 0, or are there from the same kernel, must not hide it."""
    demo, variant = demo._replace(tuning=LIKE_A_GPU), "matvec_residual.q6_k+subgroup"
    *_, last = (each for each in faults(spirv_words(variant)) if each.what == "barrier gone")
    for _ in range(3):
        assert demo.passing().tuning == LIKE_A_GPU
        assert outcome(demo, modules, variant, last) == "replaced"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("tuning", [None, LIKE_A_GPU], ids=["of a CPU driver", "like a GPU's"])
def test_no_fault_of_many_writes_text(
    demo: Demo, modules: Modules, tuning: Tuning | None, seed: int
) -> None:
    noticed(demo._replace(tuning=tuning or demo.tuning), modules, 2 * N_FAULTS, seed)
