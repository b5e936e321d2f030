"""Which type each tensor of a mixture has, about as llama.cpp chooses them."""

from __future__ import annotations

from typing import NamedTuple

from vkmoe.quants.types import TYPES


def _is_important(layer: int, n_layers: int) -> bool:
    """Say whether llama.cpp's mixtures ending in _M give a layer more bits: about half of them.

    The first and the last eighth, and every third between them (`use_more_bits` of llama.cpp).
    """
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


class Mix(NamedTuple):
    """The types of a mixture by name; `file_type` is a label only."""

    most: str
    more_bits: str  # of values and what leaves a feed-forward block
    output: str
    file_type: int
    experts: str = ""  # "": as the rest
    in_some: bool = False  # more bits in about half of the layers alone


MIXES = {
    "iq2_xxs": Mix("IQ2_XXS", "IQ2_S", "Q5_K", 19),
    "iq3_xxs": Mix("IQ3_XXS", "IQ3_S", "Q5_K", 23),
    "q2_k": Mix("Q2_K", "Q3_K", "Q6_K", 10),
    "q3_k_m": Mix("Q3_K", "Q4_K", "Q6_K", 12),
    "q4_0": Mix("Q4_0", "Q4_0", "Q6_K", 2),
    "iq4_nl": Mix("IQ4_NL", "Q5_K", "Q6_K", 25),
    "iq4_xs": Mix("IQ4_XS", "Q5_K", "Q6_K", 30),
    "mxfp4": Mix("Q8_0", "Q8_0", "Q8_0", 38, "MXFP4"),
    "q4_k_m": Mix("Q4_K", "Q6_K", "Q6_K", 15, in_some=True),
    "q5_k_m": Mix("Q5_K", "Q6_K", "Q6_K", 17, in_some=True),
    "q6_k": Mix("Q6_K", "Q6_K", "Q6_K", 18),
    "q8_0": Mix("Q8_0", "Q8_0", "Q8_0", 7),
    "f16": Mix("F16", "F16", "F16", 1),
    "bf16": Mix("BF16", "BF16", "BF16", 32),
    "f32": Mix("F32", "F32", "F32", 0),
}
MORE_BITS = ("attn_v", "attn_v_b", "ffn_down", "ffn_down_exps", "ffn_down_shexp")


def choose_type(mix: Mix, name: str, shape: tuple[int, ...], n_layers: int) -> str:
    """The type of the tensor `name`; whatever is added or decides who runs stays F32."""
    stem = name.split(".")[-2]
    if len(shape) == 1 or name.endswith(".bias") or stem in ("ffn_gate_inp", "ssm_conv1d"):
        return "F32"
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    more_bits = stem in MORE_BITS and (not mix.in_some or _is_important(layer, n_layers))
    kind = mix.more_bits if more_bits else mix.most
    if stem == "output":
        kind = mix.output
    if mix.experts and stem.endswith("_exps"):
        kind = mix.experts
    # llama.cpp would take other blocks of 32.
    return kind if shape[-1] % TYPES[kind].block_weights == 0 else "Q8_0"
