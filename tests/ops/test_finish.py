"""finish: the serial number arrives behind everything else."""

from __future__ import annotations

import numpy as np

from tests.ops.replay import PARAMS, Replay, params_words
from vkmoe.gpu.device import Device
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL
from vkmoe.ops.candidates import CANDIDATE_WORDS, candidates, list_words
from vkmoe.ops.finish import finish
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.finish import finish as finish_twin

LOG = TensorRef("log", 9)


def test_writes_word_0_only(device: Device) -> None:
    program = Program("finish")
    finish(program, PARAMS, LOG)
    before = np.full(LOG.n_words, SENTINEL, np.uint32)
    for serial in (1, 0xFFFFFFFF):
        (after,) = Replay(device, program).run({PARAMS: params_words(serial=serial)}, LOG)
        np.testing.assert_array_equal(after, finish_twin(before, serial))


def test_a_barrier_stands_before_it() -> None:
    """Also when the last writer shares no tensor with it."""
    tuning = Tuning("blocks", 8, 1, False)
    program = Program("finish")
    candidates(program, tuning, TensorRef("logits", 100), 100,
               TensorRef("lists", list_words(tuning, 100)),
               TensorRef("candidates", CANDIDATE_WORDS), "candidates")
    finish(program, PARAMS, LOG)
    assert plan_barriers(program.commands)[-1]
