"""This module makes the code books of the IQ types as kernels read them, all in one buffer.

An entry of a code book has several weights. Those of IQ1 and IQ2 have eight, each as the number of
its value among the three that the type has. An entry of IQ1 takes two bits a weight; two entries
share a word. An entry of IQ2 takes a word: the first four weights in the low nibbles of its bytes,
the others in the high ones. Those of IQ3 have four, a byte each. The values are those of the `gguf`
package.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

# The types in the order of their code books, and the bits of a weight. IQ1_M has that of IQ1_S.
_BITS = {"IQ1_S": 2, "IQ2_XXS": 4, "IQ2_XS": 4, "IQ2_S": 4, "IQ3_XXS": 8, "IQ3_S": 8}
HAS_CODE_BOOK = frozenset({*_BITS, "IQ1_M"})
LARGEST_BYTES = 4096  # of one type


@cache
def code_books() -> tuple[Words, dict[str, int]]:
    """Return the words of all code books, and where that of each type begins, in bytes."""
    words = {name: _words(name, n_bits) for name, n_bits in _BITS.items()}
    ends = np.cumsum([each.nbytes for each in words.values()])
    places = {
        name: int(end) - each.nbytes for (name, each), end in zip(words.items(), ends, strict=True)
    }
    return np.concatenate(list(words.values())), {**places, "IQ1_M": places["IQ1_S"]}


def _words(name: str, n_bits: int) -> Words:
    import gguf.quants

    book = getattr(gguf.quants, name)
    book.init_grid()
    values = np.asarray(book.grid).reshape(book.grid_shape)
    if n_bits < 8:
        values = np.searchsorted(np.array(sorted(book.grid_map)), values)
    per_word = 32 // n_bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(n_bits)
    if n_bits == 4:
        shifts = shifts.reshape(4, 2).T.reshape(-1)  # the low nibbles of all bytes first
    places = values.reshape(-1, per_word).astype(np.uint32) << shifts
    return np.asarray(np.bitwise_or.reduce(places, axis=1), np.uint32)
