"""Runs what guesses tokens ahead, a layer or a drafter, behind a batch of the model's programs."""

from __future__ import annotations

import time
from dataclasses import replace

from vkmoe.batch import BatchKind, TokenBatch
from vkmoe.execute.recorder import Recorded, Recorder, TokenPrograms
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.program import Bound
from vkmoe.kernels.logits.operations import PROOF_WORDS
from vkmoe.models.ahead import GuessDecoder


class AheadPrograms:
    """Holds the programs of guesses. They share the tensors of the model's, and what these exchange
    with the host; each kind is recorded when it is first needed."""

    def __init__(self, backend: Backend, programs: TokenPrograms, decoder: GuessDecoder) -> None:
        """Begin with nothing recorded; `programs` are the model's."""
        self._backend, self._programs, self._decoder = backend, programs, decoder
        self._recorded: dict[tuple[BatchKind, bool], Recorded] = {}

    def guess(self, batch: TokenBatch, n_tokens: int, n_positions: int) -> list[list[int]]:
        """Guess up to `n_tokens` behind each row that wants logits; raises GpuErrors.

        The rows are those of the model's last batch, each with the token behind it. The caches have
        `n_positions`. A layer runs all rows, so that later guesses can look back at them.
        """
        wanted = [row for row, wants in enumerate(batch.wants_logits) if wants]
        found: list[list[int]] = [[] for _ in wanted]
        step, regions = self._decoder.step, tuple(batch.sequences[row] for row in wanted)
        if not wanted and not step:
            return found
        self._run(batch, False)
        tokens = tuple(batch.tokens[row] for row in wanted)
        positions = tuple(batch.positions[row] for row in wanted)
        if not step:  # what ran has but taken over the states
            self._run(TokenBatch(tokens, positions, regions, (True,) * len(wanted)), True)
        while found:
            tokens = tuple(int(top.ids[0]) for top in self._programs.tops(len(wanted)))
            for guessed, token in zip(found, tokens, strict=True):
                guessed.append(token)
            positions = tuple(position + step for position in positions)
            if len(found[0]) >= n_tokens or max(positions) >= n_positions:
                break
            self._run(TokenBatch(tokens, positions, regions, (True,) * len(wanted)), True)
        return found

    def _run(self, batch: TokenBatch, follows: bool) -> None:
        """Run the program of a batch."""
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

    def _recording(self, batch: TokenBatch, follows: bool) -> Recorded:
        """Return what is recorded for the smallest kind that takes a batch."""
        n_rows, n_logits = len(batch.tokens), sum(batch.wants_logits)
        kind = self._decoder.workspace.batch_kind(batch.phase, n_rows, n_logits)
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
