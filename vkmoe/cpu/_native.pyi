"""Typed face of the native extension: programs run by ggml's kernels, on threads of our own.

There is one for each variant, `_ggml_NAME`, which `variants.native` imports. Functions raise
ValueError for what does not fit, TypeError for arrays of another type; then nothing was done.
"""

from collections.abc import Mapping
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
    """Return what the kernels were compiled for, of what tells processors apart."""

def kernels() -> list[str]:
    """List the kernels that programs may name."""

def n_read_ahead() -> int:
    """Count how often the system was asked for an expert that is in a file, since the start."""

def formats() -> list[Format]:
    """List all types that ggml multiplies, by their numbers."""

def quantise(
    type: int, weights: NDArray[np.float32], importance: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Quantise finite weights [n_rows, n_columns] as ggml does: uint8 [n_rows, row_bytes].

    `type` is the number in GGUF files of one of `formats`; `importance` [n_columns] says what an
    error in each column costs. For tools and tests.
    """

class Pool:
    """Holds threads that run programs together; the one that calls is among them.

    Raises ValueError for none, RuntimeError where the system refuses a thread.
    """

    def __init__(self, n_threads: int) -> None: ...
    @property
    def n_threads(self) -> int: ...

class Regions:
    """Knows the memory that addresses in programs may lead to: buffers and mapped files."""

    def add(self, address: int, n_bytes: int) -> None: ...
    def remove(self, address: int) -> None: ...
    def set_scale(self, address: int, scale: float) -> None:
        """Have programs that are recorded later multiply the weights of the matrix there."""

class Scratch:
    """Owns the room that commands use while they run: one for all programs of a device.

    Must hold: one of them runs at a time, and none while another is recorded.
    """

class Recording:
    """Holds a program: commands are checked as they come, and run as often as is asked.

    Bits do not depend on the number of threads. What commands write may not be touched meanwhile.
    """

    def __init__(self, regions: Regions, scratch: Scratch) -> None: ...
    def dispatch(
        self,
        kernel: str,
        variant: str,
        numbers: Mapping[str, int | float],
        tensors: Mapping[str, NDArray[np.uint32]],
        groups: tuple[int, int, int],
        waits: bool = True,
    ) -> None:
        """Append a kernel, with push and specialisation constants and tensors by their names.

        `waits`: for all commands before it. Keeps the tensors alive, not what addresses lead to.
        """

    def copy(
        self, source: NDArray[np.uint8], target: NDArray[np.uint8], waits: bool = True
    ) -> None:
        """Append a copy of bytes, which may not overlap."""

    def fill(self, target: NDArray[np.uint32], word: int, waits: bool = True) -> None:
        """Append the filling of words with one."""

    def run(self, pool: Pool) -> None:
        """Run the program, without Python's lock; one at a time in a pool."""

    @property
    def n_steps(self) -> int: ...
