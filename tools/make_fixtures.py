"""Write the tiny random models of tests/fixtures/models and the logits they must give.

Owns: the expected logits, computed by Hugging Face transformers (float32, eager attention), which
shares no code with vkmoe.  Does not own the models themselves (fixture_models.py) nor the demo
model's references (make_demo_reference.py).

Per model two files: `NAME.gguf` and `NAME.npz` with
    tokens         int32 [n_tokens], the prompt
    logits         float32 [n_tokens, vocabulary]
    router_ids     int16 [layers, n_tokens, top_k], best expert first (MoE only)
    router_margin  float32 [layers, n_tokens], probability of the last chosen expert less that of
                   the first one left out; infinite where every expert is used (MoE only)
Seeds are searched for until no margin is below MIN_MARGIN, so that rounding cannot flip a choice.

Needs torch, transformers, gguf and numpy; no test needs the first two.  In the repository's root:
    python -m tools.make_fixtures [--out tests/fixtures/models]
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.fixture_models import MODELS, TinyModel, draw_weights, vocabulary, write_gguf

N_TOKENS = 24
MIN_MARGIN = 2e-3


def hf_config(model: TinyModel) -> Any:
    """The transformers configuration of the same model."""
    transformers = import_module("transformers")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling:
        rope |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "yarn":
        rope["original_max_position_embeddings"] = int(model.context / model.rope_factor)
    common: dict[str, Any] = {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ff,
        "vocab_size": len(vocabulary()),
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.eps,
        "tie_word_embeddings": model.tied,
        "rope_parameters": rope,
        "attn_implementation": "eager",
    }
    if not model.experts:
        return transformers.Qwen3Config(**common)
    return transformers.Qwen3MoeConfig(
        **common,
        moe_intermediate_size=model.ff,
        num_experts=model.experts,
        num_experts_per_tok=model.top_k,
        norm_topk_prob=model.norm_top_k,
        mlp_only_layers=[],
        experts_implementation="eager",
    )


def hf_state(model: TinyModel, weights: dict[str, NDArray[np.float32]]) -> dict[str, Any]:
    """`weights` under transformers' names, as torch tensors."""
    torch = import_module("torch")
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights.get("output.weight", weights["token_embd.weight"]),
    }
    for layer in range(model.layers):
        source, target = f"blk.{layer}", f"model.layers.{layer}"
        for ours, theirs in names.items():
            if f"{source}.{ours}.weight" in weights:
                state[f"{target}.{theirs}.weight"] = weights[f"{source}.{ours}.weight"]
        if model.experts:
            gate_up = [weights[f"{source}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
            state[f"{target}.mlp.experts.gate_up_proj"] = np.concatenate(gate_up, axis=1)
            state[f"{target}.mlp.experts.down_proj"] = weights[f"{source}.ffn_down_exps.weight"]
    return {name: torch.from_numpy(value) for name, value in state.items()}


def expected(
    model: TinyModel, weights: dict[str, NDArray[np.float32]], tokens: NDArray[np.int32]
) -> dict[str, NDArray[Any]]:
    """Run transformers on `tokens` and return the arrays of the .npz file."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(2)
    kind = transformers.Qwen3MoeForCausalLM if model.experts else transformers.Qwen3ForCausalLM
    network = kind(hf_config(model)).float().eval()
    network.load_state_dict(hf_state(model, weights), strict=True)
    probabilities: list[Any] = []
    for layer in network.model.layers if model.experts else []:
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, outputs: probabilities.append(outputs[0].softmax(-1))
        )
    with torch.no_grad():
        logits = network(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].numpy()
    result: dict[str, NDArray[Any]] = {"tokens": tokens, "logits": logits.astype(np.float32)}
    if model.experts:
        stacked = np.stack([p.numpy() for p in probabilities])  # [layers, tokens, experts]
        order = np.argsort(-stacked, axis=-1, kind="stable")
        ranked = np.take_along_axis(stacked, order, axis=-1)
        margin = np.full(stacked.shape[:2], np.inf, np.float32)
        if model.top_k < model.experts:
            margin = ranked[..., model.top_k - 1] - ranked[..., model.top_k]
        result["router_ids"] = order[..., : model.top_k].astype(np.int16)
        result["router_margin"] = margin.astype(np.float32)
    return result


def make(model: TinyModel, folder: Path) -> None:
    """Write both files of one model from the first seed without a router near-tie."""
    for seed in range(1000):
        weights = draw_weights(model, seed)
        tokens = np.random.default_rng(seed + 7).integers(0, len(vocabulary()), N_TOKENS)
        arrays = expected(model, weights, tokens.astype(np.int32))
        if not model.experts or arrays["router_margin"].min() >= MIN_MARGIN:
            break
    else:
        raise SystemExit(f"{model.name}: no seed without a near-tie")
    write_gguf(folder / f"{model.name}.gguf", model, weights)
    np.savez_compressed(folder / f"{model.name}.npz", **arrays)  # type: ignore[arg-type]
    logits = arrays["logits"]
    margin = arrays["router_margin"].min() if model.experts else np.inf
    spread = f"std {logits.std():.2f}, max {np.abs(logits).max():.2f}"
    print(f"{model.name}: seed {seed}, logits {spread}, least margin {margin:.4f}")


def main() -> None:
    """Write every fixture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "models"
    parser.add_argument("--out", type=Path, default=default, help="folder to write to")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        make(model, folder)


if __name__ == "__main__":
    main()
