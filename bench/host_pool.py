"""A model larger than the memory allowed for its experts, beside the same with room for all.

python -m bench.host_pool --record
python -m bench.host_pool --share 50 --model MODEL

The pool holds a third of the experts' bytes (--share), the rest is read from the file when needed;
with guesses about the next layer and without. All arms take turns on the same tokens (random ones
for the synthetic model, text for --model) and must find the same logits to the last bit. Said of
each: tokens per second, bytes read per token and how fast, how long tokens waited for them, and how
much of the reading was hidden behind computing. The page cache keeps nothing of what is read; what
the disk keeps is not known. Compare the speed with `python -m bench.file_reads`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.models import add_model_options, chosen_model
from bench.routing import PROMPTS, prompt_text
from bench.same_logits import check_same_logits
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import VkmoeError
from vkmoe.experts.store.copies import Prefetcher
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.llm import read_tokenizer
from vkmoe.models import open_model
from vkmoe.weights.span_reader import SpanReader

CONTEXT = 512
MIB = 1 << 20
WHOLE = "all in memory"
# Fields of EngineConfig besides the pool's size.
POOLED: dict[str, dict[str, Any]] = {
    "correlation": {"expert_predictor": "correlation"},
    "previous": {"expert_predictor": "previous"},
    "no guesses": {"moe_predict_prefetch": False},
}
COUNTERS = ("n_uses", "n_hits", "n_reads", "read_bytes", "n_hinted", "n_cancelled", "stall_ns")


def main() -> None:
    """Open all arms, warm up, take turns."""
    parser = command_line(__doc__)
    add_model_options(parser)
    parser.add_argument("--share", type=float, default=100 / 3, help="of the experts, %% (33.3)")
    parser.add_argument("--tokens", type=int, default=16, help="in each turn (default: 16)")
    options = parser.parse_args()
    if not 0 < options.share < 100 or not 1 <= options.tokens <= CONTEXT // (options.repeats + 1):
        parser.error(f"--share: between 0 and 100; all --tokens and a turn more: at most {CONTEXT}")
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    model = chosen_model(options)
    total = _expert_bytes(model)
    pool_bytes = int(total * options.share / 100)
    print(f"model {model.name}: {total / MIB:.1f} MiB of experts, {pool_bytes / MIB:.1f} allowed\n")
    pieces = _pieces(model, options)
    arms = [_Arm(WHOLE, model, EngineConfig(options.device, CONTEXT), pieces)]
    for name, fields in POOLED.items():
        config = EngineConfig(options.device, CONTEXT, host_pool=str(pool_bytes), **fields)
        arms.append(_Arm(name, model, config, pieces))
    with ExitStack() as stack:
        for arm in arms:
            stack.enter_context(arm.opened())
        speeds = take_turns({arm.name: arm.turn for arm in arms}, options.repeats, "tok/s")
        check_same_logits(arms)
        results = _results(arms, speeds, card)
    results |= {"model": model.name, "expert_bytes": total, "pool_bytes": pool_bytes}
    finish("host_pool", card, results | {"tokens": options.tokens}, options.record)


def _expert_bytes(model: Path) -> int:
    with open_model(model) as file:
        if not any(layer.has_experts for layer in file.tensors.layers):
            raise VkmoeError(f"{model.name} has no experts", "give a mixture-of-experts model")
        with SpanReader(file.file, file.tensors) as reader:
            return sum(reader.span_bytes) * reader.n_experts


def _pieces(model: Path, options: argparse.Namespace) -> list[list[int]]:
    """One to warm up, and one for each turn."""
    n = options.tokens * (options.repeats + 1)
    if options.model is None:
        with open_model(model) as file:
            n_vocab = file.spec.n_vocab
        tokens = np.random.default_rng(0).integers(0, n_vocab, n).tolist()
    else:
        text = "\n".join(prompt_text(name) for name in PROMPTS)
        with open_model(model) as file:
            tokens = read_tokenizer(file).encode(text)[:n]
        if len(tokens) < n:
            raise VkmoeError(f"the texts have {len(tokens)} tokens, {n} are needed", "lower them")
    return [tokens[start : start + options.tokens] for start in range(0, n, options.tokens)]


class _Arm:
    """The model with its experts in one place."""

    def __init__(
        self, name: str, model: Path, config: EngineConfig, pieces: Sequence[Sequence[int]]
    ) -> None:
        self.name = name
        self._model, self._config = model, config
        self._pieces, self._position = iter(pieces), 0
        self.counts = dict.fromkeys((*COUNTERS, "tokens", "busy_ns"), 0)  # of the timed tokens
        self.logits: list[NDArray[np.float32]] = []  # after each turn
        self.pool_bytes = 0  # allocated
        self.hidden: float | None = None  # of the reading, warming up too

    @contextmanager
    def opened(self) -> Iterator[None]:
        with Engine(self._model, self._config) as self._engine:
            self._run()
            yield

    def turn(self) -> float:
        """Tokens per second on the next piece."""
        before = self._counted()
        speed = self._run()
        for name, value in self._counted().items():
            self.counts[name] += value - before[name]
        self.logits.append(self._engine.full_logits().copy())
        print(f"  {self.name}: {speed:.2f} tok/s", flush=True)
        return speed

    def _run(self) -> float:
        piece, began = next(self._pieces), time.perf_counter()
        for token in piece:
            self._engine.run_token(token, self._position)
            self._position += 1
        return len(piece) / (time.perf_counter() - began)

    def _counted(self) -> dict[str, int]:
        engine = self._engine
        assert engine.profiler is not None
        found = dict.fromkeys(self.counts, 0) | {"tokens": engine.profiler.n_tokens}
        pool = engine.cache.pool if engine.cache is not None else None
        if pool is not None:
            reads = pool.tier.uploads
            assert isinstance(reads, Prefetcher)
            counters = pool.counters
            found |= {name: getattr(counters, name) for name in COUNTERS}
            found["busy_ns"] = reads.busy_ns
            self.pool_bytes, self.hidden = pool.tier.slots.n_bytes, counters.hidden
        return found


def _results(arms: Sequence[_Arm], speeds: Arms, card: dict[str, Any]) -> dict[str, Any]:
    """Rows, what was read, and ratios to the arm that reads nothing."""
    print()
    rows, details = [], {}
    for arm in arms:
        found = _found(arm) | {"values": speeds.values(arm.name)}
        rows.append(Row(arm.name, speeds.summary(arm.name), speeds.unit, "host_wall", _note(found)))
        print(rows[-1])
        if arm.name != WHOLE and len(found["values"]) >= MIN_REPEATS:
            found["relative"] = speeds.ratio(arm.name, WHOLE, card)
            print(f"{arm.name} / {WHOLE} = {found['relative']}")
        details[arm.name] = found
    print("the logits of all are equal to the last bit")
    return {"rows": rows, "arms": details}


def _found(arm: _Arm) -> dict[str, Any]:
    counts, n = arm.counts, arm.counts["tokens"]
    if not arm.pool_bytes:
        return {}
    return {
        "pool_bytes": arm.pool_bytes,
        "pool_hit_rate": counts["n_hits"] / max(1, counts["n_uses"]),
        "read_bytes_per_token": counts["read_bytes"] / n,
        "reads_per_token": counts["n_reads"] / n,
        "read_gb_per_s": counts["read_bytes"] / max(1, counts["busy_ns"]),
        "stall_ms_per_token": counts["stall_ns"] / 1e6 / n,
        "hinted_per_token": counts["n_hinted"] / n,
        "cancelled_per_token": counts["n_cancelled"] / n,
        "overlapped": arm.hidden,
    }


def _note(found: dict[str, Any]) -> str:
    if "pool_bytes" not in found:
        return ""
    hidden = found["overlapped"]
    return (
        f"{100 * found['pool_hit_rate']:.1f} % in the pool of {found['pool_bytes'] / MIB:.1f} MiB; "
        f"per token {found['read_bytes_per_token'] / MIB:.2f} MiB read at "
        f"{found['read_gb_per_s']:.2f} GB/s, {found['stall_ms_per_token']:.1f} ms waited; "
        f"{'unknown' if hidden is None else f'{100 * hidden:.0f} %'} of the reading hidden"
    )


if __name__ == "__main__":
    run_main(main)
