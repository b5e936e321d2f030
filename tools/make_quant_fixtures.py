"""Make tests/fixtures/quants: what llama.cpp's quantisers achieve on small, stored weights.

    python -m tools.make_quant_fixtures LIBGGML_BASE.so [DEMO_DIRECTORY]

The library is part of an installed llama-cpp-python (llama_cpp/lib/libggml-base.so).  The tests
compare vkmoe's quantisers with the numbers stored here, so they need neither.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.make_demo_model import ROOT, read_safetensors
from vkmoe.quants import decode
from vkmoe.quants.types import TYPES

Floats = npt.NDArray[np.float32]

OUT = ROOT / "tests" / "fixtures" / "quants"
QUANTISED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
LAYER = "model.layers.3"
DEMO_TENSORS = {
    "demo_embedding": "model.embed_tokens.weight",
    "demo_query": f"{LAYER}.self_attn.q_proj.weight",
    "demo_gate": f"{LAYER}.mlp.experts.5.gate_proj.weight",
    "demo_down": f"{LAYER}.mlp.experts.5.down_proj.weight",
}


def error_measures(type_name: str, x: Floats, y: Floats) -> list[float]:
    """[plain, weighted] root mean square error of `y`, relative to that of `x`.

    The weights are those llama.cpp minimises by: x^2 for Q6_K, magnitude plus the root mean square
    of 32 neighbours for Q4_K and Q5_K, else 1.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    weights = np.ones_like(x)
    if type_name == "Q6_K":
        weights = x * x
    elif type_name in ("Q4_K", "Q5_K"):
        groups = x.reshape(-1, 32)
        root = np.sqrt((groups * groups).mean(axis=1, keepdims=True))
        weights = (root + np.abs(groups)).reshape(x.shape)
    squares = (x - y) ** 2
    plain = np.sqrt(squares.sum() / (x * x).sum())
    weighted = np.sqrt((weights * squares).sum() / (weights * x * x).sum())
    return [float(plain), float(weighted)]


def inputs(demo: Path) -> dict[str, npt.NDArray[np.uint16]]:
    """Weights as bf16 words [rows, columns]."""
    rng = np.random.default_rng(2)
    source = read_safetensors(demo / "model.safetensors")
    found = {name: source[tensor][:64] for name, tensor in DEMO_TENSORS.items()}
    found["gaussian"] = 0.02 * rng.standard_normal((64, 512), np.float32)
    found["laplace"] = (0.02 * rng.laplace(size=(64, 512))).astype(np.float32)
    return {name: (x.view(np.uint32) >> 16).astype(np.uint16) for name, x in found.items()}


def widened(bf16: npt.NDArray[np.uint16]) -> Floats:
    """The stored words as float32, in their shape."""
    return decode("BF16", bf16.view(np.uint8), bf16.size).reshape(bf16.shape)


def reference_errors(library: ctypes.CDLL, words: dict[str, npt.NDArray[np.uint16]]) -> object:
    """{type: {input: [plain, weighted]}}."""
    errors: dict[str, dict[str, list[float]]] = {name: {} for name in QUANTISED}
    for name, bits in words.items():
        x = widened(bits)
        for type_name in QUANTISED:
            y = decode(type_name, quantise_by(library, type_name, x), x.size)
            errors[type_name][name] = error_measures(type_name, x, y.reshape(x.shape))
    return errors


def quantise_by(library: ctypes.CDLL, type_name: str, x: Floats) -> npt.NDArray[np.uint8]:
    """llama.cpp's blocks of `x`."""
    x = np.ascontiguousarray(x)
    out = np.zeros((len(x), TYPES[type_name].row_bytes(x.shape[1])), np.uint8)
    written = library.ggml_quantize_chunk(
        ctypes.c_int(TYPES[type_name].ggml_id),
        ctypes.c_void_p(x.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(0),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        ctypes.c_void_p(None),
    )
    assert written == out.size, (written, out.size)
    return out


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("demo", nargs="?", type=Path, default=ROOT.parent / "shared" / "demo")
    options = parser.parse_args()
    library = ctypes.CDLL(str(options.library))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    words = inputs(options.demo)
    OUT.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUT / "inputs.npz", **words)  # type: ignore[arg-type]
    errors = reference_errors(library, words)
    (OUT / "reference.json").write_text(json.dumps(errors, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
