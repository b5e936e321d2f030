"""What predictors and promote-on-read are worth when misses cross a slow link.

python -m bench.prefetch --record
python -m bench.prefetch --shares 25 --arms none,correlation --warm 16 --tokens 4 --repeats 1

The demo model with 25 and 50 % of its experts on the device, on three texts (bench/prompts/). Where
the device shares the host's memory the link is one by injection (bench/slow_link.py), of --link
MB/s: misses and copies wait as if they crossed it; with --link 0 they cross the machine's own. All
arms of a share are open at once, take turns on the same pieces of text and must find the same
logits to the last bit. An arm is a dictionary of EngineConfig's fields. Said of each: tokens per
second, hits, bytes read in place and copied per token, and how guesses went. At the end: on how
many texts each predictor lets fewer bytes be read in place than none with copies that go the same
way (overlapping tokens, kept as they are read, or waited for), and whether the default agrees. With
the defaults it takes about twelve minutes on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.arms import take_turns
from bench.cached_arm import CachedArm
from bench.command import command_line, finish, run_main
from bench.prefetch_report import BASE, compare, found_of, row, verdict
from bench.routing import PROMPTS, prompt_text
from bench.same_logits import check_same_logits
from bench.slow_link import SlowLink
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row
from vkmoe.config import EngineConfig
from vkmoe.errors import VkmoeError
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.llm import demo_model_path, read_tokenizer
from vkmoe.models import open_model

SHARES = (25.0, 50.0)
CONTEXT = 1024
WARM_HELP = "tokens of each text's end, run before anything is measured (256)"
COMPUTE_HELP = "of a token without misses, for the budget of copies (20)"
COPIES = {"expert_copies": "overlap", "promote_on_read": False}
LANDINGS = {"expert_copies": "overlap", "promote_on_read": True}
WAITING = {"expert_copies": "wait", "promote_on_read": False}
ARMS: dict[str, dict[str, Any]] = {
    BASE: {"expert_predictor": "none", **COPIES},
    "token": {"expert_predictor": "token", **COPIES},
    "previous": {"expert_predictor": "previous", **COPIES},
    "correlation": {"expert_predictor": "correlation", **COPIES},
    "frequency": {"expert_predictor": "frequency", **COPIES},
    "none, promoting": {"expert_predictor": "none", **LANDINGS},
    "token, promoting": {"expert_predictor": "token", **LANDINGS},
    "correlation, promoting": {"expert_predictor": "correlation", **LANDINGS},
    "none, gathering": {"expert_predictor": "none", "miss": "gather", **LANDINGS},
    "none, waiting": {"expert_predictor": "none", **WAITING},
    "token, waiting": {"expert_predictor": "token", **WAITING},
    "correlation, waiting": {"expert_predictor": "correlation", **WAITING},
}


def main() -> None:
    """For each share, open all arms and let them take turns."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="default: the demo")
    parser.add_argument("--shares", type=_shares, default=SHARES, help="%%, default: 25,50")
    parser.add_argument("--link", type=float, default=50.0, help="MB/s (default: 50); 0: as it is")
    parser.add_argument("--compute-ms", type=float, default=20.0, help=COMPUTE_HELP)
    parser.add_argument("--warm", type=int, default=256, help=WARM_HELP)
    parser.add_argument("--tokens", type=int, default=24, help="in each turn (default: 24)")
    parser.add_argument("--arms", type=_names, default=tuple(ARMS), help=f"of: {'; '.join(ARMS)}")
    options = parser.parse_args()
    if min(options.tokens, options.repeats, options.warm) < 1 or options.link < 0:
        parser.error("--tokens, --repeats, --warm: at least 1; --link: at least 0")
    with open_model(options.model) as file:
        tokenizer = read_tokenizer(file)
    if file.spec.experts is None:
        raise VkmoeError(f"{options.model} has no experts", "give a mixture-of-experts model")
    texts = {name: tokenizer.encode(prompt_text(name)) for name in PROMPTS}
    pieces = {name: _pieces(text, options) for name, text in texts.items()}
    warm = [text[-options.warm :] for text in texts.values()]
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    link = SlowLink(options.link * 1e6) if options.link else None
    shares, progress = {}, _Progress(len(options.shares) * len(texts))
    for share in options.shares:
        slots = max(1, round(share / 100 * file.spec.experts.n_experts))
        print(f"{share:g} % of the experts, {slots} slots", flush=True)
        arms = [_arm(name, slots, options, link) for name in options.arms]
        shares[f"{share:g} %"] = _measure(arms, warm, pieces, card, progress)
    results = {"model": options.model.name, "tokens": options.tokens, "warm": options.warm}
    results |= {"link_mb_per_s": options.link or None, "compute_ms": options.compute_ms}
    results |= {"shares": shares}
    results["rows"] = [line for share in shares.values() for line in share.pop("rows")]
    finish("prefetch", card, results | verdict(shares), options.record)


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(piece) for piece in text.split(","))
    if not all(0 < share < 100 for share in shares) or len(set(shares)) < len(shares):
        raise argparse.ArgumentTypeError("different numbers above 0, below 100")
    return shares


