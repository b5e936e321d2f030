"""`vkmoe plan`: what it explains, as text and as JSON, and what contradicts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need_cpu
from tools.make_synthetic_model import make
from vkmoe.placement.forecast.device_profiles import known_profiles

from .conftest import Run


def test_a_plan_for_a_device_that_is_not_here(run: Run) -> None:
    done = run("plan", "--device-profile", "rtx3060-12gb", "--expert-slots", "8")
    assert done.code == 0 and not done.err
    lines = done.out.splitlines()
    assert lines[1].startswith("device        NVIDIA GeForce RTX 3060 (NVK)")
    assert lines[2].startswith("experts       cache, 8 of 32 of each layer on the device")
    assert any("expert slots, 8 of 32" in line and "as --expert-slots" in line for line in lines)
    assert any("KV cache" in line and "--ctx-size changes it" in line for line in lines)
    assert any(line == "hit rate      63.1 % (by the mean of recorded traces)" for line in lines)
    assert any("without a hit" in line and "with hits alone" in line for line in lines)
    assert any("192 bit at 15 Gbit/s: 360 GB/s by NVIDIA's data sheet" in line for line in lines)


def test_the_help_names_the_profiles_there_are(run: Run) -> None:
    words = " ".join(run("plan", "--help").out.split())
    assert all(name in words for name in known_profiles())


@pytest.mark.usefixtures("cpu_native")
def test_the_same_as_json(run: Run) -> None:
    done = run("plan", "--device-profile", "navi31", "--json", "--cpu-moe")
    found = json.loads(done.out)
    assert (found["mode"], found["cpu_layers"], found["mode_reason"]) == ("cpu", 6, "as --cpu-moe")
    lines = {line["item"]: line for line in found["lines"]}
    of_cpu = lines["experts that the CPU computes, of 6 of 6 layers"]
    assert (of_cpu["place"], of_cpu["option"], of_cpu["heap"]) == ("file", "", None)
    assert sum(line["bytes"] for line in found["lines"] if line["place"] == "device") > 0
    assert found["expected"]["hit_rate"] == 0.0 < found["expected"]["rate"]
    assert found["bytes_per_second"]["device"] == 960e9
    assert set(found["sources"]) == {"device", "link", "host", "file"}


@pytest.mark.parametrize("device", ["vulkan", "cpu"])
def test_a_plan_for_a_device_that_is_here_is_measured(run: Run, device: str) -> None:
    if device == "cpu":
        need_cpu()
    found = json.loads(run("plan", "--device", device, "--json").out)
    assert found["mode"] == "resident" and found["sources"] == {"speeds": "measured now"}
    assert found["bytes_per_second"]["host"] > 1e8 < found["bytes_per_second"]["device"]
    assert found["expected"]["rate"] > 0 and found["expected"]["hit_rate"] == 1.0
    read = found["expected"]["bytes"]
    assert min(read["trunk"], read["experts"], read["others"]) > 1 << 20


def test_hits_are_expected_by_a_profile(run: Run, tmp_path: Path) -> None:
    profile = str(tmp_path / "uses.json")
    run("generate", "-p", "def f", "-n", "8", "--expert-profile", profile, "--device", "vulkan")
    done = run("plan", "--device-profile", "8gb-nobar", "--expert-slots", "4",
               "--expert-profile", profile, "--json")  # fmt: skip
    expected = json.loads(done.out)["expected"]
    assert 0 < expected["hit_rate"] < 1 and "--expert-profile" in expected["hit_rate_reason"]
    assert expected["without_hits"] < expected["rate"] < expected["with_hits_alone"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device-profile", "navi99"], "no device profile 'navi99'"),
        (["--device-profile", "navi31", "--device", "0"], "contradicts --device 0"),
        (["--cpu-moe", "--expert-mode", "cache"], "--cpu-moe contradicts --expert-mode cache"),
        (["--no-cpu-moe", "--expert-mode", "hybrid"], "--no-cpu-moe contradicts"),
        (["--n-cpu-moe", "2", "--cpu-moe"], "--n-cpu-moe 2 contradicts --cpu-moe"),
        (["--n-cpu-moe", "2", "--expert-mode", "resident"], "contradicts --expert-mode resident"),
        (["--cpu-moe", "--expert-slots", "4"], "--expert-slots 4 contradicts --cpu-moe"),
        (["--cpu-moe", "--executor", "stepped"], "--executor stepped contradicts --cpu-moe"),
        (["--expert-mode", "hybrid", "--host-pool", "1GiB"], "--host-pool 1GiB contradicts"),
        (["--expert-mode", "hybrid", "--miss", "gather"], "--miss gather contradicts"),
        (
            ["--expert-mode", "resident", "--expert-cache", "1GiB"],
            "--expert-cache 1GiB contradicts",
        ),
    ],
)
def test_what_contradicts_is_named(run: Run, words: list[str], told: str) -> None:
    done = run("plan", *words)
    assert done.code == 2 and told in done.err and "hint:" in done.err and not done.out


@pytest.mark.usefixtures("cpu_native")
def test_what_is_typed_wins_over_a_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKMOE_CPU_MOE", "1")
    words = ["plan", "--device-profile", "navi31", "--json"]
    assert json.loads(run(*words).out)["mode"] == "cpu"
    assert json.loads(run(*words, "--expert-mode", "cache").out)["mode"] == "cache"
    assert json.loads(run(*words, "--no-cpu-moe").out)["mode"] == "resident"
    assert json.loads(run(*words, "--n-cpu-moe", "2").out)["cpu_layers"] == 2
    slots = json.loads(run(*words, "--expert-slots", "4").out)
    assert slots["mode"] == "cache" and slots["expert_slots"] == [4] * 6
    monkeypatch.setenv("VKMOE_DEVICE_PROFILE", "navi31")
    here = json.loads(run("plan", "--device", "cpu", "--json").out)
    assert here["sources"] == {"speeds": "measured now"}


@pytest.mark.parametrize(
    ("free_mib", "words", "told"),
    [
        (20, ["--expert-mode", "resident", "-ngl", "99"], "--expert-mode resident needs"),
        (20, ["--n-cpu-moe", "1"], "use --n-cpu-moe"),
        (2, [], "without its experts"),
    ],
)
def test_what_does_not_fit_is_one_error(
    run: Run, tmp_path: Path, free_mib: int, words: list[str], told: str
) -> None:
    if "--n-cpu-moe" in words:
        need_cpu()
    found = json.loads((Path(__file__).parents[2] / "vkmoe/data/devices/navi31.json").read_text())
    size = (512 + free_mib) << 20  # of which plans leave 512 MiB
    for heap in found["device"]["heaps"]:
        heap |= {"size": size, "budget": size}
    small = tmp_path / "small.json"
    small.write_text(json.dumps(found))
    done = run("plan", "--device-profile", str(small), *words)
    assert done.code == 1 and told in done.err and "hint:" in done.err


@pytest.mark.usefixtures("cpu_native")
def test_the_next_plans_are_listed_with_what_they_lack(run: Run, tmp_path: Path) -> None:
    """A file of full size without weights: the plan is the fastest of all that were compared."""
    path = tmp_path / "mixtral.gguf"
    make("mixtral-8x7b", path, None, "q4_k_m", sparse=True)
    words = ["plan", str(path), "--device-profile", "8gb-nobar"]
    found = json.loads(run(*words, "--json").out)

    def seconds(each: dict[str, Any]) -> float:
        rates = each["expected"]["rate"], each["expected"]["prompt_rate"]
        return sum(512 / float(rate) for rate in rates)

    assert found["mode"] == "hybrid" and found["expert_slots"] and len(found["others"]) == 3
    assert {each["mode"] for each in found["others"]} >= {"cache", "cpu"}
    assert all(seconds(each) >= seconds(found) and each["lacks"] for each in found["others"])
    lines = run(*words).out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.endswith("plans that were compared"))
    assert lines[head + 1].endswith("(the plan)")
    assert all(each["lacks"] in "\n".join(lines[head + 2 :]) for each in found["others"])
    assert found["advice"] == "" or lines[-1] == f"advice        {found['advice']}"


def test_advice_is_what_gains_most(run: Run, tmp_path: Path) -> None:
    """Half of the model is read from the file: RAM gains more than a shorter context."""
    path = tmp_path / "big.gguf"
    make("gpt-oss-120b", path, None, "mxfp4", sparse=True)
    done = run("plan", str(path), "--device-profile", "8gb-nobar", "--expert-mode", "cache")
    line = done.out.splitlines()[-1]
    gain = re.fullmatch(r"advice {8}8 GiB more RAM: ([\d.]+) -> ([\d.]+) tok/s", line)
    assert gain and float(gain[2]) > 1.05 * float(gain[1])
    demo = run("plan", "--device-profile", "navi31").out
    assert "advice" not in demo, "all fits: nothing gains"
