"""Write the reference figures of the demo model: held-out tokens, transformers and llama.cpp.

Owns: tests/fixtures/demo_heldout.npz, demo_transformers.npz and demo_llama_cpp.npz.  Does not own
the demo model itself (make_demo_model.py) nor the tiny models (make_fixtures.py).  Three commands,
run in the repository's root as `python -m tools.make_demo_reference COMMAND` with the packages
named; the last two store the demo file's sha256 and must be repeated when that file changes.

    heldout TOKENIZER_JSON      (tokenizers, CPython 3.11's standard library in its own order)
    transformers SOURCE_FOLDER  (torch, transformers, safetensors, gguf)
    llama-cpp                   (llama_cpp, gguf)

Counted positions are FIRST..N_WINDOW-2 of each window, so that all have context: 1,000 in all.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sysconfig
import tempfile
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.decoded_model import gguf_state, write_decoded

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
N_WINDOWS, N_WINDOW, FIRST = 4, 270, 19
N_FULL = 64
"""Leading positions of the first window for which the best TOP logits are stored."""
TOP = 64
TOP_LLAMA = 8

Arrays = dict[str, NDArray[Any]]


def heldout_files() -> list[str]:
    """The files that training held out: every 50th of a shuffle, as the disk lists the library."""
    root = sysconfig.get_paths()["stdlib"]
    found = glob(root + "/**/*.py", recursive=True)
    files = [name for name in found if "site-packages" not in name]
    random.Random(0).shuffle(files)
    return files[: max(20, len(files) // 50)]


def make_heldout(tokenizer_json: Path) -> None:
    """Store N_WINDOWS windows, evenly spaced over the held-out token stream."""
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(tokenizer_json))
    stream: list[int] = []
    for name in heldout_files():
        text = Path(name).read_text(encoding="utf-8", errors="ignore")
        stream += [0, *tokenizer.encode(text).ids]
    starts = [index * (len(stream) // N_WINDOWS) for index in range(N_WINDOWS)]
    windows = np.array([stream[start : start + N_WINDOW] for start in starts], np.int32)
    np.savez_compressed(FIXTURES / "demo_heldout.npz", tokens=windows, first=np.int32(FIRST))
    print(f"{len(stream)} held-out tokens, windows at {starts}")


def windows() -> NDArray[np.int32]:
    """The stored windows, int32 [N_WINDOWS, N_WINDOW]."""
    with np.load(FIXTURES / "demo_heldout.npz") as stored:
        tokens: NDArray[np.int32] = stored["tokens"]
    return tokens


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def log_sum_exp(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Row-wise log(sum(exp(logits))) in float64."""
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    total: NDArray[np.float64] = np.log(np.exp(wide - peak).sum(-1)) + peak[..., 0]
    return total


def best(logits: NDArray[Any], count: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Ids and values of the `count` largest logits of each row, largest first."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
    return ids.astype(np.int16), np.take_along_axis(logits, ids, -1).astype(np.float32)


def counted(logits: NDArray[Any], prefix: str, count: int) -> Arrays:
    """Best tokens and the true next token's NLL at the counted positions, arrays [1000, ...].

    `logits`: float32 [N_WINDOWS, N_WINDOW, vocabulary].
    """
    at = logits[:, FIRST:-1]
    following = windows()[:, FIRST + 1 :, None]
    nll = log_sum_exp(at) - np.take_along_axis(at, following, -1)[..., 0]
    ids, values = best(at.reshape(-1, at.shape[-1]), count)
    print(f"{prefix}: mean NLL {nll.mean():.5f} over {nll.size} positions")
    return {
        f"{prefix}_ids": ids,
        f"{prefix}_logits": values,
        f"{prefix}_nll": nll.reshape(-1).astype(np.float32),
    }


def run_transformers(network: Any, prefix: str) -> Arrays:
    """Run the windows; full rows for the first N_FULL positions, figures for the counted ones."""
    torch = import_module("torch")
    routed: list[NDArray[np.float32]] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, outputs: routed.append(outputs[0].softmax(-1).numpy())
        )
        for layer in network.model.layers
    ]
    rows = []
    with torch.no_grad():
        for window in windows():
            rows.append(network(torch.from_numpy(window[None].astype(np.int64))).logits[0].numpy())
    for hook in hooks:
        hook.remove()
    logits = np.stack(rows)
    routing = np.stack(routed[: len(hooks)])[:, :N_FULL]  # [layers, N_FULL, experts]
    top_k = network.config.num_experts_per_tok
    ids, values = best(routing, top_k + 1)
    full_ids, full_values = best(logits[0, :N_FULL], TOP)
    return counted(logits, prefix, 1) | {
        f"{prefix}_full_ids": full_ids,
        f"{prefix}_full_logits": full_values,
        f"{prefix}_full_logsumexp": log_sum_exp(logits[0, :N_FULL]),
        f"{prefix}_full_max_abs": np.abs(logits[0, :N_FULL]).max(-1),
        f"{prefix}_router_ids": ids[..., :top_k],
        f"{prefix}_router_margin": values[..., top_k - 1] - values[..., top_k],
    }


def make_transformers(source: Path, model: Path) -> None:
    """Figures of the original weights and, where the demo file exists, of its decoded ones."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(2)
    network = transformers.Qwen3MoeForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    arrays = run_transformers(network, "source")
    if model.exists():
        network.load_state_dict(gguf_state(model), strict=True)
        arrays |= run_transformers(network, "decoded")
        arrays["sha256"] = np.array(sha256(model))
    np.savez_compressed(FIXTURES / "demo_transformers.npz", **arrays)  # type: ignore[arg-type]


def run_llama(model: Path, prefix: str, kv_type: int) -> Arrays:
    """Run the windows through llama.cpp on the CPU."""
    llama_cpp = import_module("llama_cpp")
    network = llama_cpp.Llama(
        str(model), n_ctx=512, n_batch=512, n_threads=2, n_gpu_layers=0, logits_all=True,
        type_k=kv_type, type_v=kv_type, verbose=False,
    )  # fmt: skip
    rows = []
    for window in windows():
        network.reset()
        network.eval(window.tolist())
        rows.append(np.array(network.scores[:N_WINDOW]))
    network.close()
    return counted(np.stack(rows), prefix, TOP_LLAMA)


def make_llama(model: Path) -> None:
    """Figures of the demo file as it is, and of the same values in F32 (no int8 activations)."""
    types = gguf.GGMLQuantizationType
    arrays = run_llama(model, "quantised", types.F16.value)
    with tempfile.TemporaryDirectory() as folder:
        decoded = Path(folder) / "decoded.gguf"
        write_decoded(model, decoded)
        arrays |= run_llama(decoded, "decoded", types.F32.value)
    same = arrays["quantised_ids"][:, 0] == arrays["decoded_ids"][:, 0]
    print(f"same top token, quantised against decoded: {same.mean():.4f}")
    arrays["sha256"] = np.array(sha256(model))
    arrays["llama_cpp_python"] = np.array(import_module("llama_cpp").__version__)
    np.savez_compressed(FIXTURES / "demo_llama_cpp.npz", **arrays)  # type: ignore[arg-type]


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["heldout", "transformers", "llama-cpp"])
    parser.add_argument("source", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--model", type=Path, default=ROOT / "vkmoe" / "data" / "demo.gguf")
    arguments = parser.parse_args()
    if arguments.command == "heldout":
        make_heldout(arguments.source)
    elif arguments.command == "transformers":
        make_transformers(arguments.source, arguments.model)
    else:
        make_llama(arguments.model)


if __name__ == "__main__":
    main()
