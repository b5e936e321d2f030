"""`--expert-stats` with a real model: counted in every mode, written whatever happens."""

from __future__ import annotations

import json
import logging
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_faults import without_frames
from tests.engine.tiny import expected, model_path
from tests.live import live_objects
from vkmoe.batch import RunResult, TokenBatch
from vkmoe.errors import DeviceLostError, VkmoeError
from vkmoe.gpu import _native as native
from vkmoe.llm import LLM

TINY = model_path("moe_plain")  # 2 layers of 8 experts, 2 used
DENSE = model_path("dense_tied")
PROMPT: list[int] = expected("moe_plain")["tokens"][:6].tolist()
N_TOKENS = 8
N_RUN = len(PROMPT) + N_TOKENS - 1  # the last token is chosen and not run
GREEDY: dict[str, Any] = {"temp": 0, "ignore_eos": True}
MODES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"expert_cache": "1"},
    "cache": {"expert_slots": 4, "moe_warmpin": 2, "moe_warmpin_after": 5},
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    return tmp_path / "stats.txt"


def opened(mode: str, stats: Path | None = None, **options: Any) -> LLM:
    paths: dict[str, Any] = {} if stats is None else {"expert_stats": str(stats)}
    return LLM(TINY, ctx_size=64, **MODES[mode], **paths, **options)


def generate(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, max_tokens=N_TOKENS, **GREEDY).token_ids


def document(stats: Path) -> dict[str, Any]:
    """The JSON beside the text, both of which must be there and agree."""
    found: dict[str, Any] = json.loads(stats.with_suffix(".json").read_text())
    assert f"\ntokens      {found['n_tokens']}\n" in stats.read_text()
    return found


def routed(llm: LLM) -> list[np.ndarray[Any, Any]]:
    """Collects what the log says of every token, independently of the profiler."""
    seen: list[np.ndarray[Any, Any]] = []
    run = llm.engine.run

    def watched(batch: TokenBatch) -> RunResult:
        result = run(batch)
        seen.extend(result.routing)
        return result

    llm.engine.run = watched  # type: ignore[method-assign]
    return seen


# ----- what is counted -----


def test_every_use_of_every_token_is_counted_in_every_mode(mode: str, stats: Path) -> None:
    with opened(mode, stats) as llm:
        seen = routed(llm)
        generate(llm)
        assert not stats.exists(), "it is written at the end"
    found = document(stats)
    assert (found["experts_in"], found["n_tokens"]) == (mode, N_RUN) and len(seen) == N_RUN
    for layer in range(2):
        uses = np.bincount(np.concatenate([ids[layer] for ids in seen]), minlength=8)
        top = {entry["expert"]: entry["n_uses"] for entry in found["layers"][layer]["top"]}
        assert top == {expert: n for expert, n in enumerate(uses.tolist()) if n}
        assert found["layers"][layer]["n_uses"] == uses.sum() == 2 * N_RUN
    if mode == "cache":
        assert 0 < found["n_hits"] < found["n_uses"]
    else:
        assert found["hit_rate"] == (1.0 if mode == "device" else 0.0)


def test_a_cache_tells_what_it_did_before_and_after_pinning(stats: Path) -> None:
    with opened("cache", stats) as llm:
        generate(llm)
        during = llm.expert_statistics
        pinned = llm.engine.cache.residency.pinned if llm.engine.cache else None
    found = document(stats)
    assert (found["n_uses"], found["n_hits"]) == during.served.total
    before, after = found["before_warm_pinning"], found["after_warm_pinning"]
    n_before = len(PROMPT)  # a batch counts as a whole, and the prompt is longer than asked for
    assert found["warm_after"] == n_before > 5 and before["n_uses"] == n_before * 2 * 2
    assert before["n_uses"] + after["n_uses"] == found["n_uses"]
    assert before["n_hits"] + after["n_hits"] == found["n_hits"]
    assert [layer["pinned"] for layer in found["layers"]] == pinned
    assert all(len(layer["pinned"]) == 2 for layer in found["layers"]), "half of the slots"
    cache = found["cache"]
    assert cache["n_uploads"] > 0 < cache["upload_bytes"] and cache["missed_bytes"] > 0
    assert (found["policy"], found["slots"], found["coverage"]) == ("forecast", [4, 4], 0.5)
    assert "policy forecast, 4 slots per layer (coverage 50.0 %)" in stats.read_text()


@pytest.mark.parametrize("guesses", [False, True])
def test_reads_of_guesses_are_hidden_behind_the_step_before(guesses: bool, stats: Path) -> None:
    with LLM(TINY, ctx_size=64, host_pool="192KiB", expert_stats=str(stats)) as llm:
        programs, residency = llm.engine._programs, llm.engine._experts.residency
        io = programs.io
        receive = io.receive

        def slow_receive(n_programs: int = 1) -> None:
            receive(n_programs)
            time.sleep(0.002)

        io.receive = slow_receive  # type: ignore[method-assign]
        second = np.arange(8, 16) if guesses else np.arange(0)  # all of the second layer
        residency.guess_layer = (  # type: ignore[method-assign]
            lambda layer: second if layer == 1 else np.arange(0)
        )
        generate(llm)
    pool = document(stats)["host_pool"]
    assert pool["n_reads"] > 0 and pool["read_ns"] > 0
    if guesses:
        assert pool["n_hinted"] > 0 and 0 < pool["hidden"] < 1
    else:
        assert pool["hidden"] == 0, "what is needed is waited for"