def _names(text: str) -> tuple[str, ...]:
    """Names of arms; some have a comma of their own."""
    names = tuple(name.strip() for name in text.replace(", ", "\0").split(","))
    names = tuple(name.replace("\0", ", ") for name in names)
    if set(names) - set(ARMS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"some of: {'; '.join(ARMS)}")
    return names


def _pieces(text: Sequence[int], options: argparse.Namespace) -> list[Sequence[int]]:
    n, limit = options.tokens, min(len(text), CONTEXT) - options.warm
    if n * options.repeats > limit:
        raise VkmoeError(
            f"{options.repeats} turns of {n} tokens are more than a text has ({limit})",
            "lower --tokens",
        )
    return [text[start : start + n] for start in range(0, n * options.repeats, n)]


# ----- measuring -----


class _Progress:
    """Says how much is done, and about how long the rest takes."""

    def __init__(self, n_steps: int) -> None:
        self._n_steps, self._done, self._began = n_steps, 0, time.perf_counter()

    def step(self) -> None:
        self._done += 1
        minutes = (time.perf_counter() - self._began) / 60
        left = minutes / self._done * (self._n_steps - self._done)
        done = f"{self._done} of {self._n_steps} done in {minutes:.1f} min"
        print(f"{done}, about {left:.1f} min left\n", flush=True)


def _arm(name: str, slots: int, options: argparse.Namespace, link: SlowLink | None) -> CachedArm:
    config = EngineConfig(options.device, CONTEXT, expert_slots=slots, **ARMS[name])
    return CachedArm(name, options.model, config, link, options.compute_ms / 1e3)


def _measure(
    arms: Sequence[CachedArm],
    warm: Sequence[Sequence[int]],
    pieces: Mapping[str, Sequence[Sequence[int]]],
    card: dict[str, Any],
    progress: _Progress,
) -> dict[str, Any]:
    """All arms on all texts; rows, and what was found of each text and arm."""
    rows: list[Row] = []
    texts: dict[str, Any] = {}
    with ExitStack() as stack:
        for arm in arms:
            stack.enter_context(arm.opened(warm))
        for name, text in pieces.items():
            for arm in arms:
                arm.begin(text)
            speeds = take_turns({arm.name: arm.turn for arm in arms}, len(text), "tok/s")
            check_same_logits(arms)
            texts[name] = {arm.name: found_of(arm, speeds) for arm in arms}
            compare(texts[name], speeds, card)
            new = [row(name, arm.name, texts[name][arm.name], speeds) for arm in arms]
            print("\n".join(map(str, new)), flush=True)
            rows += new
            progress.step()
        overlapped = {arm.name: arm.overlapped for arm in arms}
    return {"rows": rows, "texts": texts, "overlapped": overlapped}


if __name__ == "__main__":
    run_main(main)
