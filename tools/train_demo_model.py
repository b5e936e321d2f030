"""Train the demo model, a small Qwen3-MoE, on the Python standard library (processor or CUDA).

    python -m tools.train_demo_model --minutes 80                            # phase 1
    python -m tools.train_demo_model --init final.pt --core --context 1024 \\
        --batch 8 --learning-rate 1e-3 --minutes 19 --export demo            # phase 2
    python -m tools.make_demo_model demo

Phase 1 trains on all .py files of the running interpreter's standard library; phase 2 leaves out
tests, codec tables and generated data, and uses a longer context.  Every 50th file (shuffled with
seed 0) is held out and never trained on.  Writes tok.json, *.bin (uint16 tokens), ckpt.pt and
final.pt to the working directory and takes up what is there.  Needs torch and tokenizers.
"""

from __future__ import annotations

import argparse
import glob
import json
import random
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch  # type: ignore[import-not-found]
import torch.nn.functional as F  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from tools.demo_network import DemoNetwork, DemoShape, export

Tokens = npt.NDArray[np.uint16]

END_OF_TEXT = 0
BALANCE_WEIGHT = 0.003
WARM_UP_STEPS = 100
NOT_CORE = (
    "/test/", "/tests/", "/encodings/", "/pydoc_data/", "/lib2to3/", "/idlelib/", "/turtledemo/",
)  # fmt: skip


