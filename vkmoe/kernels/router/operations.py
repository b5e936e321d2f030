"""Appends the router's choice of experts, their weights and addresses, and the routing log.

Shader: router_topk.comp.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.facts import ExpertSpec
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Bound, Range, TensorRef, memory_range
from vkmoe.kernels.context import OpContext

ROUTER_TOPK = kernel(
    "router_topk",
    "r:logits r:params w:routing w:log",
    "address:selection_bias address:output_scales u32:layer u32:n_used u32:flags f32:scale "
    "u32:first_landing u32:n_landing u32:n_groups_used u32:first_id u32:logits_pitch "
    "u32:routing_pitch",
    "workgroup_size n_experts n_groups",
)

MAX_EXPERTS, MAX_USED = 1024, 32  # 4 KiB of keys in shared memory; slots in it
LOG_HEADER_WORDS = 4  # the first are the proof that `finish` leaves
RENORMALISE, SIGMOID, SHARED_GATE, GATHER = 1, 2, 4, 8


@dataclass(frozen=True)
class RouterShape:
    """Says how a layer routes.

    Scores are the softmax or sigmoid of the logits. With `n_groups` > 1 only experts of the
    `n_groups_used` best groups are used: those with the largest score (softmax, DeepSeek-V2,
    arXiv:2405.04434, section 2.1.3) or sum of two scores (sigmoid, DeepSeek-V3, arXiv:2412.19437).
    With `shared_gate` the logits have one more row, whose sigmoid is the shared expert's weight.
    """

    n_experts: int
    n_used: int
    gating: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    shared_gate: bool = False
    n_groups: int = 1
    n_groups_used: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.n_used <= min(self.n_experts, MAX_USED), self
        assert self.n_experts <= MAX_EXPERTS, self
        assert 1 <= self.n_groups_used <= self.n_groups, self
        assert self.n_experts % self.n_groups == 0, self
        assert self.n_used <= self.n_experts // self.n_groups * self.n_groups_used, self

    @classmethod
    def of(cls, experts: ExpertSpec) -> RouterShape:
        """Describe how a layer with these experts routes."""
        return cls(**{item.name: getattr(experts, item.name) for item in fields(cls)})

    @property
    def n_logits(self) -> int:
        return self.n_experts + int(self.shared_gate)

    @property
    def flags(self) -> int:
        return (
            RENORMALISE * self.renormalise
            | SIGMOID * (self.gating == "sigmoid")
            | SHARED_GATE * self.shared_gate
        )


@dataclass(frozen=True)
class Landing:
    """Describes landing places in the expert table: `n_places` a layer, behind all layers' entries.

    With `gather` an expert that is at home and has a place is read there, and its partner is its
    home; without, it is read at home, and its partner is its place.
    """

    n_layers: int
    n_places: int
    gather: bool = False

    def numbers(self, layer: int, n_experts: int) -> dict[str, int]:
        """Return where a layer's places are, as kernels name it."""
        first = self.n_layers * n_experts + layer * self.n_places
        return {"first_landing": first, "n_landing": self.n_places}


def routing_words(shape: RouterShape) -> int:
    """Count the routing tensor's words: ids and weights, then addresses and partners of two words.

    [n_used] each; with `shared_gate` the shared expert's weight behind them.
    """
    return shared_weight_word(shape.n_used) + int(shape.shared_gate)


def shared_weight_word(n_used: int) -> int:
    """Find the word of the shared expert's weight, behind all of the used ones."""
    return 6 * n_used


