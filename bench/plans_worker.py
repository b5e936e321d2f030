"""One engine for bench/plans.py, on a machine that is as bounded and as slow as asked.

The first line says what was planned, and the memory that loading took. Then stdin asks
`{"do": "turn", "tokens": [...]}`, one JSON document a line; the answer has the seconds that these
tokens took, what was found where, and what is predicted of them at the speeds of that moment.

The package itself is as it is. Bounded is what it asks the machine for: the device's heaps, and
the speeds of link and disk. Reads of the file take at least as long as on a slow disk,
misses and copies as long as over a slow link (slow_link.py).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

from bench.command import run_main
from bench.slow_link import SlowLink, throttle
from vkmoe.config import EngineConfig
from vkmoe.devices import open_device
from vkmoe.engine import Engine
from vkmoe.facts import DeviceInfo, Heap
from vkmoe.gpu import device as gpu_device
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.llm import read_tokenizer
from vkmoe.mode_trial import choose_mode
from vkmoe.models import open_model
from vkmoe.placement.forecast import cost, measured, speeds
from vkmoe.weights import span_reader

HOST_HEAP = 64 << 30
SAMPLE_SECONDS = 0.002  # between two looks at the memory of this process


class _Card(DeviceInfo):
    """Describes a device whose memory is its own, whatever its kind."""

    is_uma = False


def main() -> None:
    """Bound the machine, load, then answer until stdin ends. The argument is the setting."""
    asked = json.loads(sys.argv[1])
    path, config = Path(asked["model"]), EngineConfig(asked["device"], **asked["options"])
    with bound(asked["card"], asked["link"], asked["file"]):
        _answer(asked, path, config)


def _answer(asked: dict[str, Any], path: Path, config: EngineConfig) -> None:
    decided = _decisions()
    _measure(config, path)
    with open_model(path) as model:
        choice = choose_mode(model, config, read_tokenizer(model).encode)
    with _Peak() as peak, Engine(path, config, choice=choice) as engine:
        peak.stop()
        _say({**_planned(engine), "peak_bytes": peak.n_bytes, "choice": choice and choice.reason})
        runner = _Runner(engine, asked)
        for line in sys.stdin:
            found = runner.turn(json.loads(line)["tokens"])
            _say(found | _predicted(engine, path, decided, found))


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


# ----- the machine -----


@contextmanager
def bound(card: int = 0, link: float = 0, file: float = 0) -> Iterator[None]:
    """Let the package find a machine as asked; 0: as it is."""
    with ExitStack() as replaced:
        if card:
            listed = gpu_device.list_devices
            _replace(
                replaced, "list_devices", lambda *x: [_card(info, card) for info in listed(*x)]
            )
        if link:
            measure = import_module("vkmoe.engine").link_of_misses
            _replace(replaced, "link_of_misses", lambda device: _behind(measure(device), link))
        if file:
            _replace(replaced, "read_speed", lambda path: file)
        yield


def _replace(replaced: ExitStack, name: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of the one of that name, wherever the package has it."""
    for module in [each for key, each in sys.modules.items() if key.startswith("vkmoe.")]:
        if name in vars(module):
            replaced.enter_context(patch.object(module, name, function))


def _card(info: DeviceInfo, n_bytes: int) -> DeviceInfo:
    """Describe a Vulkan device as a card with so much memory of its own."""
    if not info.is_vulkan:
        return info
    heaps = tuple(replace(heap, size=n_bytes, budget=None) for heap in info.heaps)
    known = {item.name: getattr(info, item.name) for item in fields(info)}
    return _Card(**{**known, "heaps": (*heaps, Heap(HOST_HEAP, False))})


def _behind(found: LinkSpeed | None, link: float) -> LinkSpeed | None:
    """Return what is measured of a link where bytes then wait for a slower one, too."""
    return found and LinkSpeed(*(1 / (1 / speed + 1 / link) for speed in found))


def _measure(config: EngineConfig, model: Path) -> None:
    """Measure the machine as `vkmoe plan` does."""
    with open_device(config.device, False, config.threads) as device:
        measured.measure_speeds(device, model, config.threads)


class _Peak:
    """Watches the most memory of its own that this process has, beyond what it began with."""

    def __init__(self) -> None:
        self.n_bytes, self._first, self._stopped = 0, _own_bytes(), Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self.n_bytes = max(self.n_bytes, _own_bytes() - self._first)


