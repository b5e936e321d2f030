"""Options of the expert cache: what makes them wrong, alone and together."""

from __future__ import annotations

from typing import Any

import pytest

from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.option_fields import environment_name

from .conftest import FakeLLM, Run

DEFAULT = EngineConfig().expert_policy
CONTRADICTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"expert_cache": "1GiB", "expert_slots": 3}, ["--expert-cache", "--expert-slots"]),
    *(
        (
            {"expert_policy": policy, "moe_predict_prefetch": True},
            ["--moe-predict-prefetch", f"--expert-policy {policy}"],
        )
        for policy in ("lru", "slru", "lfru")
    ),
]


def flag_for(name: str, value: Any) -> str:
    """The option as it is typed; a switch takes no value."""
    flag = "--" + name.replace("_", "-")
    return (
        f"{flag}={value}" if not isinstance(value, bool) else flag if value else f"--no{flag[1:]}"
    )


@pytest.mark.parametrize(("asked", "words"), CONTRADICTIONS, ids=lambda item: ",".join(item))
def test_contradictions_name_both_flags(
    run: Run, fake: type[FakeLLM], asked: dict[str, Any], words: list[str]
) -> None:
    """In Python, as flags and as variables."""
    with pytest.raises(UsageError) as caught:
        EngineConfig(**asked)
    assert caught.value.hint
    flags = [flag_for(name, value) for name, value in asked.items()]
    variables = {environment_name(name): str(value) for name, value in asked.items()}
    for done in (run("generate", "-p", "x", *flags), run("generate", "-p", "x", **variables)):
        assert done.code == 2 and not fake.calls
        first = done.err.splitlines()[0]
        assert first == f"error: {caught.value}"
        assert all(word in first for word in words)


@pytest.mark.parametrize(
    "asked",
    [
        {"expert_resident_ids": "1,2", "moe_warmpin": 2, "expert_slots": 9},
        {"expert_policy": "lru", "moe_predict_prefetch": False},
        {"expert_policy": "forecast", "moe_predict_prefetch": True},
    ],
)
def test_what_goes_together(asked: dict[str, Any]) -> None:
    assert EngineConfig(**asked)


def test_a_malformed_value_names_its_option_once(run: Run, fake: type[FakeLLM]) -> None:
    for flag, text in (("--expert-cache", "6gigs"), ("--expert-resident-ids", "1,x")):
        done = run("generate", "-p", "x", flag, text)
        assert done.code == 2 and done.err.splitlines()[0].count(flag) == 1, done.err


def test_the_command_line_beats_the_variable_of_its_rival(run: Run, fake: type[FakeLLM]) -> None:
    assert run("generate", "-p", "x", "--expert-slots", "8", VKMOE_EXPERT_CACHE="3MiB").code == 0
    assert run("generate", "-p", "x", "--expert-cache", "3MiB", VKMOE_EXPERT_SLOTS="8").code == 0
    made = [call["config"] for call in fake.calls if "config" in call]
    assert [(config.expert_cache, config.expert_slots) for config in made] == [
        (None, 8), ("3MiB", None)
    ]  # fmt: skip
    assert run("info", "--expert-slots", "8", VKMOE_EXPERT_CACHE="3MiB").code == 0


@pytest.mark.parametrize(
    ("flags", "variables", "policy", "prefetch"),
    [
        (["--expert-policy", "lru"], {"MOE_PREDICT_PREFETCH": "1"}, "lru", None),
        (["--moe-predict-prefetch"], {"EXPERT_POLICY": "lru"}, DEFAULT, True),
        (["--no-moe-predict-prefetch"], {"EXPERT_POLICY": "lru"}, "lru", False),
        ([], {"MOE_PREDICT_PREFETCH": "1"}, DEFAULT, True),
        ([], {}, DEFAULT, None),
    ],
)
def test_what_guesses_follows_the_command_line_first(
    run: Run,
    fake: type[FakeLLM],
    flags: list[str],
    variables: dict[str, str],
    policy: str,
    prefetch: bool | None,
) -> None:
    given = {"VKMOE_" + name: value for name, value in variables.items()}
    assert run("generate", "-p", "x", *flags, **given).code == 0
    made = fake.calls[0]["config"]
    assert (made.expert_policy, made.moe_predict_prefetch) == (policy, prefetch)


def test_slots_have_two_names(run: Run, fake: type[FakeLLM]) -> None:
    for flag in ("--expert-slots", "--moe-expert-cache-size"):
        fake.calls.clear()
        assert run("generate", "-p", "x", flag, "5").code == 0
        assert fake.calls[0]["config"].expert_slots == 5


@pytest.mark.parametrize("text", ["LFRU", " lfru", "Lfru "])
def test_words_are_taken_in_capitals_and_with_blanks(
    run: Run, fake: type[FakeLLM], text: str
) -> None:
    assert run("generate", "-p", "x", VKMOE_EXPERT_POLICY=text).code == 0
    assert fake.calls[0]["config"].expert_policy == "lfru"
