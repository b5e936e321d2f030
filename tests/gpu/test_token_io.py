"""The parameters of a batch as kernels read them; sending and receiving is tests/execute's."""

from __future__ import annotations

import numpy as np

from vkmoe.batch import TokenBatch
from vkmoe.gpu.token_io import pack_params, param_words


def test_parameters_have_a_row_for_each_row_of_the_program() -> None:
    """Rows that the batch does not have keep what they held; the end of the header is cleared."""
    words = np.full(param_words(3), 7, np.uint32)
    batch = TokenBatch((11, 12), (5, 90), (0, 2), (False, True))
    pack_params(words.data, batch, (4 << 32) + 3, serial=6, landing_row=1, first_picked=9)
    header, rows = words[:8], words[8:].reshape(3, 4)
    assert header.tolist() == [3, 4, 6, 2, 1, 1, 9, 0]
    assert rows.tolist() == [[11, 5, 0, 1], [12, 90, 2, 0], [7] * 4], "the second row is picked"