def library_files() -> tuple[list[str], list[str]]:
    """(training files, held-out files) of the standard library, in a shuffled, fixed order."""
    root = sysconfig.get_paths()["stdlib"]
    found = glob.glob(root + "/**/*.py", recursive=True)
    files = [name for name in found if "site-packages" not in name]
    random.Random(0).shuffle(files)
    n_held_out = max(20, len(files) // 50)
    return files[n_held_out:], files[:n_held_out]


def read(name: str) -> str:
    """The text of one source file."""
    return Path(name).read_text(encoding="utf-8", errors="ignore")


def train_tokenizer(files: Iterable[str], n_tokens: int) -> Tokenizer:
    """A byte-level BPE tokenizer with the end-of-text token as id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((read(name) for name in files), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, files: Iterable[str], name: str) -> None:
    """Write `name`.bin, every file behind an end-of-text token, and its sizes to `name`.json."""
    ids: list[int] = []
    n_bytes = n_files = 0
    for file in files:
        text = read(file)
        n_files, n_bytes = n_files + 1, n_bytes + len(text.encode())
        ids += [END_OF_TEXT, *tokenizer.encode(text).ids]
    np.array(ids, np.uint16).tofile(f"{name}.bin")
    sizes = json.dumps({"bytes": n_bytes, "tokens": len(ids)})
    Path(f"{name}.json").write_text(sizes, encoding="utf-8")
    print(f"{name}: {n_files} files, {len(ids)} tokens, {n_bytes} bytes", flush=True)


def prepare_data(core: bool, n_tokens: int) -> tuple[Tokens, Tokens]:
    """(training tokens, held-out tokens); tokenizer and token files are made where missing."""
    train, held_out = library_files()
    if not Path("tok.json").exists():
        tokenizer = train_tokenizer(train, n_tokens)
        tokenizer.save("tok.json")
        encode(tokenizer, train, "train")
        encode(tokenizer, held_out, "val")
    if core and not Path("core.bin").exists():
        kept = (name for name in train if not any(part in name for part in NOT_CORE))
        encode(Tokenizer.from_file("tok.json"), kept, "core")
    chosen = "core.bin" if core else "train.bin"
    return np.fromfile(chosen, np.uint16), np.fromfile("val.bin", np.uint16)


def draw_batch(
    tokens: Tokens, n_rows: int, context: int, rng: np.random.Generator, device: str
) -> torch.Tensor:
    """Random windows [n_rows, context + 1]."""
    starts = rng.integers(0, len(tokens) - context - 1, n_rows)
    rows = np.stack([tokens[start : start + context + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64)).to(device)


def prediction_loss(network: DemoNetwork, rows: torch.Tensor) -> torch.Tensor:
    """Mean loss, in nats per token, of predicting each token from those before it."""
    logits = network(rows[:, :-1]).float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))


class Training:
    """One run: the network, its optimizer, the data, and the clock that ends it."""

    def __init__(self, options: argparse.Namespace, shape: DemoShape) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        self.options = options
        self.train, self.held_out = prepare_data(options.core, shape.n_tokens)
        self.network = DemoNetwork(shape)
        if options.init:
            self.network.load_state_dict(torch.load(options.init, map_location="cpu"))
        self.network.to(options.device)
        parameters = list(self.network.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        gains = [parameter for parameter in parameters if parameter.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        print(f"{sum(p.numel() for p in parameters) / 1e6:.1f} M parameters", flush=True)

    def lower_precision(self) -> torch.autocast:
        return torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.bf16)

    def held_out_loss(self) -> float:
        """Mean loss over the same 64 held-out windows every time."""
        self.network.eval()
        rng = np.random.default_rng(1)
        total = 0.0
        with torch.no_grad(), self.lower_precision():
            for _ in range(8):
                rows = draw_batch(self.held_out, 8, self.options.context, rng, self.options.device)
                total += prediction_loss(self.network, rows).item()
        self.network.train()
        return total / 8

    def step(self, rows: torch.Tensor, learning_rate: float) -> tuple[float, float]:
        """One update; (loss, norm of the gradient)."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with self.lower_precision():
            loss = prediction_loss(self.network, rows)
        (loss + BALANCE_WEIGHT * self.network.total_balance()).backward()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    def run(self) -> None:
        """Train until the minutes, or the steps, are used up; the rate falls to 5 % in a line."""
        options, rng, n_steps, start = self.options, np.random.default_rng(0), 0, time.time()
        while n_steps != options.steps:
            done = (time.time() - start) / 60 / options.minutes
            if done >= 1:
                break
            warm = min(1.0, (n_steps + 1) / WARM_UP_STEPS)
            rate = options.learning_rate * warm * (0.05 + 0.95 * (1 - done))
            rows = draw_batch(self.train, options.batch, options.context, rng, options.device)
            loss, norm = self.step(rows, rate)
            n_steps += 1
            if n_steps % 10 == 0:
                self.report(n_steps, loss, norm, time.time() - start)
            if n_steps % 200 == 0:
                print(f"held-out loss {self.held_out_loss():.4f}", flush=True)
                torch.save(self.network.state_dict(), "ckpt.pt")
        print(f"final held-out loss {self.held_out_loss():.4f}", flush=True)
        torch.save(self.network.state_dict(), "final.pt")

    def report(self, n_steps: int, loss: float, norm: float, seconds: float) -> None:
        layers = self.network.layers
        speed = n_steps * self.options.batch * self.options.context / seconds
        print(
            f"step {n_steps} min {seconds / 60:.1f} loss {loss:.3f} "
            f"balance {self.network.total_balance().item() / len(layers):.2f} "
            f"dropped {max(layer.mlp.dropped for layer in layers):.2f} "
            f"gradient {norm:.2f} tok/s {speed:.0f}",
            flush=True,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--minutes", type=float, default=90, help="length of the run")
    parser.add_argument("--steps", type=int, default=-1, help="stop after this many steps")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--context", type=int, default=512, help="tokens per window")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--init", help="checkpoint to start from")
    parser.add_argument("--core", action="store_true", help="phase 2: leave out tests and tables")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--export", type=Path, help="folder for the Hugging Face layout")
    options = parser.parse_args()
    training = Training(options, DemoShape())
    training.run()
    if options.export:
        export(training.network, Path("tok.json"), options.context, options.export)


if __name__ == "__main__":
    main()
