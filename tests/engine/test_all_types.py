"""A model whose tensors mix all weight types, against the same values in F32."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.caches import Rows, assert_same_bits, rows
from tests.engine.conftest import TUNINGS
from tests.engine.tiny import Tensor, model_path, retyped, rewrite
from tests.samples import sampled
from tools.quantise import random_weights
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.device import spirv_words
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants import HAS_KERNEL

pytestmark = pytest.mark.usefixtures("one_device")

WIDTH, N_EXPERTS, N_VOCAB = 256, 8, 300
EMBEDDING, OUTPUT = "Q4_0", "Q4_K"
ROLES = {  # shape of each matrix in a layer
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (128, WIDTH),
    "attn_v": (128, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate_inp": (N_EXPERTS, WIDTH),
    "ffn_gate_exps": (N_EXPERTS, WIDTH, WIDTH),
    "ffn_up_exps": (N_EXPERTS, WIDTH, WIDTH),
    "ffn_down_exps": (N_EXPERTS, WIDTH, WIDTH),
}
LAYERS = [  # in the order of ROLES: one type for q, k and v and three, for gate and up and two
    ["Q2_K", "Q3_K", "Q3_K", "IQ4_XS", "BF16", "MXFP4", "MXFP4", "MXFP4"],
    ["Q4_0", "Q4_0", "Q4_0", "Q2_K", "Q8_0", "Q2_K", "Q3_K", "Q3_K"],
    ["F16", "Q6_K", "IQ4_NL", "Q5_K", "F32", "IQ4_XS", "Q4_0", "IQ4_NL"],
    ["Q5_0", "Q5_0", "Q5_1", "TQ1_0", "Q4_1", "IQ2_XXS", "IQ2_XS", "IQ3_XXS"],
    ["Q1_0", "Q2_0", "TQ2_0", "NVFP4", "F32", "IQ2_S", "IQ2_S", "IQ3_S"],
    ["IQ3_S", "IQ3_S", "IQ3_S", "IQ2_S", "F32", "IQ1_S", "IQ1_M", "NVFP4"],
]
METADATA = {
    "block_count": len(LAYERS),
    "embedding_length": WIDTH,
    "attention.key_length": WIDTH // 4,
    "attention.value_length": WIDTH // 4,
    "expert_feed_forward_length": WIDTH,
}
TOKENS = [(7 * i * i + 3 * (i % 4)) % (N_VOCAB - 1) + 1 for i in range(8)]
# Seen: 8e-7. As in test_logits.py.
TOLERANCE = 1e-4
F32 = EngineConfig(cache_type_k="f32", cache_type_v="f32", ctx_size=64)


def types_of(layer: list[str]) -> dict[str, str]:
    """The type of each matrix of a layer, by role."""
    return dict(zip(ROLES, layer, strict=True))


def mix_all_types(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Another size, random weights of the types above."""
    rng = np.random.default_rng(6)

    def matrix(kind: str, shape: tuple[int, ...], gain: float = 1.0) -> Tensor:
        n_rows = int(np.prod(shape[:-1]))
        deviation = gain / shape[-1] ** 0.5
        blocks = random_weights(kind, n_rows, shape[-1], rng, deviation)
        return Tensor(kind, shape, blocks.reshape(-1))

    def gains(n: int) -> Tensor:
        values = 1 + 0.1 * rng.standard_normal(n, np.float32)
        return Tensor("F32", (n,), values.astype("<f4").view(np.uint8))

    metadata |= {f"qwen3moe.{key}": value for key, value in METADATA.items()}
    tensors.clear()
    tensors["token_embd.weight"] = matrix(EMBEDDING, (N_VOCAB, WIDTH))
    for i, layer in enumerate(LAYERS):
        for name, n in (("attn_norm", WIDTH), ("attn_q_norm", 64), ("attn_k_norm", 64),
                        ("ffn_norm", WIDTH)):  # fmt: skip
            tensors[f"blk.{i}.{name}.weight"] = gains(n)
        for role, kind in types_of(layer).items():
            gain = 2.0 if role == "ffn_gate_inp" else 1.0  # clear favourites
            tensors[f"blk.{i}.{role}.weight"] = matrix(kind, ROLES[role], gain)
    tensors["output_norm.weight"] = gains(WIDTH)
    tensors["output.weight"] = matrix(OUTPUT, (N_VOCAB, WIDTH))


