"""gather against its twin: whole workgroups and tails, no, one and all slots."""

from __future__ import annotations

import numpy as np
import pytest

from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.ops.experts import GROUP_BYTES, LandingMemory, gather
from vkmoe.ops.router import RoutingLog
from vkmoe.reference.gather import gather as twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.gather import GatherCase


@pytest.mark.parametrize(
    "span_bytes", [16, 16 * 63, GROUP_BYTES - 16, GROUP_BYTES, GROUP_BYTES + 16, 3 * GROUP_BYTES]
)
@pytest.mark.parametrize("misses", [(), (2,), (1, 3, 4), (0, 1, 2, 3, 4)], ids=str)
def test_missed_spans_are_copied(runner: Runner, span_bytes: int, misses: tuple[int, ...]) -> None:
    checks = Checks()
    GatherCase(runner, span_bytes, 5, misses).run(checks)
    checks.verify()


def test_one_used_expert(runner: Runner) -> None:
    checks = Checks()
    GatherCase(runner, 4096, 1, (0,)).run(checks)
    checks.verify()


def test_the_twin_copies_what_has_a_partner() -> None:
    """Worked out by hand: three slots of 4 bytes, the second is copied."""
    memory = np.arange(16, dtype=np.uint8)
    ids = np.array([7, 8, 9], np.uint32)
    addresses, partners = (np.array(list(a), np.uint64) for a in ((256, 264, 256), (0, 260, 0)))
    after, filled = twin(memory, ids, addresses, partners, 4)
    assert after.tolist() == [*range(8), 4, 5, 6, 7, 12, 13, 14, 15]
    assert filled.tolist() == [[0, 0], [9, 9], [0, 0]]


def test_scratch_that_layers_share_is_ordered_by_barriers() -> None:
    """Written by a layer only when the one before has read it, and read when it is written."""
    log, routing = RoutingLog(2, 2), TensorRef("routing", 12)
    scratch, home = memory_range(4096, 1024), memory_range(1 << 20, 1024)
    program = Program("two layers")
    for layer in range(2):
        landing = LandingMemory((scratch,), log.tensor, log.filled(layer))
        gather(program, routing, landing, 512, (home,), f"gather {layer}")
    assert plan_barriers(program.commands) == [False, True], "both write the same places"
    gathered = program.commands[0]
    assert gathered.writes == (log.filled(0), scratch)
    assert gathered.reads == (routing.whole, home)
