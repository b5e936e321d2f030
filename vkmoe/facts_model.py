"""What a model file says of its shape; sizes in elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ExpertSpec", "LatentSpec", "ModelSpec", "RopeSpec"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. `style`: neox pairs element i with i + dim/2, normal with i + 1.

    `scaling` yarn follows Peng et al. 2023 (arXiv:2309.00071); linear divides positions; longrope
    (Ding et al. 2024, arXiv:2402.13753) divides each pair's frequency by a factor of its own, from
    `long_factors` where the context is longer than the original one.
    """

    dim: int
    base: float = 10000.0
    style: Literal["neox", "normal"] = "neox"
    scaling: Literal["none", "linear", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None  # None: yarn's own 0.1 ln(factor) + 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's ramp begins and ends at whole pairs
    factors: tuple[float, ...] = ()  # [dim / 2] frequencies are divided by these; () = by none
    long_factors: tuple[float, ...] = ()  # [dim / 2]


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what is cached is compressed.

    A head's query and key have `nope_dim` elements without a position and `rope_dim` that rotate.
    """

    kv_rank: int  # of the compressed keys and values
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int = 0  # of the compressed queries; 0: they are not

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row(self) -> int:
        """Elements cached for a position."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class ExpertSpec:
    """The routed experts of a model; `n_used` of `n_experts` run for each token.

    With `n_groups` above 1 only experts of the `n_groups_used` best groups can be chosen.
    """

    n_experts: int
    n_used: int
    width: int  # rows of gate and up
    renormalise: bool = True
    scale: float = 1.0
    gating: Literal["softmax", "sigmoid"] = "softmax"
    shared_width: int = 0  # of the shared expert, which every token uses; 0: there is none
    shared_gate: bool = False  # its weight is the sigmoid of a logit; else 1
    router_bias: bool = False  # added to the logits
    selection_bias: bool = False  # added to the scores to choose by, not to the weights
    biases: bool = False  # of gate, up and down
    n_groups: int = 1
    n_groups_used: int = 1


@dataclass(frozen=True)
class ModelSpec:
    """What a model file says of its shape; sizes in elements.

    With `latent`, `head_dim` is that of a head's query and `n_kv_heads` is 1.
    """

    architecture: str
    name: str
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    qk_norm: Literal["none", "per_head", "full_width"]
    feed_forward_width: int
    experts: ExpertSpec | None
    tied_embeddings: bool
    n_dense_layers: int = 0  # the first ones of a model with experts that have none
    n_ahead_layers: int = 0  # behind the others, to guess tokens ahead with: they are left out
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    feed_forward_bias: bool = False  # of gate, up and down in layers without experts
    sinks: bool = False  # a logit per head that takes part in the softmax alone
    windows: tuple[int, ...] = ()  # positions each layer sees, 0 = all; () = all in every layer
    activation: Literal["silu", "swiglu_oai"] = "silu"
    latent: LatentSpec | None = None
    attention_scale: float = 0.0  # of the dot products; 0: head_dim ** -0.5

    @property
    def qkv_width(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def attention_width(self) -> int:
        """Elements of what the output projection reads."""
        value_dim = self.latent.value_dim if self.latent else self.head_dim
        return self.n_heads * value_dim

    @property
    def n_caches(self) -> int:
        """Of a layer: keys and values, or what both are compressed to."""
        return 1 if self.latent else 2

    @property
    def cache_row(self) -> int:
        """Elements that each cache of a layer holds of a position."""
        return self.latent.row if self.latent else self.n_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.n_dense_layers

    def window(self, layer: int) -> int:
        """Positions a layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0
