"""finish: the serial number arrives behind everything else."""

from __future__ import annotations

from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.ops.candidates import CANDIDATE_WORDS, candidates, finish, list_words
from vkmoe.ops.context import OpContext
from vkmoe.ops.tuning import Tuning
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.inputs import PARAMS
from vkmoe.selftest.vocabulary import FinishCase


def test_writes_word_0_only(runner: Runner) -> None:
    case, checks = FinishCase(runner), Checks()
    for serial in (1, 0xFFFFFFFF):
        case.run(serial, checks)
    checks.verify()


def test_a_barrier_stands_before_it() -> None:
    """Also when the last writer shares no tensor with it."""
    tuning = Tuning("blocks", 8, 1, False)
    program = Program("finish")
    candidates(
        OpContext(program, tuning, "candidates"),
        TensorRef("logits", 100),
        100,
        TensorRef("lists", list_words(tuning, 100)),
        TensorRef("candidates", CANDIDATE_WORDS),
    )
    finish(program, PARAMS, TensorRef("log", 9))
    assert plan_barriers(program.commands)[-1]
