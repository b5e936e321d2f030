"""Typed face of the native extension: ggml's kernels, and threads that share out their rows.

Missing where vkmoe was built with -DVKMOE_CPU=OFF.
"""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

ggml_version: str  # of llama-cpp-python, whose source distribution carries it

class Format(TypedDict):
    """Describes a type of weights that ggml multiplies as it lies in a file."""

    name: str
    type: int  # its number in GGUF files
    block_weights: int
    block_bytes: int
    input: int  # the type that a vector is brought into before it is multiplied

def features() -> str:
    """Return what the processor has and the kernels were compiled for."""

def formats() -> list[Format]:
    """List all types that ggml multiplies, by their numbers."""

class Pool:
    """Holds threads that run steps together; the one that calls is among them.

    Raises ValueError for none, RuntimeError where the system refuses a thread.
    """

    def __init__(self, n_threads: int) -> None: ...
    @property
    def n_threads(self) -> int: ...

def multiply(
    pool: Pool, type: int, rows: NDArray[np.uint8], vector: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Multiply rows of weights [n_rows, row_bytes], as in a file, by a vector: [n_rows].

    The vector is brought into the type's input first. Bits do not depend on the number of threads.
    Raises ValueError for a type that ggml does not multiply, and for rows that do not fit.
    """
