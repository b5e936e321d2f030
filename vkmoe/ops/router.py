"""The router's choice of experts, their weights and addresses, and the routing log.

Shader: router_topk.comp. Twin: vkmoe/reference/router.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef
from vkmoe.ops.tuning import Tuning

__all__ = ["LOG_HEADER_WORDS", "RouterShape", "log_words", "router_topk", "routing_words"]

ROUTER_TOPK = kernel(
    "router_topk",
    "r:logits r:params w:routing w:log",
    "address:shared_address u32:layer u32:n_experts u32:n_used u32:flags f32:scale",
    "workgroup_size",
)

MAX_EXPERTS, MAX_USED = 1024, 32  # shared arrays of router_topk.comp
LOG_HEADER_WORDS = 4  # word 0 is the serial number that `finish` writes
RENORMALISE, SIGMOID, SHARED, SHARED_GATE = 1, 2, 4, 8


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


def routing_words(shape: RouterShape) -> int:
    """Words of the routing tensor: ids, weights, and addresses of two words, [n_slots] each."""
    return 4 * shape.n_slots


def log_words(n_layers: int, n_used: int) -> int:
    """Words of the log tensor: the header, then the chosen ids [n_layers][n_used]."""
    return LOG_HEADER_WORDS + n_layers * n_used


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
) -> None:
    """routing = the n_used experts of largest logit, their weights and addresses; log = their ids.

    `table` is the memory of the expert tables, uvec2 [n_layers][n_experts] each, of which the one
    named in `params` is read. `layer` counts MoE layers as the table and the log do.
    """
    assert logits.n_words >= shape.n_logits and routing.n_words >= routing_words(shape)
    assert (layer + 1) * shape.n_experts * 8 <= table.end - table.start
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
                "flags": shape.flags,
                "scale": shape.scale,
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
