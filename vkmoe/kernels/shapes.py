"""This module holds what decides how large the kernels of a model are, for measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.facts import Activation, LatentSpec, RopeSpec
from vkmoe.kernels.router.operations import RouterShape
from vkmoe.quants import device_row_bytes

__all__ = ["TINY", "KernelShapes"]
GATHERED_TYPE = "Q8_0"


@dataclass(frozen=True)
class KernelShapes:
    """Holds what decides how large a model's kernels are; sizes in elements."""

    name: str
    width: int
    qkv: tuple[int, ...]  # rows of the matrices that read the same normed input
    o_columns: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm: Literal["none", "per_head", "full_width"]
    router: RouterShape
    inner: int  # of an expert
    n_vocab: int
    rope_style: Literal["neox", "normal"] = "neox"
    shared_inner: int = 0  # of a shared expert; 0: none
    contexts: tuple[int, ...] = (512, 4096)
    biased: bool = False  # all matrices but the head's
    activation: Activation = "silu"
    window: int = 0  # of every other layer; 0: all positions are seen
    sinks: bool = False
    latent: LatentSpec | None = None
    types: frozenset[tuple[str, str]] = frozenset()  # role and type of its matrices; empty: any

    @property
    def span_bytes(self) -> int:
        """Count the bytes of an expert whose three matrices are of GATHERED_TYPE."""
        of_width, of_inner = (device_row_bytes(GATHERED_TYPE, n) for n in (self.width, self.inner))
        return 2 * self.inner * of_width + self.width * of_inner


TINY = KernelShapes(
    *("tiny", 512, (256, 128, 128), 256, 4, 2, 64, "per_head"),
    *(RouterShape(8, 2), 256, 1000, "neox", 512, (64,)),
    latent=LatentSpec(4, kv_rank=256, nope_dim=256, value_dim=64, rope=RopeSpec(32)),
)
