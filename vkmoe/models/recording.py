"""Records the program of a token: whole, in pieces that bound the work of a submit, or in steps.

Puts round the decoder's commands what the host exchanges with them. Does not run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkmoe.gpu.backend import Backend, Recording
from vkmoe.gpu.program import Command, Program
from vkmoe.gpu.token_io import TokenIo
from vkmoe.models.decoder import Decoder
from vkmoe.models.steps import cut, layer_ends, segments

__all__ = ["Recorded", "TokenRecorder"]


@dataclass(frozen=True)
class Recorded:
    """A program and its recordings, which are submitted one behind the other."""

    program: Program
    recordings: tuple[Recording, ...]


class TokenRecorder:
    """Makes the recordings of one decoder, timed where the device can. Methods raise GpuErrors."""

    def __init__(
        self, backend: Backend, decoder: Decoder, io: TokenIo, borders: Sequence[int]
    ) -> None:
        """`borders` are the layers that begin another submit; n_layers means the output head."""
        self._backend, self._decoder, self._io, self._borders = backend, decoder, io, borders
        self._timed = backend.device.native.has_timestamps()

    def whole(self, with_logits: bool) -> Program:
        """One token between the copy in and the copies out."""
        body = self._decoder.token_program(with_logits)
        return self._dressed(body.name, body.commands, with_logits)

    def fused(self, with_logits: bool) -> Recorded:
        """The whole, recorded in as many pieces as there are borders in it and one."""
        whole = self.whole(with_logits)
        if not self._borders:
            return Recorded(whole, (self._record(whole),))
        body = self._decoder.token_program(with_logits)
        ends = [end for end in layer_ends(body.commands) if end < len(body.commands)]
        parts = cut(body.commands, [ends[at - 1] for at in self._borders if at <= len(ends)])
        pieces = [
            self._piece(f"{body.name} {index}", part, index, index + 1 == len(parts), with_logits)
            for index, part in enumerate(parts)
        ]
        return Recorded(whole, tuple(self._record(piece) for piece in pieces))

    def steps(self, with_logits: bool, known: Sequence[Recorded] = ()) -> list[Recorded]:
        """The segments of `steps.py`; the last one alone depends on `with_logits`.

        `known` are the first ones, if they are recorded already.
        """
        parts = segments(self._decoder.token_program(with_logits).commands)
        steps = list(known)
        for index in range(len(steps), len(parts)):
            is_last = index + 1 == len(parts)
            program = self._dressed(f"step {index}", parts[index], with_logits and is_last)
            steps.append(Recorded(program, (self._record(program),)))
        return steps

    def _dressed(self, name: str, commands: Sequence[Command], with_logits: bool) -> Program:
        """Commands with parameters of their own, the serial and all that they report."""
        program = Program(name)
        self._io.copy_in(program)
        program.commands.extend(commands)
        self._decoder.close_program(program)
        self._io.copy_out(program, 2 if with_logits else 1)
        return program

    def _piece(
        self, name: str, commands: Sequence[Command], index: int, is_last: bool, with_logits: bool
    ) -> Program:
        """The pieces share the parameters of the first; each leaves its own proof that it ran."""
        program = Program(name)
        if index == 0:
            self._io.copy_in(program)
        else:
            self._io.clear_serial(program)
        program.commands.extend(commands)
        self._decoder.close_program(program)
        if is_last:
            self._io.copy_out(program, 2 if with_logits else 1)
        else:
            self._io.copy_serial(program, index)
        return program

    def _record(self, program: Program) -> Recording:
        return self._backend.record(program, timed=self._timed)
