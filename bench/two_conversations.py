"""How long two conversations in turns on one slot take to read, with and without host memory.

python -m bench.two_conversations --model model.gguf --tokens 4000

Each turn adds some tokens to one of two conversations, which then asks for a token. With
--cache-ram 0 the other conversation's turn has thrown its rows away, and all is computed again;
else the rows come back by a copy. Both take turns in one run, and must give the same
log-probabilities. A second turn of the same conversation, which never left, stands beside: what the
copy costs is the difference.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.command import command_line, finish, run_main
from vkmoe.bench.clock import WrongResultError
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.llm import LLM, GenerationResult

ARMS: dict[str, dict[str, Any]] = {"kept": {}, "thrown away": {"cache_ram": "0"}}
STAYS = "never left"


def main() -> None:
    """Measure, compare, report."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the demo model)")
    parser.add_argument("--tokens", type=int, default=600, help="of each conversation at first")
    parser.add_argument("--turn", type=int, default=16, help="tokens that a turn adds")
    options = parser.parse_args()
    n_all = options.tokens + options.turn * (2 * options.repeats + 3)
    with ExitStack() as stack:
        llms = {}
        for arm, more in ARMS.items():
            llm = LLM(options.model, ctx_size=n_all + 8, device=options.device, **more)
            llms[arm] = stack.enter_context(llm)
        card = describe(llms["kept"].device_info)
        print_card(card)
        found = measure(llms, options.tokens, options.turn, options.repeats)
        kept = llms["kept"].scheduler.regions.kept
        n_bytes = llms["kept"].engine.texts.n_bytes
        rows = report(found, kept.n_restored, n_bytes)
    for row in rows:
        print(row)
    results = {"tokens": options.tokens, "turn": options.turn, "rows": rows, "seconds": found}
    finish("two_conversations", card, results, options.record)


def measure(
    llms: dict[str, LLM], n_tokens: int, n_turn: int, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds to the first token of each way; the first turns are not counted."""
    rng, llm = np.random.default_rng(0), llms["kept"]
    texts = [rng.integers(0, llm.spec.n_vocab, n_tokens).tolist() for _ in range(2)]
    found: dict[str, list[float]] = {arm: [] for arm in (*ARMS, STAYS)}
    for turn in range(repeats + 2):
        text = texts[turn % 2]
        for stays in (False, True):
            text += rng.integers(0, llm.spec.n_vocab, n_turn).tolist()
            replies = {arm: ask(llms[arm], text) for arm in ARMS}
            if len({str(reply.logprobs) for reply in replies.values()}) > 1:
                raise WrongResultError("rows that came back give other logits")
            seconds = {arm: reply.statistics.ttft_seconds for arm, reply in replies.items()}
            if turn > 1 and stays:
                found[STAYS].append(seconds["kept"])
            elif turn > 1:
                for arm in ARMS:
                    found[arm].append(seconds[arm])
    return found


def ask(llm: LLM, tokens: list[int]) -> GenerationResult:
    """Generate one token behind a conversation."""
    return llm.generate(tokens, max_tokens=1, temp=0, ignore_eos=True, n_logprobs=1)


def report(found: dict[str, list[float]], n_restored: int, n_bytes: int) -> list[Row]:
    """Sum up the seconds of each way, and how they compare."""
    ways = ("came back from host memory", "were computed again", STAYS)
    rows = [
        Row(f"first token, where rows {what}", summarise(seconds), "s", "host_wall")
        for what, seconds in zip(ways, found.values(), strict=True)
    ]
    pairs = zip(found["thrown away"], found["kept"], strict=True)
    ratio = summarise([slow / fast for slow, fast in pairs])
    rows.append(Row("computed again, beside rows that came back", ratio, "x", "host_wall"))
    rows.append(Row("rows that came back", summarise([float(n_restored)]), "", "count"))
    rows.append(Row("host memory of kept prompts", summarise([n_bytes / 1e6]), "MB", "count"))
    return rows


if __name__ == "__main__":
    run_main(main)
