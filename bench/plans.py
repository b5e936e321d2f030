"""How near predicted times of tokens come to measured ones.

python -m bench.plans --record
python -m bench.plans --only "cache, half" "experts exchange"

Each setting is a machine: lavapipe as it is, or as a card with memory of its own; the host pool,
link and disk as they are, or bounded and slowed (plans_worker.py says how). Models are synthetic:
an OLMoE of real size with 4 layers, and one like Mixtral with 16 layers of smaller matrices. Tokens
are those of a text, or any of the vocabulary: these use most experts. Beside each turn the speeds
of the machine are measured anew, and what the cost model predicts at these is held against the
turn: a setting passes if the median ratio is within 30 %. Loading must take no more memory
than is planned, and 5 % of that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.command import command_line, finish, run_main
from bench.models import custom_model, default_cache, shape_of
from bench.worker import Worker
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, summarise
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.llm import read_tokenizer
from vkmoe.models import open_model

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("code", "prose", "structured")  # in bench/prompts; each of over 700 tokens
ERROR, MORE_MEMORY = 0.3, 0.05
CONTEXT = 512
MB = 10**6
# As slow beside lavapipe as a drive of 3 GB/s beside a card that reads 360 GB/s.
AS_A_DRIVE = 6e6  # bytes per second
MODELS = {
    "olmoe": shape_of("olmoe-1b-7b", n_layers=4),
    "mixtral": shape_of(
        "mixtral-8x7b", hidden=2048, n_heads=16, n_kv_heads=4, expert_size=1024, n_layers=16
    ),
    "tiny": shape_of("tiny-olmoe", n_layers=1),
}


@dataclass(frozen=True)
class Setting:
    """Describes a machine, and what is asked of vkmoe there. None: as it is."""

    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    card: int | None = None  # bytes of memory of its own
    link: float | None = None  # bytes per second
    file: float | None = None
    types: str = "q4_k_m"
    varied: bool = False  # the tokens: any of the vocabulary, so that most experts are used


def _mode(name: str, **options: Any) -> dict[str, Any]:
    return {"expert_mode": name, **options}


SETTINGS = (
    Setting("all on the device", "olmoe", _mode("resident")),
    Setting("experts on the CPU", "olmoe", _mode("cpu")),
    Setting("experts of 2 of 4 layers on the CPU", "olmoe", {"n_cpu_moe": 2}),
    Setting("hybrid, half", "olmoe", _mode("hybrid"), 1400 * MB),
    Setting("cache, half", "olmoe", _mode("cache"), 1400 * MB),
    Setting("cache, a slow link", "olmoe", _mode("cache"), 1400 * MB, link=200e6),
    Setting(
        *("cache, a slow link, gathered", "olmoe", _mode("cache", miss="gather"), 1400 * MB),
        link=200e6,
    ),
    Setting("no choice made", "olmoe"),
    Setting("no choice made, a card for half", "olmoe", card=1400 * MB),
    Setting(
        *("experts exchange", "olmoe", {"host_pool": "500MiB"}, 1400 * MB),
        varied=True,
    ),
    Setting(
        *("experts exchange, a disk as slow", "olmoe", {"host_pool": "500MiB"}, 1400 * MB),
        file=AS_A_DRIVE,
        varied=True,
    ),
    Setting("a part in the file", "olmoe", {"host_pool": "300MiB"}, 1150 * MB),
    Setting(
        *("a part in the file, a slow disk", "olmoe", {"host_pool": "300MiB"}, 1150 * MB),
        file=50e6,
    ),
    Setting("in IQ3_XXS", "olmoe", types="iq3_xxs"),
    Setting("in IQ2_XXS", "olmoe", types="iq2_xxs"),
    Setting("like Mixtral: all on a card", "mixtral", _mode("resident"), 2000 * MB),
    Setting("like Mixtral: cache", "mixtral", _mode("cache"), 950 * MB),
    Setting(
        *("like Mixtral: experts exchange, a disk as slow", "mixtral", {"host_pool": "250MiB"}),
        1100 * MB,
        file=AS_A_DRIVE,
        varied=True,
    ),
    Setting("like Mixtral: hybrid", "mixtral", _mode("hybrid"), 950 * MB),
    Setting("like Mixtral: no choice made", "mixtral"),
)
SMALLEST = Setting("tiny", "tiny", _mode("cache", expert_slots=4), 800 * MB, link=50e6)


def main() -> None:
    """Run the settings one after another, and say which pass."""
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="settings, by their names")
    parser.add_argument("--tokens", type=int, default=6, help="in each turn (default: 6)")
    parser.add_argument("--warm", type=int, default=24, help="tokens before them (default: 24)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of models")
    options = parser.parse_args()
    chosen = [x for x in (*SETTINGS, SMALLEST) if x.name in (options.only or _names())]
    if options.only and len(chosen) < len(options.only):
        parser.error(f"--only: there is {', '.join(_names())}")
    card = describe(choose_device(list_devices(), options.device))
    print_card(card)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting in chosen:
            found[setting.name] = _Run(setting, options, Path(folder)).results()
    failed = [name for name, each in found.items() if not all(each["passes"].values())]
    print(f"\n{len(found) - len(failed)} of {len(found)} settings pass; not: {failed or 'none'}")
    finish("plans", card, {"settings": found}, options.record)


def _names() -> list[str]:
    return [setting.name for setting in SETTINGS]


class _Run:
    """Runs one setting."""

    def __init__(self, setting: Setting, options: Any, folder: Path) -> None:
        self._setting, self._options, self._folder = setting, options, folder
        name = f"plans-{setting.model}-{setting.types}"
        self._model = custom_model(name, MODELS[setting.model], setting.types, options.cache)
        with open_model(self._model) as model:
            files = (ROOT / f"bench/prompts/{name}.txt" for name in TEXTS)
            text = "\n".join(file.read_text("utf-8") for file in files)
            tokens = read_tokenizer(model).encode(text)
            if setting.varied:
                random = np.random.default_rng(0)
                tokens = random.integers(0, model.spec.n_vocab, len(tokens)).tolist()
        n_first, n = options.warm, options.tokens
        ends = [0, n_first, *(n_first + n * (i + 1) for i in range(options.repeats))]
        self._pieces = [tokens[a:b] for a, b in pairwise(ends)]

    def results(self) -> dict[str, Any]:
        """Measure; print and return what was found."""
        print(self._setting.name, flush=True)
        with self._worker() as worker:
            worker.turn(self._pieces[0])
            answers = [worker.turn(piece) for piece in self._pieces[1:]]
            plan = worker.card
        n = len(self._pieces[1])
        speed = summarise([n / answer["seconds"] for answer in answers])
        row = Row("this", speed, "tok/s", "host_wall", _described(plan))
        judged = self._judged(plan, answers, n)
        print(f"  {row}\n  " + "; ".join(f"{k} {v}" for k, v in judged.items()), flush=True)
        return {"this": {"row": row, **plan, **_medians(answers)}, **judged}

    def _judged(
        self, plan: Mapping[str, Any], answers: Sequence[dict[str, Any]], n: int
    ) -> dict[str, Any]:
        """Compare with what was predicted and planned."""
        ratios = {
            name: round(median(x[key] * n / x["seconds"] / 1e3 for x in answers), 3)
            for name, key in (("predicted", "ms"), ("at_known_hits", "ms_at_hits"))
        }
        memory = round(plan["peak_bytes"] / plan["plan_bytes"], 3)
        passes = {
            "predicted": 1 - ERROR <= ratios["predicted"] <= 1 + ERROR,
            "memory": memory <= 1 + MORE_MEMORY,
        }
        return {**ratios, "peak_over_plan": memory, "passes": passes}

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        """Start a worker that remembers nothing of other settings."""
        setting = vars(self._setting)
        asked = {key: setting[key] for key in ("card", "link", "file")}
        asked["options"] = {"ctx_size": CONTEXT, **self._setting.options}
        asked |= {"model": str(self._model), "device": self._options.device}
        kept = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        with tempfile.TemporaryDirectory(dir=self._folder) as cache:
            changes = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache}
            changes["MESA_SHADER_CACHE_DIR"] = str(Path(kept) / "mesa_shader_cache")
            program = str(ROOT / "bench" / "plans_worker.py")
            command = [sys.executable, program, json.dumps(asked)]
            with Worker("vkmoe", command, os.environ | changes, ROOT) as worker:
                yield worker


def _medians(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take the median of each figure over all turns."""
    known = [key for key, value in answers[0].items() if value is not None]
    return {key: median(x[key] for x in answers) for key in known} | {
        key: None for key in ("hit_rate", "file_share") if key not in known
    }


def _described(plan: Mapping[str, Any]) -> str:
    where = f"{plan['slots']} slots, {plan['host_slots']} in host memory, {plan['executor']}"
    return f"{plan['mode']}, {where}"


if __name__ == "__main__":
    run_main(main)
