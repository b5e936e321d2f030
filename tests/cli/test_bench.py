"""`vkmoe bench`: the commands, their documents, comparisons and pictures."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.bench import decode, kernels, plot
from vkmoe.bench.clock import Memory, WrongResultError
from vkmoe.bench.compare import changes
from vkmoe.bench.decode import DecodeChoice
from vkmoe.bench.shapes import MODELS
from vkmoe.bench.transfer import PARTS, TransferChoice
from vkmoe.cli.bench import kernels as kernels_command
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import cpu_info
from vkmoe.engine import Engine
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device, choose_device, list_devices
from vkmoe.kernels.family import Variant
from vkmoe.kernels.launches import KernelClass, Launch
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.llm import demo_model_path
from vkmoe.selftest.suite import Case, run_variant

from .conftest import Run

CARD = {"device", "driver", "os", "cpu", "cores", "vkmoe", "commit", "load_average", "command",
        "clocks", "link"}  # fmt: skip


def document(run: Run, *arguments: str) -> dict[str, Any]:
    """All of stdout is one line; the table is on stderr, the roofline above all figures."""
    done = run("bench", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    assert done.out.count("\n") == 1 and set(found) >= {"benchmark", "card", "results"}
    assert found["benchmark"] == arguments[0] and set(found["card"]) >= CARD
    assert found["results"]["roofline"]["latency_mode"] in ("gpu_timestamp", "wall")
    names = [row["what"] for row in found["results"]["roofline"]["rows"]]
    assert names == ["copy within device memory", "empty dispatch", "empty submit and wait",
                     "GPU reads host memory", "copy host -> device"]  # fmt: skip
    assert (
        done.err.index("latency mode: ") < done.err.index("roofline: ") < done.err.index("A line")
    )
    return found


def positive(rows: list[dict[str, Any]]) -> bool:
    return bool(rows) and all(row["value"]["median"] > 0 and row["mode"] for row in rows)


def picture(path: Path) -> int:
    """The number of colours of a picture."""
    from matplotlib.image import imread

    return len(np.unique(imread(path).reshape(-1, 4), axis=0))


# ----- the three commands -----


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run of the next test is kept for those that compare with it."""
    return tmp_path_factory.mktemp("runs") / "kernels.json"


KERNELS = ("kernels", "--model", "tiny", "--family", "matvec,finish", "--type", "q8_0",
           "--shape", "q/k/v", "--repeats", "3")  # fmt: skip


@pytest.fixture
def kept(run: Run, few: Path) -> Path:
    if not few.exists():
        few.write_text(json.dumps(document(run, *KERNELS)))
    return few


@pytest.mark.full
def test_transfer(run: Run, tmp_path: Path) -> None:
    sizes = ("--copy-mib", "0.25,1", "--read-mib", "0.6")
    plot = tmp_path / "speeds.png"
    counts = ("--submits", "10", "--dispatches", "50", "--repeats", "2", "--quick")
    results = document(run, "transfer", *sizes, *counts, "--plot", str(plot))["results"]
    assert set(results) == {"roofline", *PARTS}
    for name, part in results.items():
        # an empty recording, subtracted, may cost more than 50 dispatches on a busy machine
        assert name == "dispatch" or positive(part["rows"]), (name, part)
    # a straight line through two small sizes may have no speed
    lines = results["copies"]["lines"].values()
    assert all(line["gb_per_s"] is None or line["gb_per_s"] > 0 for line in lines)
    copies = [row for row in results["reads"]["rows"] if row["what"].startswith("copy")]
    assert {row["note"] for row in copies} == {"read + write"}, "all memory is this device's own"
    assert picture(plot) > 20


