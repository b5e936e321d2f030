"""The decoded weights of a GGUF file, for references that compute in F32.

Owns: decoding with the gguf package (not vkmoe's own decoders), the same values as an F32 GGUF for
llama.cpp, and as a state dict of transformers' Qwen3MoeForCausalLM.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.hf_names import LAYER_NAMES

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def decoded_tensors(model: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a GGUF file as float32, decoded by the gguf package."""
    reader = gguf.GGUFReader(model)
    return {
        tensor.name: np.asarray(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32
        ).reshape([int(n) for n in reversed(tensor.shape)])
        for tensor in reader.tensors
    }


def write_decoded(model: Path, target: Path) -> None:
    """Write `model` again with all tensors as F32 and the metadata unchanged."""
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.ALL_F32)
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for name, value in decoded_tensors(model).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hf_name(name: str) -> str:
    """The transformers name of a GGUF tensor of qwen3moe that is no routed expert."""
    table = TOP_NAMES | LAYER_NAMES
    parts = name.split(".")
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{table[parts[-2]]}.weight"


def gguf_state(model: Path) -> dict[str, Any]:
    """The decoded tensors of the demo file as a transformers state dict."""
    torch = import_module("torch")
    tensors = decoded_tensors(model)
    state = {}
    for name, value in tensors.items():
        if name.endswith("_exps.weight"):
            continue
        state[hf_name(name)] = value
    for gate in [name for name in tensors if name.endswith("ffn_gate_exps.weight")]:
        up, down = (gate.replace("gate", part) for part in ("up", "down"))
        prefix = f"model.layers.{gate.split('.')[1]}.mlp.experts."
        state[prefix + "gate_up_proj"] = np.concatenate([tensors[gate], tensors[up]], axis=1)
        state[prefix + "down_proj"] = tensors[down]
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return {name: torch.from_numpy(np.array(v)) for name, v in state.items()}