def _own_bytes() -> int:
    """Count the bytes in memory of this process that are no pages of a file."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(1024 * int(status.split(key)[1].split()[0]) for key in ("RssAnon:", "RssShmem:"))


# ----- the plan, and what is predicted of it -----


def _planned(engine: Engine) -> dict[str, Any]:
    plan = engine.plan
    return {
        "mode": plan.mode.name,
        "miss": plan.mode.miss,
        "executor": plan.executor,
        "slots": sum(plan.expert_slots),
        "host_slots": sum(plan.host_slots),
        "cpu_layers": plan.cpu_layers,
        "landing_slots": plan.landing_slots,
        "plan_bytes": plan.total("device") + plan.total("host"),  # a CPU device has both there
    }


def _decisions() -> list[Any]:
    """Keep what engines decide from now on."""
    engine, decided = import_module("vkmoe.engine"), list[Any]()
    decide = engine.decide

    def kept(*given: Any, **named: Any) -> Any:
        decided.append(decide(*given, **named))
        return decided[-1]

    vars(engine)["decide"] = kept
    return decided


def _predicted(
    engine: Engine, model: Path, decided: Sequence[Any], found: dict[str, Any]
) -> dict[str, Any]:
    """Predict the milliseconds of a token of the plan; `..._at_hits`: had its hits been known.

    At the speeds of now: other programs come and go.
    """
    made = decided[-1]
    link = import_module("vkmoe.engine").link_of_misses(engine.device)
    now = measured.measure_speeds(engine.device, model).over_link(link)
    machine = replace(
        speeds.machine_of(engine.device.info, now, made.machine.host_bytes),
        corrections=measured.recall_speeds(engine.device.info, model).corrections,
    )
    read = made.candidates[0].prediction.bytes
    planned = cost.predict(engine.plan, engine.spec, read, machine)
    answer = {"ms": 1e3 / planned.rate, "predicted_hit_rate": planned.hit_rate}
    answer |= {f"{key}_speed": value for key, value in vars(machine.speeds).items()}
    asked = dict(vars(cost))
    try:
        if engine.plan.expert_slots and found["hit_rate"] is not None:
            vars(cost)["hit_rate_of"] = lambda *given: (found["hit_rate"], "")
        if found["file_share"] is not None:
            vars(cost)["file_share_of"] = lambda *given: found["file_share"]
        known = cost.predict(engine.plan, engine.spec, read, machine)
    finally:
        vars(cost).update(asked)
    return answer | {"ms_at_hits": 1e3 / known.rate}


# ----- running -----


class _Runner:
    """Decodes tokens, over a link and from a disk as slow as asked. The first turn warms up."""

    def __init__(self, engine: Engine, asked: dict[str, Any]) -> None:
        self._engine, self._position = engine, 0
        self._link = SlowLink(asked["link"]) if asked["link"] else None
        if asked["file"]:
            _slow_reads(SlowLink(asked["file"]))

    def turn(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Decode them; return their seconds, hits per use, and reads of the file per use."""
        before, times = self._counted(), list[float]()
        for token in tokens:
            began = time.perf_counter()
            self._engine.run_token(token, self._position)
            self._position += 1
            times.append(time.perf_counter() - began)
        began = time.perf_counter()
        self._engine.settle()
        seconds = sum(times) + time.perf_counter() - began
        if self._link is not None and self._engine.cache is not None:
            throttle(self._engine, self._link, median(times))
            self._link = None
        uses, hits, reads = (now - then for now, then in zip(self._counted(), before, strict=True))
        cache = self._engine.cache
        share = reads / max(1, uses) if cache is not None and cache.pool is not None else None
        return {"seconds": seconds, "hit_rate": hits / max(1, uses), "file_share": share}

    def _counted(self) -> tuple[int, int, int]:
        engine = self._engine
        assert engine.profiler is not None
        total = engine.profiler.served().total
        pool = engine.cache.pool if engine.cache is not None else None
        return total.n_uses, total.n_hits, pool.counters.n_reads if pool is not None else 0


def _slow_reads(disk: SlowLink) -> None:
    """Let reads of experts take at least the time of a disk of that speed."""
    read = span_reader.SpanReader.read

    def later(reader: span_reader.SpanReader, number: int, out: Any) -> None:
        began = time.perf_counter()
        read(reader, number, out)
        disk.carry(out.size, since=began)

    setattr(span_reader.SpanReader, "read", later)  # noqa: B010 (its type is another)


if __name__ == "__main__":
    run_main(main)
