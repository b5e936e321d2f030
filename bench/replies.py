"""Decode speed of several replies at once, and with drafts, relative to one reply.

python -m bench.replies
python -m bench.replies --model MODEL --together 1,2,4 --drafts --record

One model holds all replies (--parallel is the most of --together). Tokens per second are those of
all replies together, from the first token of each on. Every reply must be the one generated alone,
token for token: no neighbour and no draft changes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.arms import take_turns
from bench.command import command_line, finish, run_main
from bench.routing import prompt_text
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import MIN_REPEATS, Row
from vkmoe.errors import VkmoeError
from vkmoe.generate.scheduler import Scheduler
from vkmoe.llm import LLM, GenerationResult, demo_model_path

CONTEXT = 512
N_PROMPT = 32  # tokens
DRAFTS = "one, drafts"


def main() -> None:
    """Open, generate each reply alone, take turns."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="default: the demo")
    parser.add_argument("--together", type=_numbers, default=(1, 2, 4, 8), help="default: 1,2,4,8")
    parser.add_argument("--drafts", action="store_true", help="also one reply with --draft lookup")
    parser.add_argument("--tokens", type=int, default=64, help="of each reply (default: 64)")
    options = parser.parse_args()
    if not 2 <= options.tokens <= CONTEXT - N_PROMPT:
        parser.error(f"--tokens: from 2 to {CONTEXT - N_PROMPT}")
    n_most = max(options.together)
    draft = "lookup" if options.drafts else "none"  # or there are no programs of several rows
    config: dict[str, Any] = {"device": options.device, "ctx_size": CONTEXT, "draft": draft}
    with LLM(options.model, parallel=n_most, **config) as llm:
        llm.scheduler = Scheduler(llm.runner)  # of all replies that are to have none
        card = describe(llm.device_info)
        print_card(card)
        text = llm.tokenizer.encode(prompt_text("code"))
        prompts = [text[start:][:N_PROMPT] for start in range(0, n_most * N_PROMPT, N_PROMPT)]
        replies = _Replies(llm, prompts, options.tokens)
        arms: dict[str, Callable[[], float]] = {
            _name(n): partial(replies.turn, _name(n), n) for n in options.together
        }
        if options.drafts:
            arms[DRAFTS] = lambda: replies.turn(DRAFTS, 1, Scheduler(llm.runner, "lookup"))
        speeds = take_turns(arms, options.repeats, "tok/s")
    rows = [Row(name, speeds.summary(name), speeds.unit, "host_wall", replies.notes.get(name, ""))
            for name in arms]  # fmt: skip
    print(*rows, "every reply is the one generated alone\n", sep="\n")
    first, *others = arms
    ratios = {}
    for name in others if options.repeats >= MIN_REPEATS else ():
        ratios[name] = speeds.ratio(name, first, card)
        print(f"{name} / {first} = {ratios[name]} (medians, 95 % interval, in turns)")
    found = {"model": options.model.name, "tokens": options.tokens, "rows": rows, "ratios": ratios}
    finish("replies", card, found, options.record)


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(piece) for piece in text.split(","))
    if min(found) < 1 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError("different numbers from 1 on")
    return found


def _name(n_replies: int) -> str:
    return f"{n_replies} together" if n_replies > 1 else "one"


class _Replies:
    """Generates the first replies of a list together, again and again."""

    def __init__(self, llm: LLM, prompts: list[list[int]], n_tokens: int) -> None:
        self._llm, self._prompts = llm, prompts
        self._options: dict[str, Any] = {"max_tokens": n_tokens, "temp": 0, "ignore_eos": True}
        self._alone = [llm.generate(prompt, **self._options).token_ids for prompt in prompts]
        self.notes: dict[str, str] = {}  # of the arms that have something to say

    def turn(self, name: str, n_replies: int, scheduler: Scheduler | None = None) -> float:
        """Tokens per second of the first `n_replies` together. Raises VkmoeError for other text."""
        before = self._llm.scheduler
        self._llm.scheduler = scheduler or before
        try:
            results = self._llm.generate(self._prompts[:n_replies], **self._options)
        finally:
            self._llm.scheduler = before
        if [result.token_ids for result in results] != self._alone[:n_replies]:
            raise VkmoeError(f"{name}: not the text generated alone", "this is a bug in vkmoe")
        if scheduler is not None:
            before.regions.forget()  # the other one has used them
            self.notes[name] = f"{results[0].statistics.accepted_per_step:.2f} accepted a step"
        speed = _speed(results)
        print(f"  {name}: {speed:.2f} tok/s", flush=True)
        return speed


def _speed(results: Sequence[GenerationResult]) -> float:
    """All tokens but the first of each reply, over the longest time one of them took."""
    n_tokens = sum(result.statistics.n_generated_tokens - 1 for result in results)
    return n_tokens / max(result.statistics.decode_seconds for result in results)


if __name__ == "__main__":
    run_main(main)