@pytest.mark.full
def test_decode_of_the_demo_model(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "tokens.png"
    few = ("--quick", "--repeats", "2", "--tokens", "2", "--expert-slots", "8")
    results = document(run, "decode", *few, "--plot", str(plot))["results"]
    assert positive(results["rows"]) and len(results["values"]) == 2
    assert results["model"] == "demo.gguf" and results["model_bytes"] > results["bytes_per_token"]
    assert results["checks"]["cases"] >= results["checks"]["kernels"] > 5
    assert 0 < results["hit_rate"] < 1, "8 of 32 experts have a slot"
    assert picture(plot) > 20


def test_decode_on_the_cpu(run: Run, cpu_native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own roofline, on as many threads as were asked for.

    Of less memory than caches may hold; test_without_vulkan.py runs it with as much as it takes.
    """
    tiny = Memory.of(cpu_info(), tiny=True)
    monkeypatch.setattr(Memory, "of", lambda info: tiny)
    few = ("--quick", "--repeats", "2", "--tokens", "2", "--device", "cpu", "-t", "1")
    done = run("bench", "decode", *few, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["card"]["threads"] == 1 and found["results"]["roofline"]["latency_mode"] == "wall"
    assert positive(found["results"]["rows"]) and found["results"]["checks"]["cases"] > 5
    assert 0 < found["results"]["bytes_per_token"] < found["results"]["model_bytes"]


def test_nothing_is_transferred_to_the_cpu(run: Run, cpu_native: None) -> None:
    done = run("bench", "transfer", "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert "nothing is transferred to CPU" in error and "vkmoe bench kernels" in hint


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_text_repeats_itself_where_the_cpu_computes_misses(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots move, and the last bits with them; twenty per cent is no last bit."""
    real, factors = Engine.full_logits, iter((1.0, 1.0, factor, factor))

    def scaled(engine: Engine, index: int = 0) -> NDArray[np.float32]:
        return real(engine, index) * np.float32(next(factors))

    monkeypatch.setattr(Engine, "full_logits", scaled)
    config = EngineConfig(expert_mode="hybrid", expert_slots=10, ctx_size=64, draft="none")
    with Engine(demo_model_path(), config) as engine:
        if factor == 1.0:
            (apart,) = re.findall(r"within (\S+) of", decode.repeats(engine, (5, 7, 11), 4))
            assert 0 < float(apart) < decode.MOST_APART, "not even the last bits moved"
        else:
            with pytest.raises(WrongResultError, match=r"differ by 0\.[12]"):
                decode.repeats(engine, (5, 7, 11), 4)


def test_decode_stops_at_a_wrong_kernel(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ((KernelClass("matvec", "Q4_K", "many", "long"), Launch(8, 3)),)

    def spoilt(variant: Variant, device: Device, own: Tuning) -> Iterator[Case]:
        assert own.launches == measured, "the engine's own tuning"
        for case in run_variant(variant, device, own):
            yield replace(case, ok=False, where="logits [3]")

    def tuned(info: DeviceInfo, source: str) -> Tuning:
        return replace(choose_tuning(info), launches=measured)

    monkeypatch.setattr("vkmoe.engine.tuning_for", tuned)
    monkeypatch.setattr("vkmoe.bench.decode.run_variant", spoilt)
    monkeypatch.setattr("vkmoe.bench.decode._measure", None)
    done = run("bench", "decode", "--quick", "--json")
    assert (done.code, done.out) == (1, "")
    assert "is wrong: logits [3]" in done.err.splitlines()[-2]
    assert done.err.splitlines()[-1].startswith("hint: nothing wrong is timed")


def test_a_text_that_is_longer_than_the_context_is_refused(run: Run) -> None:
    done = run(
        "bench", "decode", "--tokens", "100", "--ctx-size", "64", "--quick", "--repeats", "9"
    )
    assert done.code == 2 and "the context 64" in done.err and "--ctx-size" in done.err


def test_without_a_command_the_help_appears(run: Run) -> None:
    done = run("bench")
    assert (done.code, done.out) == (2, "") and "vkmoe bench kernels --compare" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("kernels", "--family", "matvecs"), "--family: no matvecs"),
        (("kernels", "--type", "Q9_K"), "--type: no Q9_K"),
        (("kernels", "--model", "gpt-2"), "--model: no gpt-2"),
        (("kernels", "--repeats", "1"), "less than 2"),
        (("transfer", "nothing"), "no part nothing"),
        (("transfer", "--copy-mib", "1,-1"), "no list of sizes"),
        (("kernels", "--compare", "no.json"), "no.json cannot be read"),
        (("kernels", "--plot", "out.txt"), "not a picture"),
        (("compression",), "No such command"),
    ],
)
def test_bad_usage(run: Run, words: tuple[str, ...], message: str) -> None:
    done = run("bench", *words)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error.startswith("error: ") and message in error and hint.startswith("hint: ")


