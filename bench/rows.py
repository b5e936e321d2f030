"""What a token costs in batches of 1 to 64 rows: of replies that are decoded together, of prompts.

python -m bench.rows --device cpu --record

A batch must never cost more for each of its tokens than a smaller one does. Batches of each phase
are run in turns, smallest to largest and back, behind the same texts; the report names each size
whose tokens cost more than those of the best smaller size, by more than the intervals of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

from bench.arms import Arms, take_turns
from bench.command import command_line, finish, run_main
from bench.models import add_model_options, chosen_model
from vkmoe.batch import Phase, TokenBatch
from vkmoe.bench.environment import describe, print_card
from vkmoe.bench.measure import Row, Summary
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices
from vkmoe.engine import Engine

DECODED = tuple(range(1, 9))
PROMPTS = (*range(1, 17), 24, 31, 32, 33, 40, 48, 63, 64)
BEHIND = 16  # tokens of each text, before the batch
CONTEXT = 128


def main() -> None:
    """Measure all sizes, and report."""
    parser = command_line(__doc__)
    add_model_options(parser)
    options = parser.parse_args()
    info = choose_device(list_devices(), options.device)
    card = describe(info)
    print_card(card)
    model = chosen_model(options)
    config = EngineConfig(str(info.index), CONTEXT, parallel=DECODED[-1])
    with Engine(model, config) as engine:
        arms = dict(_arms(engine))
        for arm in arms.values():
            arm()  # what is recorded and compiled when it is first used
        taken = take_turns(arms, options.repeats, "s")
    rows = [Row(name, taken.summary(name), "s", "host_wall") for name in taken.names]
    for row in rows:
        print(row)
    risen = [rise for phase in ("decode", "prompt") for rise in rises(taken, phase)]
    print("\n".join(risen) or "no batch costs more for a token than a smaller one")
    finish("rows", card, {"model": model.name, "rows": rows, "rises": risen}, options.record)


def _arms(engine: Engine) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield what each size takes for a token, by a name that ends with the size."""
    for n_rows in DECODED[: engine.max_decode_rows]:
        yield f"decode {n_rows}", partial(_decode, engine, n_rows)
    for n_rows in PROMPTS:
        yield f"prompt {n_rows}", partial(_prompt, engine, n_rows)


def _tokens(engine: Engine, n: int, first: int) -> tuple[int, ...]:
    return tuple((first + 31 * i) % engine.n_vocab for i in range(n))


def _decode(engine: Engine, n_rows: int) -> float:
    """Run one row of each of so many texts; returns the seconds of one."""
    for region in range(n_rows):
        engine.rewind(region, 0)
        _run(engine, "prompt", _tokens(engine, BEHIND, region), range(BEHIND), (region,) * BEHIND)
    regions = tuple(range(n_rows))
    return _run(engine, "decode", _tokens(engine, n_rows, 7), (BEHIND,) * n_rows, regions)


def _prompt(engine: Engine, n_rows: int) -> float:
    """Run a prompt of so many tokens; returns the seconds of one."""
    engine.rewind(0, 0)
    return _run(engine, "prompt", _tokens(engine, n_rows, 3), range(n_rows), (0,) * n_rows)


def _run(
    engine: Engine,
    phase: Phase,
    tokens: tuple[int, ...],
    positions: Any,
    regions: tuple[int, ...],
) -> float:
    n_rows = len(tokens)
    wants = (phase == "decode",) * (n_rows - 1) + (True,)
    began = perf_counter()
    engine.run(TokenBatch(tokens, tuple(positions), regions, wants, phase))
    return (perf_counter() - began) / n_rows


def rises(taken: Arms, phase: str) -> Iterator[str]:
    """Yield each size of a phase whose tokens surely cost more than those of a smaller size."""
    best: tuple[int, Summary] | None = None
    for name in taken.names:
        which, size = name.split()
        if which != phase:
            continue
        found = taken.summary(name)
        if best is not None and found.low > best[1].high:
            yield f"{name}: {found.median / best[1].median:.2f} x a token of {phase} {best[0]}"
        if best is None or found.median < best[1].median:
            best = int(size), found


if __name__ == "__main__":
    run_main(main)