def test_without_pressure_there_is_no_cache_to_tell_of(stats: Path) -> None:
    with LLM(TINY, ctx_size=64, expert_slots=8, expert_stats=str(stats)) as llm:
        generate(llm)
    found = document(stats)
    assert (found["hit_rate"], found["cache"], found["coverage"]) == (1.0, None, 1.0)


def test_a_run_without_tokens_invents_nothing(stats: Path) -> None:
    opened("cache", stats).close()
    assert stats.read_text().count("(no accesses recorded)") == 3
    assert document(stats)["hit_rate"] is None


def test_a_dense_model_says_so(stats: Path) -> None:
    with LLM(DENSE, ctx_size=64, expert_stats=str(stats)) as llm:
        llm.generate([1, 2, 3], max_tokens=2, **GREEDY)
        assert llm.expert_statistics.counters is None
    assert "none: the model is dense" in stats.read_text()


# ----- whatever happens -----


class InterruptedDevice:
    """The native device; Ctrl-C comes after a token's submit and before its wait."""

    def __init__(self, device: Any, n_sound: int) -> None:
        self._device, self._n_sound = device, n_sound

    def submit(self, recording: Any, *queue: Any) -> Any:
        pending = self._device.submit(recording, *queue)
        if not queue:  # not an upload
            self._n_sound -= 1
            if self._n_sound == -1:
                signal.raise_signal(signal.SIGINT)
        return pending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def test_ctrl_c_leaves_the_statistics_of_the_tokens_before(
    mode: str, stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, opened(mode, stats) as llm:
        generate(llm)
        device: Any = InterruptedDevice(llm.engine.device.native, 1)
        monkeypatch.setattr(llm.engine.device, "native", device)  # which others may use next
        generate(llm)
    without_frames(caught.value)
    assert document(stats)["n_tokens"] >= N_RUN


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.sample(1)
def test_a_lost_device_leaves_statistics_and_profile(mode: str, stats: Path) -> None:
    profile = stats.with_name("profile")
    with (
        pytest.raises(DeviceLostError) as caught,
        opened(mode, stats, expert_profile=str(profile)) as llm,
    ):
        generate(llm)
        native.inject_failure("vkQueueSubmit", 2, "VK_ERROR_DEVICE_LOST")
        llm.generate(PROMPT[::-1], max_tokens=N_TOKENS, **GREEDY)
    without_frames(caught.value)
    assert document(stats)["n_tokens"] >= N_RUN
    assert np.sum(json.loads(profile.read_text())["counts"]) > 0.9 * 2 * 2 * N_RUN


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("mode", "name"),
    [("device", "none/s"), ("host", "folder"), ("cache", "none/s"), ("cache", "folder")],
)
@pytest.mark.sample(1)
def test_an_unwritable_path_costs_neither_text_nor_memory(
    mode: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    path, profile = tmp_path / name, tmp_path / "profile"
    before = live_objects()
    with (
        pytest.raises(VkmoeError, match="statistics could not be written to") as caught,
        opened(mode, path, expert_profile=str(profile)) as llm,
    ):
        assert "statistics will not be written at the end: " in caplog.text
        assert len(generate(llm)) == N_TOKENS
    assert native.live_objects() == before, "the device is freed all the same"
    assert caught.value.hint and "\n" not in str(caught.value)
    assert profile.is_file(), "one failure does not cost the other file"
    llm.close()  # says nothing a second time


@pytest.mark.usefixtures("nothing_left")
def test_the_first_error_stays_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = live_objects()
    with (
        pytest.raises(DeviceLostError) as caught,
        opened("cache", tmp_path / "none" / "stats") as llm,
    ):
        native.inject_failure("vkQueueSubmit", 3, "VK_ERROR_DEVICE_LOST")
        generate(llm)
    without_frames(caught.value)
    errors = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    assert len(errors) == 2 and all("could not be written" in error for error in errors)
    assert native.live_objects() == before


def test_what_neighbours_cost_is_in_the_statistics(stats: Path) -> None:
    """Tokens that are decoded count by the sequences of their batches; those of prompts do not."""
    with opened("cache", stats, parallel=2) as llm:
        generate(llm)
        llm.generate([PROMPT, PROMPT[:3]], max_tokens=N_TOKENS, **GREEDY)
    found = document(stats)["decoded_together"]
    n_uses = (N_TOKENS - 1) * 2 * 2  # in two layers
    assert [(each["n_sequences"], each["n_uses"]) for each in found] == [
        (1, n_uses),
        (2, 2 * n_uses),
    ]
    assert all(0 < each["hit_rate"] == each["n_hits"] / each["n_uses"] <= 1 for each in found)
    assert "  2 sequences decoded together: " in stats.read_text()
