"""read_words: every byte is read, by the lane that the twin says."""

from __future__ import annotations

import numpy as np
import pytest

from vkmoe.gpu.link_speed import GROUP_BYTES, UNITS_PER_LANE, WORKGROUP_SIZE, read_words
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.memory.cases import ReadCase
from vkmoe.kernels.memory.twins import read_words as twin


@pytest.mark.parametrize("n_groups", [1, 3, 70])
def test_agrees_with_the_twin(runner: Runner, n_groups: int) -> None:
    ReadCase(n_groups).run(runner).verify()


def test_the_twin_reads_every_word_once() -> None:
    """One bit set anywhere shows in the sum of one lane: the lane of its 16 bytes."""
    n_words = 2 * GROUP_BYTES // 4
    for index in (0, 3, 4, 255, 256, n_words // 2 - 1, n_words // 2, n_words - 1):
        words = np.zeros(n_words, np.uint32)
        words[index] = 1 << index % 32
        (lanes,) = np.nonzero(twin(words, WORKGROUP_SIZE, UNITS_PER_LANE))
        group, unit = divmod(index // 4, WORKGROUP_SIZE * UNITS_PER_LANE)
        assert lanes.tolist() == [group * WORKGROUP_SIZE + unit % WORKGROUP_SIZE]


@pytest.mark.parametrize(("address", "n_bytes"), [(8, GROUP_BYTES), (16, GROUP_BYTES + 16)])
def test_what_does_not_fit_is_our_own_mistake(address: int, n_bytes: int) -> None:
    with pytest.raises(AssertionError):
        read_words(Program("misfit"), address, n_bytes, TensorRef("sums", 4096))
