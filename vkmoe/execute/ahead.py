"""Runs the layer that guesses tokens ahead, behind a batch of the model's own programs."""

from __future__ import annotations

import time
from dataclasses import replace

from vkmoe.batch import BatchKind, TokenBatch, TopLogits
from vkmoe.execute.recorder import Recorded, Recorder, TokenPrograms
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.program import Bound
from vkmoe.kernels.logits.operations import PROOF_WORDS
from vkmoe.models.ahead import AheadDecoder
from vkmoe.models.workspace import FEW_ROWS


class AheadPrograms:
    """Holds the programs of guesses. They share the tensors of the model's, and what these exchange
    with the host; each kind is recorded when it is first needed."""

    def __init__(self, backend: Backend, programs: TokenPrograms, decoder: AheadDecoder) -> None:
        """Begin with nothing recorded; `programs` are the model's."""
        self._backend, self._programs, self._decoder = backend, programs, decoder
        self._recorded: dict[tuple[BatchKind, bool], Recorded] = {}

    def guess(self, batch: TokenBatch, n_tokens: int, n_positions: int) -> list[list[int]]:
        """Guess up to `n_tokens` behind each row that wants logits; raises GpuErrors.

        The rows are those of the model's last batch, each with the token behind it. The caches have
        `n_positions`. All rows are run, so that later guesses can look back at them.
        """
        wanted = [row for row, wants in enumerate(batch.wants_logits) if wants]
        found: list[list[int]] = [[] for _ in wanted]
        tops, positions = self._run(batch, False), [batch.positions[row] for row in wanted]
        regions = tuple(batch.sequences[row] for row in wanted)
        while found:
            tokens = tuple(int(top.ids[0]) for top in tops)
            for guessed, token in zip(found, tokens, strict=True):
                guessed.append(token)
            positions = [position + 1 for position in positions]
            if len(found[0]) >= n_tokens or max(positions) >= n_positions:
                break
            wants = (True,) * len(tokens)
            tops = self._run(TokenBatch(tokens, tuple(positions), regions, wants), True)
        return found

    def _run(self, batch: TokenBatch, follows: bool) -> tuple[TopLogits, ...]:
        """Run the program of a batch; return the largest logits of each row that wants any."""
        recorded, io = self._recording(batch, follows), self._programs.io
        table = self._decoder.weights.expert_table.start
        for queue in recorded.queues():
            io.send(batch, table)
            began, segments = time.perf_counter_ns(), [x for sub in queue for x in sub.segments]
            known = sum(submit.expected_ns for submit in queue)
            expected = 0 if self._backend.device.info.is_cpu else known
            self._backend.run(*(x.recording for x in segments), expected_ns=expected)
            for submit in queue:
                submit.took((time.perf_counter_ns() - began) / len(queue))
            io.receive(len(segments))
        return self._programs.tops(sum(batch.wants_logits))

    def _recording(self, batch: TokenBatch, follows: bool) -> Recorded:
        """Return what is recorded for the smallest kind that takes a batch."""
        n_rows, n_logits = len(batch.tokens), sum(batch.wants_logits)
        size = next(n for n in self._decoder.workspace.row_sizes[batch.phase] if n >= n_rows)
        kind = BatchKind(batch.phase, size, next(n for n in (0, *FEW_ROWS) if n >= n_logits))
        if (kind, follows) not in self._recorded:
            decoder = replace(self._decoder, follows=follows)
            recorder = _Recorder(self._backend, decoder, self._programs.io, "fused", None)
            self._recorded[kind, follows] = recorder.record(kind)
        return self._recorded[kind, follows]


class _Recorder(Recorder):
    """Makes recordings that leave the log of the model's last run to the host."""

    def outputs(self, kind: BatchKind) -> tuple[Bound, ...]:
        """Return the proof that all ran, and the largest logits."""
        space = self.decoder.workspace
        proof = space.log.part(0, PROOF_WORDS)
        return (proof, space.candidates.rows(kind.n_logits)) if kind.n_logits else (proof,)
