"""What a model fixes of its attention: heads and widths, what is seen, and the cache's layout.

Owns no kernel; attention.py and latent_attention.py run these, attention_split.py spreads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "MAX_CACHE_BYTES",
    "MAX_HEAD_DIM",
    "MAX_RANK",
    "MAX_ROPE_DIM",
    "ROPE_STYLES",
    "UNIT_DIMS",
    "AttentionShape",
    "LatentShape",
]

UNIT_DIMS = 8  # dims a lane loads at once; rows of the cache are whole units
# What the shaders have room for.
MAX_HEAD_DIM, MAX_RANK, MAX_ROPE_DIM = 256, 1024, 256
MAX_CACHE_BYTES = 1 << 32  # a cache of a layer is smaller
ROPE_STYLES = {"neox": 0, "normal": 1}  # as the shaders number them


@dataclass(frozen=True)
class AttentionShape:
    """Grouped heads. Rows of qkv are [n_heads*head_dim | n_kv_heads*head_dim | the same].

    A layer has a cache of keys and one of values, [n_kv_heads][context][head_dim] each.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    context: int  # positions in the cache
    rope_style: Literal["neox", "normal"]
    norm: Literal["none", "per_head", "full_width"]  # RMSNorm of q and k before RoPE
    eps: float
    scale: float
    kv_type: Literal["F16", "F32"]
    window: int = 0  # positions seen, the token's own included; 0 = all
    sinks: bool = False  # a learnt logit per head takes part in the softmax's denominator only

    def __post_init__(self) -> None:
        assert self.head_dim % UNIT_DIMS == 0 and UNIT_DIMS <= self.head_dim <= MAX_HEAD_DIM, self
        assert self.n_heads % self.n_kv_heads == 0, self
        assert self.rotary_dim % 2 == 0 and 2 <= self.rotary_dim <= self.head_dim, self
        assert self.context >= 1 and self.cache_bytes < MAX_CACHE_BYTES and self.window >= 0, self

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.n_heads // self.n_kv_heads

    @property
    def row_dim(self) -> int:
        """Width of what a query head is multiplied with."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's output."""
        return self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Bytes of the K cache of one layer; V has the same."""
        return self.n_kv_heads * self.context * self.head_dim * (2 if self.kv_type == "F16" else 4)

    @property
    def layer_cache_bytes(self) -> int:
        """Bytes of all caches of one layer."""
        return 2 * self.cache_bytes

    @property
    def rope_bytes(self) -> int:
        """Bytes of the (cos, sin) table [context][rotary_dim / 2], f32 pairs."""
        return self.context * self.rotary_dim * 4


@dataclass(frozen=True)
class LatentShape:
    """Heads that share one compressed row per position (DeepSeek-V2, arXiv:2405.04434, 2.1).

    A row [kv_rank | rope_dim] is key of all heads, and its first kv_rank dims are the value: k and
    v up-projections are absorbed into the query and the output. A layer has one cache [context]
    [kv_rank + rope_dim]. A head of the raw q is [nope_dim | rope_dim].
    """

    n_heads: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    context: int  # positions in the cache
    eps: float  # of the RMSNorm of the first kv_rank dims
    scale: float
    kv_type: Literal["F16", "F32"]
    rope_style: Literal["neox", "normal"] = "normal"

    def __post_init__(self) -> None:
        assert self.kv_rank % UNIT_DIMS == 0 and UNIT_DIMS <= self.kv_rank <= MAX_RANK, self
        assert self.rope_dim % UNIT_DIMS == 0 and UNIT_DIMS <= self.rope_dim <= MAX_ROPE_DIM, self
        assert self.n_heads >= 1 and self.nope_dim >= 0, self
        assert self.context >= 1 and self.cache_bytes < MAX_CACHE_BYTES, self

    @property
    def group(self) -> int:
        """Query heads that share a row: all."""
        return self.n_heads

    @property
    def row_dim(self) -> int:
        """Width of a row of the cache."""
        return self.kv_rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's output."""
        return self.kv_rank

    @property
    def q_width(self) -> int:
        """Words of the raw q."""
        return self.n_heads * (self.nope_dim + self.rope_dim)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the one cache of one layer."""
        return self.context * self.row_dim * (2 if self.kv_type == "F16" else 4)

    @property
    def layer_cache_bytes(self) -> int:
        """Bytes of all caches of one layer."""
        return self.cache_bytes

    @property
    def rope_bytes(self) -> int:
        """Bytes of the (cos, sin) table [context][rope_dim / 2], f32 pairs."""
        return self.context * self.rope_dim * 4
