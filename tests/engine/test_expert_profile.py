"""`--expert-profile` with a real model: the second start is warm, and no other file gets in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_expert_stats import GREEDY, TINY, generate, opened
from tests.engine.test_faults import without_frames
from tests.engine.tiny import model_path
from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.token_table import History
from vkmoe.experts.records.profile import profile_text, profiled_model
from vkmoe.gpu import _native as native
from vkmoe.llm import LLM
from vkmoe.models import open_model

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.usefixtures("nothing_left")
def test_a_failed_start_leaves_an_older_profile_alone(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    with opened("device", expert_profile=str(profile)) as llm:
        generate(llm)
    sound = profile.read_bytes()
    native.inject_failure("vkAllocateMemory", 2, "VK_ERROR_OUT_OF_HOST_MEMORY")
    with pytest.raises(VkmoeError) as caught:
        opened("device", tmp_path / "stats", expert_profile=str(profile))
    without_frames(caught.value)
    assert profile.read_bytes() == sound
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def first_token(llm: LLM) -> tuple[int, int]:
    """Uses and hits of the very first token of a run."""
    llm.engine.run_token(llm.tokenizer.encode("def")[0], 0)
    return llm.expert_statistics.served.total


def test_a_second_start_is_warm(tmp_path: Path) -> None:
    """The first token of a cold start hits nothing; after a profile most of it is there."""
    options: dict[str, Any] = {"ctx_size": 64, "expert_slots": 8}
    options["expert_profile"] = str(tmp_path / "profile")
    with LLM(**options) as llm:
        assert first_token(llm) == (24, 0), "6 layers, 4 used of 32"
        llm.generate("def add(a, b):\n    return", max_tokens=1, **GREEDY)
    with LLM(**options) as llm:
        n_uses, n_hits = first_token(llm)
    assert n_uses == 24 and n_hits > 12, n_hits


def test_a_profile_goes_on_where_it_ended_and_changes_no_reply(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    sums, replies = [], []
    for _ in range(2):
        with opened("cache", expert_profile=str(profile)) as llm:
            replies.append(generate(llm))
            sums.append(llm.engine.history().counts.sum())
    assert sums[1] > 1.8 * sums[0], "it is one memory over runs"
    assert replies[0] == replies[1]
    ended = profile.read_bytes()
    opened("device", expert_profile=str(profile)).close()
    assert profile.read_bytes() == ended, "a run without tokens"


def test_the_profile_of_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    with open_model(TINY) as file:
        tensors = [tensor for layer in file.expert_tensors for tensor in layer]
        profile.write_text(
            profile_text(profiled_model(file.spec, 2, tensors), History(np.ones(16)))
        )
    sound = profile.read_bytes()

    def never(done: int, total: int) -> None:
        raise AssertionError("weights were loaded")

    with pytest.raises(VkmoeError, match="belongs to another model") as caught:
        LLM(model_path("moe_odd"), expert_profile=str(profile), progress=never)
    assert caught.value.hint.startswith("give each model a profile of its own")
    assert profile.read_bytes() == sound