def decode_all(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors.update({name: retyped(tensor, "F32") for name, tensor in tensors.items()})


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("all_types") / "mixed.gguf"
    return rewrite(model_path("moe_plain"), target, mix_all_types)


@pytest.fixture(scope="module")
def decoded(mixed: Path) -> tuple[Rows, NDArray[np.uint32]]:
    """Logits and routing of the same values in F32."""
    target = rewrite(mixed, mixed.with_name("decoded.gguf"), decode_all)
    with Engine(target, F32) as engine:
        assert {info.type for info in engine.model.file.tensors.values()} == {"F32"}
        return run(engine)


def run(engine: Engine) -> tuple[Rows, NDArray[np.uint32]]:
    """Logits [tokens, vocabulary] and routing [layers, tokens, used], in ascending order."""
    logits, routing = [], []
    for position, token in enumerate(TOKENS):
        engine.run_token(token, position)
        logits.append(engine.full_logits())
        routing.append(engine.routing())
    return np.stack(logits), np.sort(np.stack(routing, axis=1))


def test_all_types_are_in_it() -> None:
    assert {EMBEDDING, OUTPUT, *itertools.chain(*LAYERS)} == HAS_KERNEL
    experts = {types_of(layer)[role] for layer in LAYERS for role in ROLES if "exps" in role}
    assert experts >= {"MXFP4", "Q4_0", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K"}


@pytest.mark.parametrize("tuning", sampled(TUNINGS, "default".__eq__), indirect=True)
@pytest.mark.full
def test_logits_are_those_of_the_decoded_values(
    mixed: Path, decoded: tuple[Rows, NDArray[np.uint32]], tuning: Tuning | None
) -> None:
    wanted, wanted_routing = decoded
    with Engine(mixed, F32, tuning=tuning) as engine:
        found, routing = run(engine)
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    assert np.ptp(wanted) > 1 and len(np.unique(wanted_routing)) == N_EXPERTS
    np.testing.assert_array_equal(routing, wanted_routing)


@pytest.mark.parametrize(
    ("miss", "tuning"),
    sampled(
        [("read", "default"), ("gather", "default"), ("read", "lanes+subgroup")],
        ("gather", "default").__eq__,
    ),
    indirect=["tuning"],
)
def test_slots_and_landing_places_change_no_bit(
    mixed: Path, miss: str, tuning: Tuning | None
) -> None:
    """Experts of every layer move; some are stored by the kernels that read them."""
    config = EngineConfig(ctx_size=64)
    with Engine(mixed, config, tuning=tuning) as engine:
        wanted = rows(engine, TOKENS)
    moving = EngineConfig(ctx_size=64, expert_slots=3, promote_on_read=True, miss=miss)  # type: ignore[arg-type]
    with Engine(mixed, moving, tuning=tuning, checks=True) as engine:
        assert_same_bits(rows(engine, TOKENS), wanted)
        assert engine.cache is not None and engine.cache.counters.n_landed > 0


def test_kernels_are_compiled_for_the_types_of_their_matrices_alone(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind of matrix its types and no other, in one mapping."""
    compiled: set[str] = set()

    def noted(name: str) -> bytes:
        compiled.add(name)
        return spirv_words(name)

    monkeypatch.setattr(gpu_device, "spirv_words", noted)
    with Engine(mixed, F32) as engine:
        engine.run_token(1, 0)
        suffix = engine.tuning.dot_suffix
    families = {
        "matvec": ("attn_q", "attn_k", "attn_v", "ffn_gate_inp"),
        "matvec_residual": ("attn_output",),
        "expert_gate_up": ("ffn_gate_exps", "ffn_up_exps"),
        "expert_down": ("ffn_down_exps",),
    }
    wanted = {
        f"{family}.{types_of(layer)[role].lower()}{suffix}"
        for family, roles in families.items()
        for role in roles
        for layer in LAYERS
    }
    wanted |= {f"embed.{EMBEDDING.lower()}", f"matvec.{OUTPUT.lower()}{suffix}"}
    weights = ("embed", "matvec", "expert")
    assert {name for name in compiled if name.startswith(weights)} == wanted
