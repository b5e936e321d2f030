"""Appends what the host reads of a token: the 64 largest logits and the log-sum-exp of all, so that
it need not read the vocabulary, and last of all the proof in the log that everything ran.

Before that, logits may be capped. Shaders: soft_cap.comp, candidates_partial.comp,
candidates_merge.comp, finish.comp.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TopLogits
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.tuning import Tuning

PICK_ROWS = kernel(
    "pick_rows", "r:x r:params w:y", "u32:row_vec4s u32:x_pitch u32:y_pitch", "workgroup_size"
)
SOFT_CAP = kernel("soft_cap", "rw:logits", "u32:n_vocab u32:logits_pitch f32:cap", "workgroup_size")
MOST_CAPPING = 256  # workgroups of a row
CANDIDATES_PARTIAL = kernel(
    "candidates_partial",
    "r:logits w:lists",
    "u32:n_vocab u32:logits_pitch u32:lists_pitch",
    "workgroup_size",
)
CANDIDATES_MERGE = kernel(
    "candidates_merge",
    "r:lists w:candidates",
    "u32:n_lists u32:lists_pitch u32:candidates_pitch",
    "workgroup_size",
)

FINISH = kernel("finish", "r:params rw:log", "", "workgroup_size")
FINISH_WORKGROUP = 8
PROOF_WORDS = 2  # of the log, which begins with them

N_CANDIDATES = 64
# The output: [count, NaN flag, log-sum-exp (float bits), 0, 64 ids, 64 logits (float bits)].
# A chunk's list has its ids and logits at the same places (candidate_lists.glsl).
IDS_AT, LOGITS_AT = 4, 4 + N_CANDIDATES
CANDIDATE_WORDS = LIST_WORDS = 4 + 2 * N_CANDIDATES
_HEAD = struct.Struct("<2If")
MAX_VOCAB = 1 << 24


class CandidatesReader:
    """Unpacks the output tensor's words, again and again from the same memory."""

    def __init__(self, words: NDArray[np.uint32], n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._head = words[:IDS_AT].data
        self._ids = words[IDS_AT:LOGITS_AT].view(np.int32)
        self._logits = words[LOGITS_AT:CANDIDATE_WORDS].view(np.float32)

    def read(self) -> TopLogits:
        """Read what the words say now; ids and logits are copies."""
        count, has_nan, log_sum_exp = _HEAD.unpack_from(self._head)
        ids, logits = self._ids[:count].copy(), self._logits[:count].copy()
        return TopLogits(ids, logits, self._n_vocab, log_sum_exp, bool(has_nan))


def pick_rows(op: OpContext, x: TensorRef, y: TensorRef, width: int, params: TensorRef) -> None:
    """Append y[i] = x[the i-th row that wants logits, by `params`], for the first rows of y.

    f32 [width] each; a program has as many such rows as the op's context, or fewer.
    """
    assert width % 4 == 0 and x.row_words % 4 == 0 and y.row_words % 4 == 0, (x, y, width)
    pitches = {"x_pitch": x.row_words // 4, "y_pitch": y.row_words // 4}
    op.append(
        PICK_ROWS.dispatch(
            "pick_rows",
            {**vars(op.tuning), **pitches, "row_vec4s": width // 4},
            {"x": x, "params": params, "y": y.rows(op.n_rows, 0, width)},
            (-(-(width // 4) // op.tuning.workgroup_size), 1, op.n_rows),
            op.label,
        )
    )


def soft_cap(op: OpContext, logits: TensorRef, n_vocab: int, cap: float) -> None:
    """Append logits = cap * tanh(logits / cap), f32 [n_vocab] of each row of the batch, in place.

    Within (-cap, cap) nearly what they were (Gemma 2, arXiv:2408.00118, section 2).
    """
    assert 1 <= n_vocab <= MAX_VOCAB and cap > 0.0, (n_vocab, cap)
    n_groups = min(MOST_CAPPING, -(-n_vocab // op.tuning.workgroup_size))
    op.append(
        SOFT_CAP.dispatch(
            "soft_cap",
            {**vars(op.tuning), "n_vocab": n_vocab, "logits_pitch": logits.row_words, "cap": cap},
            {"logits": logits.rows(op.n_rows, 0, n_vocab)},
            (n_groups, 1, op.n_rows),
            op.label,
        )
    )


def n_lists(tuning: Tuning, n_vocab: int) -> int:
    """Choose the number of chunks: enough workgroups, and few lists for the one that merges."""
    most = 64 if tuning.mapping == "lanes" else 8
    return max(1, min(most, n_vocab // (2 * N_CANDIDATES)))


def list_words(tuning: Tuning, n_vocab: int) -> int:
    """Count the words of the scratch tensor that holds the chunks' lists."""
    return n_lists(tuning, n_vocab) * LIST_WORDS


def candidates(
    op: OpContext, logits: TensorRef, n_vocab: int, lists: TensorRef, output: TensorRef
) -> None:
    """Append output [CANDIDATE_WORDS] = the largest of logits f32 [n_vocab], in two dispatches.

    Of each row of the batch.
    """
    assert 1 <= n_vocab <= MAX_VOCAB
    n_chunks = n_lists(op.tuning, n_vocab)
    numbers = {
        **vars(op.tuning),
        **{"n_vocab": n_vocab, "n_lists": n_chunks, "logits_pitch": logits.row_words},
        **{"lists_pitch": lists.row_words, "candidates_pitch": output.row_words},
    }
    used_lists = lists.rows(op.n_rows, 0, n_chunks * LIST_WORDS)
    op.append(
        CANDIDATES_PARTIAL.dispatch(
            "candidates_partial",
            numbers,
            {"logits": logits.rows(op.n_rows, 0, n_vocab), "lists": used_lists},
            (n_chunks, 1, op.n_rows),
            op.label,
        )
    )
    op.append(
        CANDIDATES_MERGE.dispatch(
            "candidates_merge",
            numbers,
            {"lists": used_lists, "candidates": output.rows(op.n_rows, 0, CANDIDATE_WORDS)},
            (1, 1, op.n_rows),
            f"{op.label} merge",
        )
    )


def finish(program: Program, params: TensorRef, log: TensorRef) -> None:
    """Append what proves that everything before it in the program ran.

    Log word 0 = params.serial; word 1 counts the programs that have left this serial, one by one.
    It claims to read all that was written, so that the hazard plan puts a barrier before it.
    """
    written = dict.fromkeys(r for command in program.commands for r in command.writes)
    program.append(
        FINISH.dispatch(
            "finish",
            {"workgroup_size": FINISH_WORKGROUP},
            {"params": params, "log": log.part(0, PROOF_WORDS)},
            (1, 1, 1),
            "finish",
            reads=tuple(written),
        )
    )
