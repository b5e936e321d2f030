"""A model's weights once they are in GPU memory: what owns that memory, and how to load the rest.

Where the host pool does not hold all experts, they are not loaded with the other weights: the
places they go to belong to whoever manages the pool, who fills them with `LoadedWeights.fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter

from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.table import ExpertTable
from vkmoe.gpu.arena import Arena, Placement
from vkmoe.models.weights import ModelWeights
from vkmoe.placement.span_reader import FileReads, SpanReader

__all__ = ["N_THREADS", "LoadedWeights", "Progress", "Progressing"]

Progress = Callable[[int, int], None]  # bytes done, bytes in all
N_THREADS = 4


class Progressing:
    """Counts bytes up to a total and tells whoever wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


@dataclass
class LoadedWeights:
    """The weights and what owns their memory.

    With a `reader`, not all experts are in host memory: no address is in the table (all are 0), no
    `expert_ranges` are in the weights, and there are no homes.
    """

    weights: ModelWeights
    table: ExpertTable
    homes: list[list[Placement]]  # of the routed experts [n MoE layers][n_experts]; [] with reader
    arenas: list[Arena]
    progress: Progressing
    reader: SpanReader | None = None

    def fill(self, reads: Sequence[Copy]) -> None:
        """Read experts (by number) into places of the host pool, by several threads.

        A part of loading: the progress goes on. Must hold: there is a reader. Raises
        ModelFileError.
        """
        assert self.reader is not None, "all experts are in host memory"
        files = FileReads(self.reader)
        threads = ThreadPoolExecutor(N_THREADS, "load")
        try:
            in_order = sorted(reads, key=itemgetter(0))
            done = threads.map(lambda read: files.start([read]), in_order)
            for read, _ in zip(in_order, done, strict=True):
                self.progress.add(read[2])
        finally:
            threads.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Free all; may be called twice."""
        if self.reader is not None:
            self.reader.close()
        self.table.close()
        for arena in self.arenas:
            arena.close()