@dataclass(frozen=True)
class RoutingLog:
    """Lays out the log: a header, ids [n_layers][n_tokens][n_used], then two words for each.

    The two are its filled words [n_layers][n_tokens][n_used][2]: 1 + the expert's id where that
    half of its span (gate and up; down) was stored in a landing place, else 0. Layers are MoE
    layers. The tensor may have `room` for more words, those of a program with more rows.
    """

    n_layers: int
    n_used: int
    n_tokens: int = 1
    name: str = "log"
    room: int = 0

    @property
    def n_words(self) -> int:
        return LOG_HEADER_WORDS + 3 * self._n_ids

    @property
    def tensor(self) -> TensorRef:
        return TensorRef(self.name, max(self.n_words, self.room))

    @property
    def _layer_ids(self) -> int:
        return self.n_tokens * self.n_used

    @property
    def _n_ids(self) -> int:
        return self.n_layers * self._layer_ids

    def ids(self, layer: int) -> Range:
        """Find the ids of all tokens in a layer."""
        start = LOG_HEADER_WORDS + layer * self._layer_ids
        return self.tensor.words(start, self._layer_ids)

    def filled(self, layer: int) -> Range:
        """Find the filled words of all tokens in a layer."""
        start = LOG_HEADER_WORDS + self._n_ids + 2 * layer * self._layer_ids
        return self.tensor.words(start, 2 * self._layer_ids)

    def views(self, words: NDArray[np.uint32]) -> LogViews:
        """View the words of the log by token, layer and used expert."""
        ids, filled = np.split(words[LOG_HEADER_WORDS : self.n_words], [self._n_ids])
        shape = (self.n_layers, self.n_tokens, self.n_used)
        return LogViews(ids.reshape(shape).swapaxes(0, 1), filled.reshape(*shape, 2).swapaxes(0, 1))


class LogViews(NamedTuple):
    """Holds the words of a log, as they lie; writable if these are."""

    ids: NDArray[np.uint32]  # [n_tokens, n_layers, n_used]
    filled: NDArray[np.uint32]  # [n_tokens, n_layers, n_used, 2]


class RouterTensors(NamedTuple):
    """Holds what every router of a model reads and writes."""

    logits: TensorRef
    params: TensorRef  # of the token, with the address of the table to look up in
    routing: TensorRef
    log: RoutingLog

    def numbers(self, layer: int) -> dict[str, int]:
        """Return where a kernel finds rows, as it names it."""
        pitches = {"logits_pitch": self.logits.row_words, "routing_pitch": self.routing.row_words}
        return {"first_id": self.log.ids(layer).start // 4, **pitches}

    def bound(self, shape: RouterShape, layer: int, n_rows: int) -> dict[str, Bound]:
        """Bind what is read and written of the first rows."""
        return {
            "logits": self.logits.rows(n_rows, 0, shape.n_logits),
            "params": self.params.bound,
            "routing": self.routing.rows(n_rows, 0, routing_words(shape)),
            "log": Bound(self.log.tensor, self.log.ids(layer)),
        }


class ExpertNumbers(NamedTuple):
    """Holds addresses of a number for each expert, f32 [n_experts]; 0: there are none."""

    selection_bias: int = 0  # added to scores, to choose by
    output_scales: int = 0  # what experts give is multiplied by them

    def ranges(self, n_experts: int) -> tuple[Range, ...]:
        return tuple(memory_range(address, 4 * n_experts) for address in self if address)


NO_NUMBERS = ExpertNumbers()


def router_topk(
    op: OpContext,
    shape: RouterShape,
    layer: int,
    tensors: RouterTensors,
    table: Range,
    landing: Landing,
    numbers: ExpertNumbers = NO_NUMBERS,
) -> None:
    """Append routing = n_used experts of largest logit, weights, addresses, partners; log = ids.

    Of each row of the batch; only experts of the one that `params` names may land. With a selection
    bias they are those of largest score + bias, while weights are made of scores alone
    (DeepSeek-V3, arXiv:2412.19437, eq. 16). Each weight is at last multiplied by its expert's
    output scale, if there are any.
    `table` is the memory of the expert tables, uvec2 [n_layers][n_experts] each and the `landing`
    places behind, of which the one named in `params` is read. `layer` counts MoE layers as the
    table and the log do.
    """
    n_entries = landing.n_layers * (shape.n_experts + landing.n_places)
    assert op.n_rows <= tensors.log.n_tokens
    assert layer < landing.n_layers and 8 * n_entries <= table.end - table.start
    op.append(
        ROUTER_TOPK.dispatch(
            f"router_topk{op.tuning.reduce_suffix}",
            {
                **vars(op.tuning),
                **vars(shape),
                **tensors.numbers(layer),
                **landing.numbers(layer, shape.n_experts),
                **numbers._asdict(),
                "layer": layer,
                "flags": shape.flags | GATHER * landing.gather,
            },
            tensors.bound(shape, layer, op.n_rows),
            (1, 1, op.n_rows),
            op.label,
            reads=(table, *numbers.ranges(shape.n_experts)),
        )
    )
