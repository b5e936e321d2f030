"""The metadata of a synthetic model: hyperparameters as converters write them, and a vocabulary."""

from __future__ import annotations

from tools.gguf_writer import MetadataValue
from tools.synthetic.mixes import MIXES
from tools.synthetic.presets import Preset
from tools.synthetic.vocabulary import vocabulary
from vkmoe.bench.shapes import ROTARY_SHARE
from vkmoe.models.arch.gemma4 import WINDOW_PERIOD
from vkmoe.models.arch.qwen35 import FULL_INTERVAL

NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
SOFTMAX = 1
LOGIT_CAP = 30.0
WINDOW_BASE = 1e4  # of the rotary embedding in layers with a window, where others have their own
Values = dict[str, MetadataValue]


def model_metadata(name: str, shape: Preset, mix: str) -> Values:
    """Hyperparameters and vocabulary."""
    tokens, merges = vocabulary(shape.n_tokens)
    end = shape.n_tokens - 1
    own = _common(shape) | _attention(shape) | _delta(shape) | _experts(shape) | _scaling(shape)
    return {
        "general.architecture": shape.architecture,
        "general.type": "model",
        "general.name": f"synthetic {name}",
        "general.file_type": MIXES[mix].file_type,
        "general.quantization_version": 2,
        **{f"{shape.architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL_TOKEN] * end + [CONTROL_TOKEN],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def _common(shape: Preset) -> Values:
    values: Values = {
        "block_count": shape.n_layers + shape.n_ahead_layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.dense_size or shape.beside_size or shape.expert_size,
        "expert_feed_forward_length": shape.expert_size,
        "expert_count": shape.n_experts,
        "expert_used_count": shape.n_experts_used,
    }
    if shape.n_ahead_layers:
        values["nextn_predict_layers"] = shape.n_ahead_layers
    if shape.architecture in ("olmoe", "llama"):  # whose experts have no key of their own
        del values["expert_feed_forward_length"]
    if shape.architecture == "llama":
        values |= {"vocab_size": shape.n_tokens, "rope.dimension_count": shape.head_size}
    return values


def _attention(shape: Preset) -> Values:
    values: Values = {"attention.head_count": shape.n_heads}
    latent = shape.latent
    if latent is not None:
        values |= {
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": latent.kv_rank,
            "attention.key_length": latent.kv_rank + latent.rope_size,
            "attention.value_length": latent.kv_rank,
            "attention.key_length_mla": shape.head_size + latent.rope_size,
            "attention.value_length_mla": latent.value_size,
            "rope.dimension_count": latent.rope_size,
        }
    else:
        values["attention.head_count_kv"] = shape.n_kv_heads
        if shape.head_size * shape.n_heads != shape.hidden or "qwen3" in shape.architecture:
            values["attention.key_length"] = shape.head_size
            values["attention.value_length"] = shape.head_size
    if shape.window:
        values["attention.sliding_window"] = shape.window
    if (whole := shape.whole) is not None:
        sees_all = [shape.ends_period(layer, WINDOW_PERIOD) for layer in range(shape.n_layers)]
        counts = [whole.n_kv_heads if wide else shape.n_kv_heads for wide in sees_all]
        values |= {
            "attention.head_count_kv": counts,
            "attention.sliding_window_pattern": [not wide for wide in sees_all],
            **dict.fromkeys(("attention.key_length", "attention.value_length"), whole.head_size),
            "attention.key_length_swa": shape.head_size,
            "attention.value_length_swa": shape.head_size,
            "rope.dimension_count": whole.head_size,
            "rope.dimension_count_swa": shape.head_size,
            "rope.freq_base_swa": WINDOW_BASE,
            "final_logit_softcapping": LOGIT_CAP,
        }
    few = ("olmoe", "llama", "gpt-oss")
    values["attention.layer_norm_rms_epsilon"] = 1e-5 if shape.architecture in few else 1e-6
    return values | {"rope.freq_base": shape.rope_base}


def _delta(shape: Preset) -> Values:
    if (delta := shape.delta) is None:
        return {}
    return {
        "full_attention_interval": min(FULL_INTERVAL, shape.n_layers),
        "rope.dimension_count": shape.head_size // ROTARY_SHARE[shape.architecture],
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": delta.n_taps,
        "ssm.state_size": delta.head_size,
        "ssm.group_count": delta.n_key_heads,
        "ssm.time_step_rank": delta.n_heads,
        "ssm.inner_size": delta.n_heads * delta.head_size,
    }


def _experts(shape: Preset) -> Values:
    if shape.architecture in ("qwen2moe", "qwen35moe"):
        return {"expert_shared_feed_forward_length": shape.shared_size}
    if shape.architecture == "deepseek2":
        return {
            "leading_dense_block_count": shape.n_dense_layers,
            "vocab_size": shape.n_tokens,
            "expert_shared_count": shape.shared_size // shape.expert_size,
            "expert_weights_scale": 1.0,
            "expert_gating_func": SOFTMAX,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        }
    return {}


def _scaling(shape: Preset) -> Values:
    if shape.yarn == 1:
        return {}
    values: Values = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": shape.yarn,
        "rope.scaling.original_context_length": round(shape.context / shape.yarn),
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }
    if shape.architecture == "deepseek2":
        values["rope.scaling.yarn_log_multiplier"] = 0.0707
    return values