def test_a_file_that_is_no_model(run: Run, tmp_path: Path) -> None:
    for command in ("kernels", "decode"):
        done = run("bench", command, "--model", str(tmp_path / "none.gguf"))
        assert (done.code, done.out) == (1, "") and "none.gguf" in done.err


def test_help_names_the_models() -> None:
    """Their names are written out, so that help needs no benchmark to be loaded."""
    words = (kernels_command.__doc__ or "").replace(",", " ").replace(";", " ").split()
    assert {word.rstrip(".") for word in words} >= {*MODELS, "tiny"}


def test_what_is_asked_counts_in_a_quick_run_too() -> None:
    info = choose_device(list_devices(), None)
    usual, quick = DecodeChoice(), DecodeChoice(quick=True)
    assert (usual.n_tokens, usual.n_repeats) > (quick.n_tokens, quick.n_repeats)
    assert (DecodeChoice(90, 80, quick=True).n_tokens, DecodeChoice(90, 80).n_repeats) == (90, 80)
    assert kernels.KernelChoice(repeats=80, quick=True).n_repeats == 80
    assert kernels.KernelChoice(largest_mib=900, quick=True).largest_bytes(info) == 900 * 2**20
    settings = TransferChoice(repeats=80, copy_mib=(99.0,), quick=True).settings(info)
    assert settings == TransferChoice(quick=True).settings(info)._replace(
        repeats=80, copy_mib=(99.0,)
    )


# ----- comparing -----


def slower(found: dict[str, Any], factor: float) -> dict[str, Any]:
    """The document of a run in which kernels took `factor` of the time."""
    changed = copy.deepcopy(found)
    for kernel in changed["results"]["kernels"]:
        kernel["us"] = {key: value * (factor if key != "n" else 1)
                        for key, value in kernel["us"].items()}  # fmt: skip
    return changed


def test_a_run_is_compared_with_an_earlier_one(run: Run, kept: Path, tmp_path: Path) -> None:
    """The earlier one took ten thousand times as long."""
    earlier = tmp_path / "before.json"
    earlier.write_text("a note\n" + json.dumps(slower(json.loads(kept.read_text()), 1e4)))
    found = document(run, *KERNELS, "--compare", str(earlier))
    kernel = found["comparison"]["lines"][-1]
    assert kernel["what"].startswith("matvec.q8_0") and kernel["verdict"] == "faster"
    assert kernel["speed"]["low"] > 1 and kernel["then"] > 100 * kernel["now"]
    assert found["comparison"]["with"] == json.loads(kept.read_text())["card"]


def test_changes_are_marked_beyond_noise_only() -> None:
    value = {"median": 100.0, "low": 90.0, "high": 120.0, "n": 9}
    kernel = {"variant": "a", "model": "b", "shape": "c", "us": value}
    row = {"what": "copy", "unit": "GB/s", "mode": "wall", "value": value, "note": ""}
    now = {"results": {"kernels": [kernel], "roofline": {"rows": [row]}}}
    for factor, kernels_now, rows_now in [(3.0, "faster", "slower"), (0.3, "slower", "faster"),
                                          (1.001, "", ""), (1.3, "", "")]:  # fmt: skip
        then = slower(now, factor)
        value_then = {key: v * (factor if key != "n" else 1) for key, v in value.items()}
        then["results"]["roofline"]["rows"][0]["value"] = value_then
        found = {change.what: change for change in changes(now, then)}
        assert found["a, b c"].verdict == kernels_now
        assert found["roofline: copy (wall)"].verdict == rows_now
        speeds = found["a, b c"].speed, found["roofline: copy (wall)"].speed
        assert speeds[0] is not None and speeds[0].median == pytest.approx(factor)
        assert speeds[1] is not None and speeds[1].median == pytest.approx(1 / factor)


def test_an_overhead_of_nothing_allows_any_ratio() -> None:
    value = {"median": 1.0, "low": -1.0, "high": 2.0, "n": 9}
    row = {"what": "a dispatch", "unit": "us", "mode": "wall", "value": value, "note": ""}
    run = {"results": {"dispatch": {"rows": [row]}}}
    (change,) = changes(run, run)
    assert (change.speed, change.verdict) == (None, "") and " any " in str(change)
    assert json.loads(json.dumps(change.document(), allow_nan=False))["speed"] is None


