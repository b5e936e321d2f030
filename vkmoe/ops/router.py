"""The router's choice of experts, their weights and addresses, and the routing log.

Shader: router_topk.comp. Twin: vkmoe/reference/router.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef
from vkmoe.ops.tuning import Tuning

__all__ = [
    "LOG_HEADER_WORDS",
    "Landing",
    "RouterShape",
    "filled_words",
    "log_words",
    "router_topk",
    "routing_words",
]

ROUTER_TOPK = kernel(
    "router_topk",
    "r:logits r:params w:routing w:log",
    "address:shared_address u32:layer u32:n_experts u32:n_used u32:flags f32:scale "
    "u32:first_landing u32:n_landing",
    "workgroup_size",
)

MAX_EXPERTS, MAX_USED = 1024, 32  # shared arrays of router_topk.comp
LOG_HEADER_WORDS = 4  # word 0 is the serial number that `finish` writes
RENORMALISE, SIGMOID, SHARED, SHARED_GATE, GATHER = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class RouterShape:
    """How a layer routes.

    With `shared_gate` the logits have one more row, the shared expert's gate; without, a shared
    expert has weight 1.
    """

    n_experts: int
    n_used: int
    gating: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    shared: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        assert 1 <= self.n_used <= min(self.n_experts, MAX_USED), self
        assert self.n_experts <= MAX_EXPERTS, self
        assert self.shared or not self.shared_gate, self

    @property
    def n_slots(self) -> int:
        """Experts computed per token; the shared expert is the last slot."""
        return self.n_used + int(self.shared)

    @property
    def n_logits(self) -> int:
        return self.n_experts + int(self.shared_gate)

    @property
    def flags(self) -> int:
        return (
            RENORMALISE * self.renormalise
            | SIGMOID * (self.gating == "sigmoid")
            | SHARED * self.shared
            | SHARED_GATE * self.shared_gate
        )


@dataclass(frozen=True)
class Landing:
    """The landing places in the expert table: `n_places` a layer, behind the entries of all layers.

    With `gather` an expert that is at home and has a place is read there, and its partner is its
    home; without, it is read at home, and its partner is its place.
    """

    n_layers: int
    n_places: int
    gather: bool = False


def routing_words(shape: RouterShape) -> int:
    """Words of the routing tensor: ids and weights, then addresses and partners of two words.

    [n_slots] each.
    """
    return 6 * shape.n_slots


def log_words(n_layers: int, n_used: int) -> int:
    """Words of the log tensor: header, ids [n_layers][n_used], filled words of all layers."""
    return LOG_HEADER_WORDS + 3 * n_layers * n_used


def filled_words(log: TensorRef, layer: int, n_used: int) -> Range:
    """What a layer's misses left in landing places: two words a used slot, [n_layers][n_used][2].

    Each is 1 + the expert's id where that half of the span was stored (gate and up; down), else 0.
    """
    n_ids = (log.n_words - LOG_HEADER_WORDS) // 3
    return log.words(LOG_HEADER_WORDS + n_ids + 2 * layer * n_used, 2 * n_used)


def router_topk(
    program: Program,
    tuning: Tuning,
    shape: RouterShape,
    layer: int,
    logits: TensorRef,
    params: TensorRef,
    table: Range,
    routing: TensorRef,
    log: TensorRef,
    label: str,
    shared_address: int = 0,
    landing: Landing | None = None,
) -> None:
    """routing = the n_used experts of largest logit, weights, addresses, partners; log = their ids.

    `table` is the memory of the expert tables, uvec2 [n_layers][n_experts] each and the `landing`
    places behind, of which the one named in `params` is read. `layer` counts MoE layers as the
    table and the log do. Without `landing` no slot has a partner.
    """
    assert logits.n_words >= shape.n_logits and routing.n_words >= routing_words(shape)
    landing = landing or Landing(layer + 1, 0)
    n_entries = landing.n_layers * (shape.n_experts + landing.n_places)
    assert layer < landing.n_layers and 8 * n_entries <= table.end - table.start
    assert bool(shared_address) == shape.shared
    log_range = log.words(LOG_HEADER_WORDS + layer * shape.n_used, shape.n_used)
    program.append(
        ROUTER_TOPK.dispatch(
            f"router_topk{tuning.reduce_suffix}",
            {"workgroup_size": tuning.workgroup_size},
            {"logits": logits, "params": params, "routing": routing, "log": log},
            {
                "shared_address": shared_address,
                "layer": layer,
                "n_experts": shape.n_experts,
                "n_used": shape.n_used,
                "flags": shape.flags | GATHER * landing.gather,
                "scale": shape.scale,
                "first_landing": landing.n_layers * shape.n_experts + layer * landing.n_places,
                "n_landing": landing.n_places,
            },
            (1, 1, 1),
            label,
            ranges={
                "logits": logits.words(0, shape.n_logits),
                "routing": routing.words(0, routing_words(shape)),
                "log": log_range,
            },
            memory_reads=(table,),
        )
    )
