"""Metadata and factors that cannot be, of every architecture: one line that says what is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import Tensor, model_path, rewrite
from tests.models.tiny_specs import changed, spec_of
from vkmoe.errors import VkmoeError

WRONG = [
    ("olmoe_plain", {"attention__clamp_kqv": 8.0}, "unknown metadata"),
    ("olmoe_plain", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("llama_plain", {"expert_used_count": 2}, "expert_used_count is 2"),
    ("llama_plain", {"attention__key_length": 12, "attention__value_length": 12}, "multiple of 8"),
    ("llama_plain", {"attention__sliding_window": 64}, "unknown metadata"),
    ("llama_plain", {"rope__scaling__type": "longrope"}, "rope_factors_short.weight is missing"),
    ("llama_plain", {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ("llama_plain", {"rope__scaling__attn_factor": 1.5}, "attn_factor is 1.5"),
    ("llama_rope_freqs", {"rope__dimension_count": 16}, "expected [8]"),
    ("llama_rope_freqs", {"rope__scaling__type": "longrope"}, "rope_factors_short"),
    ("llama_longrope_long", {"rope__scaling__type": "none"}, "not known without yarn or longrope"),
    (
        "llama_longrope_long",
        {"rope__scaling__type": "none", "rope__scaling__attn_factor": None},
        "tensors vkmoe does not know",
    ),
    ("llama_longrope_long", {"rope__scaling__attn_factor": -1.0}, "must not be negative"),
    ("llama_plain", {"feed_forward_length": [64]}, "feed_forward_length is an array of 1: the"),
    ("llama_plain", {"feed_forward_length": [64, 64, 64]}, "the model has 2 layers"),
    ("llama_plain", {"feed_forward_length": [64, 0]}, "an array with 0: must be between 1 and"),
    ("llama_plain", {"feed_forward_length": [64.0, 64.0]}, "must hold whole numbers"),
    ("llama_plain", {"feed_forward_length": [64, 96]}, "blk.1.ffn_gate.weight has shape"),
    ("llama_plain", {"attention__head_count": [1, 5000]}, "an array with 5000"),
    ("dense_tied", {"attention__head_count_kv": [2, 3]}, "heads must be a multiple"),
    ("gptoss_plain", {"attention__sliding_window_pattern": [1, 0]}, "must hold true or false"),
    ("gptoss_plain", {"attention__sliding_window_pattern": [True]}, "the model has 2 layers"),
    ("mixtral_plain", {"expert_used_count": 9}, "9 experts used of 8"),
    ("mixtral_one_by_one", {"expert_count": 4}, "blk.0.ffn_gate.3.weight is missing"),
    ("mixtral_one_by_one", {"expert_count": 2, "expert_used_count": 1}, "expected [2, 32]"),
    ("qwen2moe_plain", {"expert_shared_feed_forward_length": 32}, "expected [32, 32]"),
    ("gptoss_plain", {"attention__sliding_window": 0}, "between 1 and"),
    ("gptoss_plain", {"attention__sliding_window": None}, "no metadata key"),
    ("gptoss_plain", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("deepseek2_v3", {"attention__key_length_mla": 16}, "heads of 0 + 16"),
    ("deepseek2_v3", {"attention__key_length_mla": 40}, "heads of 24 + 16"),
    ("deepseek2_v3", {"attention__key_length": 40}, "follows from the other keys"),
    ("deepseek2_v3", {"attention__head_count_kv": 3}, "1 follows from the other keys"),
    ("deepseek2_v3", {"attention__kv_lora_rank": 0}, "between 1 and"),
    ("deepseek2_v3", {"attention__kv_lora_rank": 2048}, "between 1 and 1024"),
    ("deepseek2_v3", {"attention__q_lora_rank": None}, "attn_q.weight is missing"),
    ("deepseek2_v3", {"rope__dimension_count": 2}, "66 follows from the other keys"),
    ("deepseek2_v3", {"rope__dimension_count": None}, "no metadata key"),
    ("deepseek2_v3", {"leading_dense_block_count": 99}, "must be at most"),
    ("deepseek2_v3", {"expert_group_count": 5}, "groups of"),
    ("deepseek2_v3", {"expert_group_count": 1 << 20}, "must be at most"),
    ("deepseek2_v3", {"expert_group_used_count": 99}, "must be at most"),
    ("deepseek2_v3", {"expert_shared_count": 3}, "shexp.weight has shape"),
    ("deepseek2_v3", {"expert_gating_func": 3}, "expert_gating_func is 3"),
    ("deepseek2_v3", {"nextn_predict_layers": 99}, "must be at most"),
    ("deepseek2_v3", {"block_count": 99, "nextn_predict_layers": 1}, "is missing"),
    ("glm4moe_odd", {"expert_gating_func": 1}, "expert_gating_func is 1"),
    ("glm4moe_odd", {"leading_dense_block_count": 3}, "must be at most 2"),
    ("glm4moe_odd", {"leading_dense_block_count": 0}, "blk.0.ffn_gate_exps.weight is missing"),
    ("glm4moe_odd", {"nextn_predict_layers": 4}, "must be at most 3"),
    ("glm4moe_odd", {"expert_shared_count": 0}, "tensors vkmoe does not know: 'blk.1.ffn_down_sh"),
    ("glm4moe_odd", {"expert_group_count": 2}, "in 1 of 2 groups of 7"),
    ("glm4moe_odd", {"rope__dimension_count": 65}, "between 1 and 64"),
    ("glm4moe_odd", {"attention__sliding_window": 8}, "unknown metadata"),
    ("ernie45moe_odd", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2"),
    ("ernie45moe_odd", {"interleave_moe_layer_step": 0}, "must be between 1 and"),
    ("ernie45moe_odd", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("ernie45moe_odd", {"expert_shared_feed_forward_length": 32}, "expected [32, 32]"),
    ("ernie45moe_odd", {"leading_dense_block_count": 3}, "must be at most 2"),
    ("dots1_odd", {"expert_gating_func": 1}, "expert_gating_func is 1"),
    ("dots1_odd", {"expert_group_used_count": 2}, "must be at most 1"),
    ("dots1_odd", {"attention__head_count_kv": 1}, "attn_k.weight has shape"),
    ("minimaxm2_odd", {"expert_gating_func": 1}, "expert_gating_func is 1"),
    ("minimaxm2_odd", {"expert_shared_count": 1}, "unknown metadata"),
    ("minimaxm2_odd", {"rope__dimension_count": 31}, "must be even"),
    ("bailingmoe2_odd", {"expert_gating_func": 1}, "expert_gating_func is 1"),
    ("bailingmoe2_odd", {"expert_group_count": 5}, "groups of 12"),
    ("bailingmoe2_odd", {"expert_shared_feed_forward_length": 64}, "expected [128, 96]"),
    ("bailingmoe2_odd", {"attention__head_count_kv": 3}, "attn_qkv.weight has shape"),
    ("bailingmoe2_odd", {"leading_dense_block_count": 3}, "must be at most 2"),
    ("gemma4_odd", {"attention__value_length_swa": 64}, "keys have 32"),
    ("gemma4_odd", {"rope__dimension_count_swa": 31}, "must be even"),
    ("gemma4_odd", {"attention__sliding_window_pattern": [True] * 3}, "has 4 layers"),
    ("hunyuanmoe_odd", {"expert_shared_feed_forward_length": 64}, "expected [64, 32]"),
    ("hunyuanmoe_odd", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("hunyuanmoe_odd", {"rope__scaling__type": "yarn"}, "rope.scaling.type is yarn"),
    ("hunyuanmoe_odd", {"feed_forward_length": [32, 64, 32]}, "feed_forward_length"),
    ("gemma4_dense_inputs", {"embedding_length_per_layer_input": 32}, "inp_gate.weight has shape"),
    ("gemma4_dense_inputs", {"embedding_length_per_layer_input": None}, "vkmoe does not know"),
    ("gemma4_odd", {"embedding_length_per_layer_input": 32}, "inp_gate.weight is missing"),
    ("gemma4_dense_inputs", {"attention__shared_kv_layers": 2}, "blk.4.attn_k.weight is missing"),
    ("gemma4_dense_inputs", {"attention__shared_kv_layers": 6}, "layer 1 has none before it"),
    ("gemma4_dense_inputs", {"attention__shared_kv_layers": 8}, "layer 0 has none before it"),
    ("gemma4_dense_inputs", {"attention__head_count_kv": [1] * 4 + [2] * 3}, "layer 4 has none"),
    ("gemma4_dense_inputs", {"feed_forward_length": 64}, "expected [64, 32]"),
    ("hyv3_odd", {"expert_gating_func": 1}, "expert_gating_func is 1"),
    ("hyv3_odd", {"expert_shared_feed_forward_length": 32}, "expected [32, 32]"),
    ("hyv3_odd", {"nextn_predict_layers": 4}, "must be at most 3"),
    ("deepseek32_odd", {"attention__indexer__top_k": 0}, "must be between 1 and"),
    ("deepseek32_odd", {"attention__indexer__top_k": None}, "no metadata key"),
    ("deepseek32_odd", {"attention__indexer__block_size": 64}, "unknown metadata"),
    ("glmdsa_odd", {"expert_gating_func": 3}, "expert_gating_func is 3"),
    ("deepseek2_v3", {"attention__indexer__top_k": 64}, "unknown metadata"),
    ("mistral4_odd", {"attention__temperature_length": None}, "no metadata key"),
    ("mistral4_odd", {"attention__temperature_length": 0}, "must be between 1 and"),
    ("mistral4_odd", {"attention__temperature_scale": -1.0}, "must not be negative"),
    ("mistral4_top1", {"expert_group_count": 2}, "mistral4.expert_group_count is 2"),
    ("deepseek2_v3", {"attention__temperature_scale": 0.1}, "unknown metadata"),
    ("deepseek2_lite", {"rope__scaling__yarn_log_multiplier": -1.0}, "must not be negative"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), WRONG)
def test_wrong_values_are_named(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(VkmoeError) as caught:
        changed(tmp_path, name, **changes)
    message = str(caught.value)
    assert words in message and "\n" not in message and str(tmp_path) in message
    assert caught.value.hint


@pytest.mark.parametrize(
    "values",
    [
        *([value] * 16 for value in (0.0, math.nan, math.inf, -1.0, 1e-30, 1e7, 9e19, -1e30)),
        [1.0] * 15,
    ],
)
def test_factors_that_cannot_be_are_refused(values: list[float], tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        data = np.array(values, np.float32)
        tensors["rope_freqs.weight"] = Tensor("F32", data.shape, data.view(np.uint8))

    with pytest.raises(VkmoeError, match="rope_freqs"):
        spec_of(rewrite(model_path("llama_rope_freqs"), tmp_path / "bad.gguf", change))