@pytest.mark.parametrize("fact", ["device", "clock", "benchmark"])
def test_runs_that_are_not_alike_are_refused_before_anything_is_timed(
    run: Run, kept: Path, tmp_path: Path, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = json.loads(kept.read_text())
    if fact == "device":
        then["card"]["device"] = "Another GPU"
    elif fact == "clock":
        then["results"]["roofline"]["latency_mode"] = "host_wall"
    else:
        then["benchmark"] = "transfer"
    path = tmp_path / "then.json"
    path.write_text(json.dumps(then))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_measure", None)
        done = run("bench", *KERNELS, "--compare", str(path))
        assert done.code == 2 and f"the earlier run has another {fact}" in done.err
        assert ("roofline:" in done.out) == (fact != "benchmark")
    again = run("bench", *KERNELS, "--compare", str(path), "--any-device")
    assert again.code == (2 if fact == "benchmark" else 0), again.err


def test_another_model_is_refused_before_it_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, roofline = {"device": "llvmpipe"}, {"rows": [], "latency_mode": "gpu_timestamp"}
    results = {"roofline": roofline, "model": "other.gguf", "tokens": 8, "rows": []}
    path = tmp_path / "then.json"
    path.write_text(json.dumps({"benchmark": "decode", "card": card, "results": results}))
    monkeypatch.setattr("vkmoe.bench.decode._roofline", None)
    done = run("bench", "decode", "--quick", "--compare", str(path))
    assert done.code == 2 and "another model: other.gguf, not demo.gguf" in done.err


@pytest.mark.parametrize("fails", ["compare", "plot"])
def test_what_was_measured_is_printed_whatever_follows(
    run: Run, kept: Path, tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in common with the earlier run, or no room for the picture."""
    found = json.loads(kept.read_text())
    earlier = tmp_path / "then.json"
    other = copy.deepcopy(found)
    other["results"]["kernels"], other["results"]["roofline"]["rows"] = [], []
    earlier.write_text(json.dumps(other))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernels, "run", lambda *_: copy.deepcopy(found))
    monkeypatch.setattr("vkmoe.bench.plot.draw", full)
    wanted = {"compare": str(earlier), "plot": str(tmp_path / "out.png")}[fails]
    done = run("bench", *KERNELS, "--json", f"--{fails}", wanted)
    assert done.code == {"compare": 2, "plot": 1}[fails]
    assert json.loads(done.out)["results"]["kernels"] == found["results"]["kernels"]
    assert {"compare": "no line in common", "plot": "No space left"}[fails] in done.err


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"benchmark": "kernels"}'])
def test_a_file_that_is_no_run_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "before.json"
    path.write_text(text)
    done = run("bench", *KERNELS, "--compare", str(path))
    assert (done.code, done.out) == (2, "") and "no document of a benchmark" in done.err


# ----- pictures -----


def test_a_picture_of_kernels(
    run: Run, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(kept.read_text())
    monkeypatch.setattr(kernels, "run", lambda *_: found)
    for name in ("kernels.png", "kernels.svg"):
        done = run("bench", *KERNELS, "--plot", str(tmp_path / name))
        assert done.code == 0 and f"the plot is in {tmp_path / name}" in done.err, done.err
    assert picture(tmp_path / "kernels.png") > 20
    svg = (tmp_path / "kernels.svg").read_text()
    for text in ("share of the roofline", "matvec.q8_0", found["card"]["device"]):
        assert text in svg, text


def test_a_picture_of_very_many_kernels(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the usual resolution it would be higher than a picture can be; few bars take its room."""
    found = json.loads(kept.read_text())
    found["results"]["kernels"] *= 3
    monkeypatch.setattr(plot, "BAR_INCHES", 2300 * plot.BAR_INCHES / 3)
    plot.draw(found, tmp_path / "all.png")
    with (tmp_path / "all.png").open("rb") as stream:
        header = stream.read(24)
    width, height = int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:], "big")
    assert 60000 < height < 2**16 and width > 1000


def test_without_matplotlib_one_line_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    done = run("bench", *KERNELS, "--plot", str(tmp_path / "out.png"))
    assert (done.code, done.out) == (1, ""), "before the work"
    assert done.err == 'error: --plot needs matplotlib\nhint: pip install "vkmoe[plot]"\n'
