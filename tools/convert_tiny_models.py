r"""Write tiny models of tests/fixtures/models with llama.cpp's own converter, by hand.

Owns: a checkpoint of each as its published models have it, and the converter's call.  Writes
`NAME.gguf` in F32, and `NAME.npz` as make_fixtures.py does, which `compare_converter.py` reads.
Checkpoints are what transformers saves, but for these:
    layers that guess ahead   transformers has none: they are written under the published names
    bailingmoe2               transformers has no such models
The vocabulary is the fixtures': a tokenizer of its own would tell nothing of a model.

Needs what make_fixtures.py needs, and llama.cpp's sources.  In the repository's root:
    PYTHONPATH=LLAMA_CPP/gguf-py:LLAMA_CPP:. \
        python tools/convert_tiny_models.py --out FOLDER [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import logging
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np

from tools.make_fixtures import drawn, network_of
from tools.tiny_models import MODELS, TinyModel
from tools.tiny_models.drawing import Weights
from tools.tiny_models.vocabulary import add_vocabulary, vocabulary

Tensors = dict[str, Any]
# What published configurations have besides, and transformers knows without.
SIGMOID = {"scoring_func": "sigmoid"}
BESIDES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"scoring_func": "softmax"},
    "DeepseekV3ForCausalLM": SIGMOID,
    "DeepseekV32ForCausalLM": SIGMOID,
    "GlmMoeDsaForCausalLM": SIGMOID,
    "Dots1ForCausalLM": SIGMOID,
    "MiniMaxM2ForCausalLM": SIGMOID,
}
# Text models that are published as a part of one that sees: its class and type.
PARTS_OF = {
    "Qwen3_5ForCausalLM": ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    "Gemma4ForCausalLM": ("Gemma4ForConditionalGeneration", "gemma4"),
    "Mistral4ForCausalLM": ("Mistral3ForConditionalGeneration", "mistral3"),
}
# What published checkpoints call the tensors of the layer that guesses, besides those of a layer.
AHEAD_NAMES = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "model.norm": "shared_head.norm",
    "lm_head": "shared_head.head",
    "model.embed_tokens": "embed_tokens",
}
HY_AHEAD_NAMES = {name: name[6:] for name in list(AHEAD_NAMES)[:3]} | {
    "model.norm": "final_layernorm"
}
QWEN_AHEAD_NAMES = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "model.norm": "norm",
}
BAILING_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}


def saved(model: TinyModel, weights: Weights) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the configuration of a checkpoint that transformers saves."""
    safetensors = import_module("safetensors.torch")
    with TemporaryDirectory() as folder:
        network_of(model, weights).save_pretrained(folder)
        tensors = safetensors.load_file(Path(folder) / "model.safetensors")
        return tensors, json.loads((Path(folder) / "config.json").read_text())


def add_ahead(model: TinyModel, weights: Weights, tensors: Tensors) -> None:
    """Add the layer that guesses to a checkpoint, whose own tensors are as those of the others."""
    torch = import_module("torch")
    one, one_weights, inputs = model.guesses(weights)
    found, _ = saved(one, one_weights)
    is_qwen = model.architecture.startswith("qwen3")
    for name, value in inputs.items():
        gain = value - 1 if is_qwen and "norm" in name else value
        found[f"nextn.{name}"] = torch.from_numpy(gain)
    layer = f"model.layers.{model.layers}."
    names = QWEN_AHEAD_NAMES if is_qwen else AHEAD_NAMES
    names = HY_AHEAD_NAMES if model.architecture == "hy_v3" else names
    for name, value in found.items():
        stem, _, kind = name.rpartition(".")
        if name.startswith("model.layers.0."):
            target = "mtp.layers.0." if is_qwen else layer
            tensors[name.replace("model.layers.0.", target)] = value
        elif stem in names:
            tensors[f"{'mtp.' if is_qwen else layer}{names[stem]}.{kind}"] = value


def convert(folder: Path, config: dict[str, Any], path: Path, *, ahead: bool) -> None:
    """Call the converter for the checkpoint in a folder."""
    (architecture,) = config["architectures"]
    model_class = import_module("conversion").get_model_class(architecture)
    if model_class.supports_mtp_export:
        model_class.no_mtp = not ahead
    for kind in (model_class, *vars(model_class).values()):
        if isinstance(kind, type):
            kind.set_vocab = lambda self: add_vocabulary(self.gguf_writer)  # type: ignore[attr-defined]
    model_class(folder, gguf.LlamaFileType.ALL_F32, path, model_name=path.stem).write()


def published(model: TinyModel, weights: Weights) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the configuration as the published models of a family have them."""
    tensors, config = saved(model, weights)
    architecture = model.architecture
    if model.ahead:
        add_ahead(model, weights, tensors)
        is_qwen = architecture.startswith("qwen3")
        config["mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"] = 1
    if architecture == "bailingmoe2":
        return as_bailing(tensors), config | {
            "architectures": ["BailingMoeV2ForCausalLM"],
            "model_type": "bailing_moe_v2",
            "num_experts": config["n_routed_experts"],
            "num_shared_experts": config["n_shared_experts"],
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
            "score_function": "sigmoid",
        }
    (name,) = config["architectures"]
    config |= BESIDES.get(name, {})
    if architecture == "deepseek2" and model.ahead:  # of this kind converters keep that layer
        config["architectures"] = ["Glm4MoeLiteForCausalLM"]
    if architecture == "minimax-m2":
        config["rotary_dim"] = int(
            model.head_dim * config["rope_parameters"]["partial_rotary_factor"]
        )
    if name in PARTS_OF:
        whole, kind = PARTS_OF[name]
        prefix = "model.language_model."
        tensors = {x.replace("model.", prefix, 1) if x.startswith("model.") else x: value
                   for x, value in tensors.items()}  # fmt: skip
        return tensors, {"architectures": [whole], "model_type": kind, "text_config": config}
    return tensors, config


def as_bailing(tensors: Tensors) -> Tensors:
    """Give the tensors of a GLM-4.5 the names of a Ling 2.0, and q, k and v one matrix."""
    torch = import_module("torch")
    found: Tensors = {}
    for name, value in tensors.items():
        layer, _, part = name.partition("self_attn.")
        if part == "q_proj.weight":
            parts = [tensors[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"]
            found[f"{layer}attention.query_key_value.weight"] = torch.cat(parts)
        elif part not in ("k_proj.weight", "v_proj.weight"):
            for ours, theirs in BAILING_NAMES.items():
                name = name.replace(ours, theirs)
            found[name] = value
    return found


def make(model: TinyModel, out: Path) -> None:
    """Write both files of one model."""
    safetensors = import_module("safetensors.torch")
    _, weights, arrays = drawn(model)
    tensors, config = published(model, weights)
    words = {"model": {"vocab": vocabulary()}, "added_tokens": []}  # of Gemma they are counted
    with TemporaryDirectory() as name:
        folder = Path(name)
        safetensors.save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(words))
        convert(folder, config, out / f"{model.name}.gguf", ahead=model.ahead)
    np.savez_compressed(out / f"{model.name}.npz", **arrays)  # type: ignore[arg-type]


def main() -> None:
    """Convert the named models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (default: all)")
    options = parser.parse_args()
    logging.disable()
    for model in MODELS:
        if not options.names or model.name in options.names:
            try:
                make(model, options.out)
                print(f"{model.name}: converted", flush=True)
            except Exception as problem:  # the converter refuses in many ways
                print(f"{model.name}: {type(problem).__name__}: {problem}", flush=True)


if __name__ == "__main__":
    main()
