"""Hold the tiny models of tests/fixtures/models against llama.cpp, by hand.

Owns: running each GGUF file in F32 through llama-cpp-python and printing how far its logits are
from the stored ones of transformers.  Where both agree the file is written as llama.cpp's own
converter writes it.  No test needs it.  Known differences of llama-cpp-python 0.3.36, in which the
published models decide:
    moe_unnormalised     it always renormalises the weights of qwen3moe
    gptoss_*             it rounds yarn's range to whole pairs ("truncate"), and has no beta_fast of
                         a file; without yarn (gptoss_all_experts) both agree
    gptoss_mxfp4         besides, it rounds activations to 8 bits before MXFP4 matrices
    deepseek2_v2         a group is worth its two best experts, as in V3; in V2 it is its best one
    nan: not loaded      experts one by one; tied outputs, fewer KV heads (olmoe) or heads of any
                         width (qwen2moe) where no published model has them; q not compressed
                         (deepseek2) unless there are 26, 27 or 48 layers

    python tools/compare_llama_cpp.py [--folder tests/fixtures/models] [NAME ...]
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import numpy as np

F32 = 0  # llama.cpp's number of the type


def difference(path: Path) -> float:
    """The largest difference of any logit, relative to the largest; NaN where it does not load."""
    llama_cpp = import_module("llama_cpp")
    with np.load(path.with_suffix(".npz")) as stored:
        arrays = dict(stored)
    try:
        model = llama_cpp.Llama(
            str(path),
            n_ctx=int(arrays.get("ctx_size", 64)),
            n_threads=2,
            logits_all=True,
            type_k=F32,
            type_v=F32,
            flash_attn=False,
            verbose=False,
        )
    except ValueError:  # llama.cpp prints why
        return float("nan")
    model.eval(arrays["tokens"].tolist())
    found, wanted = np.array(model.scores[: len(arrays["tokens"])]), arrays["logits"]
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "models"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (default: all)")
    options = parser.parse_args()
    for path in sorted(options.folder.glob("*.gguf")):
        if not options.names or path.stem in options.names:
            print(f"{path.stem:24} {difference(path):.2e}", flush=True)


if __name__ == "__main__":
    main()
