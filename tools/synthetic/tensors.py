"""Which tensors a model of some shape has, in the order of the file."""

from __future__ import annotations

from dataclasses import replace

from tools.gguf_writer import describe_tensor
from tools.synthetic.mixes import MIXES, choose_type
from tools.synthetic.presets import Preset
from vkmoe.bench.shapes import LatentSizes
from vkmoe.gguf_file.header import TensorInfo
from vkmoe.models.arch.gemma4 import WINDOW_PERIOD
from vkmoe.models.arch.qwen35 import FULL_INTERVAL

Shapes = dict[str, tuple[int, ...]]


def tensor_list(shape: Preset, mix: str) -> list[TensorInfo]:
    """Every tensor of the model, in file order."""
    shapes: Shapes = {"token_embd.weight": (shape.n_tokens, shape.hidden)}
    for index in range(shape.n_layers + shape.n_ahead_layers):
        mixer = _delta(shape, index) or _windowed(shape, index) or _attention(shape)
        block = mixer | _feed_forward(shape, index < shape.n_dense_layers)
        block |= _ahead(shape) if index >= shape.n_layers else {}
        shapes |= {f"blk.{index}.{name}": size for name, size in block.items()}
    shapes |= {"output_norm.weight": (shape.hidden,)}
    chosen, typed_as = MIXES[mix], {}
    if shape.tied:  # llama.cpp gives them the type of the output
        typed_as["token_embd.weight"] = "output.weight"
    else:
        shapes |= {"output.weight": (shape.n_tokens, shape.hidden)}
    return [
        describe_tensor(
            name, choose_type(chosen, typed_as.get(name, name), size, shape.n_layers), size
        )
        for name, size in shapes.items()
    ]


def _attention(shape: Preset) -> Shapes:
    if shape.latent is not None:
        return _latent(shape, shape.latent)
    q_size, kv_size = shape.n_heads * shape.head_size, shape.n_kv_heads * shape.head_size
    block: Shapes = {
        "attn_norm.weight": (shape.hidden,),
        "attn_q.weight": (q_size, shape.hidden),
        "attn_k.weight": (kv_size, shape.hidden),
        "attn_v.weight": (kv_size, shape.hidden),
        "attn_output.weight": (shape.hidden, q_size),
    }
    heads = shape.head_size, shape.head_size
    norms = {"qwen3moe": heads, "qwen35moe": heads, "gemma4": heads, "olmoe": (q_size, kv_size)}
    for name, width in zip("qk", norms.get(shape.architecture, ()), strict=False):
        block[f"attn_{name}_norm.weight"] = (width,)
    biased = {"qwen2moe": ("q", "k", "v"), "gpt-oss": ("q", "k", "v", "output")}
    for name in biased.get(shape.architecture, ()):
        block[f"attn_{name}.bias"] = block[f"attn_{name}.weight"][:1]
    if shape.architecture == "gpt-oss":
        block["attn_sinks.weight"] = (shape.n_heads,)
    if shape.architecture == "qwen35moe":  # with gates
        block["attn_q.weight"] = (2 * q_size, shape.hidden)
    return block


def _windowed(shape: Preset, index: int) -> Shapes:
    """The attention of a layer among others with other heads: of those that see everything, keys
    are values too."""
    if (whole := shape.whole) is None:
        return {}
    block: Shapes = {
        "post_attention_norm.weight": (shape.hidden,),
        "layer_output_scale.weight": (1,),
    }
    if not shape.ends_period(index, WINDOW_PERIOD):
        return _attention(shape) | block
    wide = replace(shape, n_kv_heads=whole.n_kv_heads, head_size=whole.head_size)
    block |= _attention(wide)
    del block["attn_v.weight"]
    return block


def _delta(shape: Preset, index: int) -> Shapes:
    """The tensors of a layer with a delta rule; none where it has attention."""
    delta, is_ahead = shape.delta, index >= shape.n_layers
    if delta is None or is_ahead or shape.ends_period(index, FULL_INTERVAL):
        return {}
    out, hidden = delta.n_heads * delta.head_size, shape.hidden
    n_channels = 2 * delta.n_key_heads * delta.head_size + out
    return {
        "attn_norm.weight": (hidden,),
        "attn_qkv.weight": (n_channels, hidden),
        "attn_gate.weight": (out, hidden),
        "ssm_beta.weight": (delta.n_heads, hidden),
        "ssm_alpha.weight": (delta.n_heads, hidden),
        "ssm_conv1d.weight": (n_channels, delta.n_taps),
        "ssm_a": (delta.n_heads,),
        "ssm_dt.bias": (delta.n_heads,),
        "ssm_norm.weight": (delta.head_size,),
        "ssm_out.weight": (hidden, out),
    }


def _ahead(shape: Preset) -> Shapes:
    """What a layer that guesses tokens has besides."""
    norms = ("enorm", "hnorm", "shared_head_norm")
    return {
        "nextn.eh_proj.weight": (shape.hidden, 2 * shape.hidden),
        **{f"nextn.{name}.weight": (shape.hidden,) for name in norms},
    }


def _latent(shape: Preset, latent: LatentSizes) -> Shapes:
    heads, rank = shape.n_heads, latent.kv_rank
    return {
        "attn_norm.weight": (shape.hidden,),
        "attn_q.weight": (heads * (shape.head_size + latent.rope_size), shape.hidden),
        "attn_kv_a_mqa.weight": (rank + latent.rope_size, shape.hidden),
        "attn_kv_a_norm.weight": (rank,),
        "attn_k_b.weight": (heads, rank, shape.head_size),
        "attn_v_b.weight": (heads, latent.value_size, rank),
        "attn_output.weight": (shape.hidden, heads * latent.value_size),
    }


def _feed_forward(shape: Preset, dense: bool) -> Shapes:
    others = ("gpt-oss", "qwen35moe")
    norm = "post_attention_norm" if shape.architecture in others else "ffn_norm"
    block: Shapes = {f"{norm}.weight": (shape.hidden,)}
    if dense:
        return block | _matrices(shape.hidden, shape.dense_size, "")
    block["ffn_gate_inp.weight"] = (shape.n_experts, shape.hidden)
    for name, size in _matrices(shape.hidden, shape.expert_size, "_exps").items():
        block[name] = (shape.n_experts, *size)
    if shape.architecture == "gpt-oss":
        for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            block[f"{name}.bias"] = block[f"{name}.weight"][:-1]
    if shape.architecture in ("qwen2moe", "qwen35moe"):
        block["ffn_gate_inp_shexp.weight"] = (shape.hidden,)
    if shape.shared_size:
        block |= _matrices(shape.hidden, shape.shared_size, "_shexp")
    if shape.beside_size:
        block |= _beside(shape)
        del block["ffn_gate_exps.weight"], block["ffn_up_exps.weight"]  # both in one
    return block


def _beside(shape: Preset) -> Shapes:
    """What comes with a dense block beside experts."""
    norms = ("post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    return {
        **_matrices(shape.hidden, shape.beside_size, ""),
        **{f"{name}.weight": (shape.hidden,) for name in norms},
        "ffn_gate_inp.scale": (shape.hidden,),
        "ffn_gate_up_exps.weight": (shape.n_experts, 2 * shape.expert_size, shape.hidden),
        "ffn_down_exps.scale": (shape.n_experts,),
    }


def _matrices(hidden: int, width: int, suffix: str) -> Shapes:
    """Gate, up and down of a feed-forward block."""
    return {
        f"ffn_gate{suffix}.weight": (width, hidden),
        f"ffn_up{suffix}.weight": (width, hidden),
        f"ffn_down{suffix}.weight": (hidden, width),
    }
