"""What the tiny models of all architectures share: sizes, weights, metadata, transformers' names.

Owns the common half of a decoder; each architecture has a module of its own for what differs.
Weights are named as in a GGUF file, but lie as transformers has them: `file_tensors` does what a
converter does to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.hf_names import LAYER_NAMES
from tools.tiny_models.drawing import Draw, Quantised, Tensors, Weights
from tools.tiny_models.routing import Groups
from tools.tiny_models.vocabulary import add_vocabulary, vocabulary


@dataclass(frozen=True)
class TinyModel:
    """One fixture: what is written into the file and given to transformers."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    """Width of one expert, or of the feed-forward block of a dense model."""
    experts: int = 0
    top_k: int = 0
    tied: bool = True
    rope: dict[str, Any] = field(default_factory=dict)
    """Of transformers' `rope_parameters` what is not its default."""
    context: int = 128
    eps: float = 1e-6
    n_tokens: int = 24
    ctx_size: int = 0
    """What the engine's context must be for these logits; 0: any."""
    ahead: bool = False
    """Behind the layers is one that guesses tokens."""
    own_head: bool = False
    """That layer has an embedding, an output matrix and the norm before it of its own."""

    @property
    def architecture(self) -> str:
        raise KeyError(f"{self.name}: no architecture")

    @property
    def hf_kind(self) -> str:
        """What the names of transformers' classes of such models begin with."""
        raise KeyError(f"{self.name}: no classes")

    @property
    def hf_config(self) -> str:
        """The name of transformers' class of their configurations."""
        return f"{self.hf_kind}Config"

    @property
    def layers_in_file(self) -> int:
        return self.layers + self.ahead

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": 10000.0} | self.rope

    @property
    def rope_base(self) -> float:
        """The base of rotary angles that a file gives for all layers, or for most."""
        return float(self.rope_parameters["rope_theta"])

    def draw(self, seed: int) -> Weights:
        """Random tensors under their GGUF names."""
        draw, n_vocab = Draw(seed), len(vocabulary())
        weights = {
            "token_embd.weight": draw.matrix(
                n_vocab, self.hidden, gain=0.8 * float(np.sqrt(self.hidden))
            ),
            "output_norm.weight": draw.norm(self.hidden),
        }
        if not self.tied:
            weights["output.weight"] = draw.matrix(n_vocab, self.hidden, gain=4.0)
        for layer in range(self.layers):
            block = self.block(draw, layer)
            weights |= {f"blk.{layer}.{key}": value for key, value in block.items()}
        return weights | (self.ahead_block(Draw(seed + 1)) if self.ahead else {})

    def ahead_block(self, draw: Draw) -> Weights:
        """The tensors of the layer that guesses, with their prefix."""
        hidden, shape = self.hidden, (len(vocabulary()), self.hidden)
        block = self.block(draw, self.layers) | {
            "nextn.eh_proj.weight": draw.matrix(hidden, 2 * hidden, gain=2.0),
            "nextn.enorm.weight": draw.norm(hidden),
            "nextn.hnorm.weight": draw.norm(hidden),
        }
        if self.own_head:
            block["nextn.shared_head_norm.weight"] = draw.norm(hidden)
            block["nextn.embed_tokens.weight"] = draw.matrix(*shape, gain=4.0)
            block["nextn.shared_head_head.weight"] = draw.matrix(*shape, gain=4.0)
        return {f"blk.{self.layers}.{key}": value for key, value in block.items()}

    def block(self, draw: Draw, layer: int) -> Weights:
        """The tensors of one layer, without the prefix."""
        block = self.attention(draw) | {"ffn_norm.weight": draw.norm(self.hidden)}
        return block | (self.routed(draw) if self.experts else self.dense(draw, self.ff))

    def attention(self, draw: Draw) -> Weights:
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_norm.weight": draw.norm(self.hidden),
            "attn_q.weight": draw.matrix(q_width, self.hidden),
            "attn_k.weight": draw.matrix(kv_width, self.hidden),
            "attn_v.weight": draw.matrix(kv_width, self.hidden),
            "attn_output.weight": draw.matrix(self.hidden, q_width),
        }

    def routed(self, draw: Draw) -> Weights:
        return {
            "ffn_gate_inp.weight": draw.matrix(self.experts, self.hidden),
            "ffn_gate_exps.weight": draw.matrix(self.experts, self.ff, self.hidden),
            "ffn_up_exps.weight": draw.matrix(self.experts, self.ff, self.hidden),
            "ffn_down_exps.weight": draw.matrix(self.experts, self.hidden, self.ff, gain=2.0),
        }

    def dense(self, draw: Draw, width: int, suffix: str = "") -> Weights:
        return {
            f"ffn_gate{suffix}.weight": draw.matrix(width, self.hidden),
            f"ffn_up{suffix}.weight": draw.matrix(width, self.hidden),
            f"ffn_down{suffix}.weight": draw.matrix(self.hidden, width, gain=2.0),
        }

    def write(self, path: Path, weights: Weights) -> None:
        """Write the GGUF file with the metadata a converter would give it."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(self.name)
        self.add_metadata(writer)
        add_vocabulary(writer)
        for name, value in self.file_tensors(weights).items():
            data, kind = value if isinstance(value, Quantised) else (value, None)
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def file_tensors(self, weights: Weights) -> Tensors:
        """The tensors as a converter writes them."""
        return dict(weights)

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Add the keys below the architecture's prefix."""
        writer.add_block_count(self.layers_in_file)
        if self.ahead:
            writer.add_nextn_predict_layers(1)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        self.add_counts(writer)
        self.add_head_widths(writer)
        writer.add_layer_norm_rms_eps(self.eps)
        writer.add_rope_freq_base(self.rope_base)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(self.top_k)
            self.add_routing(writer)
        self.add_scaling(writer)

    def add_counts(self, writer: gguf.GGUFWriter) -> None:
        writer.add_feed_forward_length(self.ff)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)

    def add_head_widths(self, writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        """Add what a converter says of experts besides their number."""

    def add_scaling(self, writer: gguf.GGUFWriter) -> None:
        """Add the keys of scaled rotary embeddings; llama3's scaling is a tensor instead."""
        rope = self.rope_parameters
        if rope["rope_type"] not in ("linear", "yarn"):
            return
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "beta_slow" in rope:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])

    def one_layer(self) -> TinyModel:
        """A model of one layer like the one that guesses."""
        return replace(self, layers=1, ahead=False)

    def guesses(self, weights: Weights) -> tuple[TinyModel, Weights, Weights]:
        """The layer that guesses as a model of one layer, its weights, and how its input is made.

        The last have names without prefixes.
        """
        prefix, one = f"blk.{self.layers}.", self.one_layer()
        own = {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}
        embeddings, output = "token_embd.weight", "output.weight"
        found = {name: weights[name] for name in (embeddings, output) if name in weights}
        norm = own.get("nextn.shared_head_norm.weight", weights["output_norm.weight"])
        found["output_norm.weight"] = norm
        if "nextn.embed_tokens.weight" in own:
            one = replace(one, tied=False)
            found[embeddings] = own["nextn.embed_tokens.weight"]
            found[output] = own["nextn.shared_head_head.weight"]
        found |= {f"blk.0.{k}": x for k, x in own.items() if not k.startswith("nextn.")}
        inputs = {k.removeprefix("nextn."): x for k, x in own.items() if k.startswith("nextn.")}
        return one, found, inputs

    def hf_options(self) -> dict[str, Any]:
        """The arguments of the transformers configuration of the same model."""
        options: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ff,
            "vocab_size": len(vocabulary()),
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tied,
            "rope_parameters": self.rope_parameters,
            "attn_implementation": "eager",
        }
        if self.experts:
            options |= {"num_experts_per_tok": self.top_k, "experts_implementation": "eager"}
        return options

    def hf_state(self, weights: Weights) -> Weights:
        """`weights` under transformers' names."""
        state = {
            "model.embed_tokens.weight": weights["token_embd.weight"],
            "model.norm.weight": weights["output_norm.weight"],
            "lm_head.weight": weights.get("output.weight", weights["token_embd.weight"]),
        }
        for layer in range(self.layers):
            prefix = f"blk.{layer}."
            block = {
                key.removeprefix(prefix): value
                for key, value in weights.items()
                if key.startswith(prefix)
            }
            state |= {f"model.layers.{layer}.{k}": v for k, v in self.hf_block(block).items()}
        return state

    def hf_block(self, block: Weights) -> Weights:
        """The tensors of one layer under transformers' names, without prefixes."""
        state = {}
        for key, value in block.items():
            stem, _, kind = key.rpartition(".")
            if stem in self.hf_names():
                state[f"{self.hf_names()[stem]}.{kind}"] = value
        if "ffn_gate_exps.weight" in block:
            gate_up = [block[f"ffn_{part}_exps.weight"] for part in ("gate", "up")]
            state["mlp.experts.gate_up_proj"] = np.concatenate(gate_up, axis=1)
            state["mlp.experts.down_proj"] = block["ffn_down_exps.weight"]
        return state

    def hf_names(self) -> dict[str, str]:
        """Transformers' name of each tensor of a layer that has one of its own."""
        return LAYER_NAMES

    @property
    def groups(self) -> Groups | None:
        """How the choice of experts is limited to groups of them."""
        return None

    def scores(self, weights: Weights, layer: int, logits: NDArray[Any]) -> NDArray[Any]:
        """What experts are chosen by [tokens, experts], from the router's logits."""
        torch = import_module("torch")
        result: NDArray[Any] = torch.from_numpy(logits).softmax(-1).numpy()
        return result
