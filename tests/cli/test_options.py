"""Options are generated: flags, defaults, variables and errors, for every field of the configs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
from typer.core import TyperOption

from vkmoe.choices import POLICIES_IN_WORDS, PolicyName
from vkmoe.cli.app import root
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.option_fields import environment_name, flags_of, long_flag

from .conftest import FakeLLM, Run

FIELDS = [*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingConfig)]
HINTS = get_type_hints(EngineConfig) | get_type_hints(SamplingConfig)
# Of texts that are read: one that can be, and one that cannot.
READ = {
    "vram_margin": ("1GiB", "-1"),
    "cache_ram": ("4GiB", "-2"),
    "expert_cache": ("1.5 gib", "0"),
    "expert_resident_ids": ("1, 2,,3", "1,two"),
    "host_pool": ("8 GiB", "0"),
    "dry_sequence_breakers": ('["x"]', "x"),
}


class Given(NamedTuple):
    """What an option is given: a text, its value, which is not the default, and wrong texts."""

    text: str
    value: Any
    wrong: list[str]


def given(item: dataclasses.Field[Any]) -> Given:
    kinds = [kind for kind in get_args(HINTS[item.name]) if isinstance(kind, type)]
    kinds = [kind for kind in kinds if kind is not type(None)] or [HINTS[item.name]]
    if bool in kinds:
        return Given("Disabled" if item.default is None else "yes", item.default is False, ["2"])
    if int in kinds or float in kinds:
        low, high = item.metadata["minimum"], item.metadata["maximum"]
        value = next(x for x in (high, low, 3) if x not in (None, item.default))
        wrong = ["many", *(["nan", "inf"] if float in kinds else ["3.5"])]
        wrong += [] if low is None else [str(low - 1)]
        return Given(str(value), value, wrong + ([] if high is None else [str(high + 1)]))
    if str in kinds:
        text, *wrong = READ.get(item.name, ("some text",))
        return Given(text, text, wrong)
    words = [word for word in choices_of(HINTS[item.name]) if word != item.default]
    return Given(words[-1].title(), words[-1], ["nonsense"])


def choices_of(hint: Any) -> list[str]:
    """All words that a type of words, or of several, has."""
    return [hint] if isinstance(hint, str) else [x for a in get_args(hint) for x in choices_of(a)]


def configured(fake: type[FakeLLM], name: str) -> Any:
    configs = (fake.calls[0]["config"], fake.calls[1]["sampling"])
    return next(getattr(config, name) for config in configs if hasattr(config, name))


def name_of(item: dataclasses.Field[Any]) -> str:
    return item.name


def test_defaults_are_those_of_the_dataclasses(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VKMOE_DEVICE")
    assert run("generate", "-p", "x").code == 0
    assert fake.calls[0]["config"] == EngineConfig()
    assert fake.calls[1]["sampling"] == SamplingConfig()


@pytest.mark.parametrize("item", FIELDS, ids=name_of)
@pytest.mark.sample(16)
def test_flag_and_variable_set_the_field(
    run: Run, fake: type[FakeLLM], item: dataclasses.Field[Any]
) -> None:
    text, value, _ = given(item)
    flag = long_flag(flags_of(item), value)
    words = [flag] if isinstance(value, bool) else [flag, text]
    assert run("generate", "-p", "x", *words).code == 0
    assert configured(fake, item.name) == value
    fake.calls.clear()
    assert run("generate", "-p", "x", **{environment_name(item.name): text}).code == 0
    assert configured(fake, item.name) == value
    fake.calls.clear()
    assert run("generate", "-p", "x", **{environment_name(item.name): ""}).code == 0
    assert configured(fake, item.name) == item.default


@pytest.mark.parametrize("item", [each for each in FIELDS if given(each).wrong], ids=name_of)
def test_malformed_values_name_flag_and_variable(
    run: Run, fake: type[FakeLLM], item: dataclasses.Field[Any]
) -> None:
    for wrong in given(item).wrong:
        done = run("generate", "-p", "x", **{environment_name(item.name): wrong})
        assert done.code == 2
        first = done.err.splitlines()[0]
        assert first.startswith("error: ") and wrong in first
        assert environment_name(item.name) in first and long_flag(flags_of(item)) in first
        assert not fake.calls


WORDS = {True: "1 true on yes enabled", False: "0 false off no disabled"}
SWITCHES = [item for item in FIELDS if isinstance(given(item).value, bool)]


@pytest.mark.parametrize("item", SWITCHES, ids=name_of)
def test_variables_of_switches_take_many_words_in_any_case(
    run: Run, fake: type[FakeLLM], item: dataclasses.Field[Any]
) -> None:
    for value, words in WORDS.items():
        for word in [*words.split(), *words.upper().split(), f" {words.title().split()[1]} "]:
            fake.calls.clear()
            assert run("generate", "-p", "x", **{environment_name(item.name): word}).code == 0
            assert configured(fake, item.name) is value
    done = run("generate", "-p", "x", **{environment_name(item.name): "perhaps"})
    named = [environment_name(item.name), "'perhaps'", *" ".join(WORDS.values()).split()]
    assert done.code == 2 and all(word in done.err.splitlines()[0] for word in named), done.err


def test_the_command_line_beats_the_variable_of_a_switch(run: Run, fake: type[FakeLLM]) -> None:
    for flag, value in (("--promote-on-read", True), ("--no-promote-on-read", False)):
        fake.calls.clear()
        assert run("generate", "-p", "x", flag, VKMOE_PROMOTE_ON_READ=str(not value)).code == 0
        assert configured(fake, "promote_on_read") is value


def test_variables_of_the_commands_own_options(run: Run, fake: type[FakeLLM]) -> None:
    done = run(
        "generate",
        VKMOE_MODEL="m.gguf",
        VKMOE_PROMPT="x",
        VKMOE_MAX_TOKENS="4",
        VKMOE_STOP="a b\nc",
        VKMOE_IGNORE_EOS="1",
        VKMOE_QUIET="true",
        VKMOE_VERBOSE="0",
        VKMOE_JSON="1",
    )
    assert done.code == 0
    assert done.out.startswith("{")
    assert done.err == ""
    assert fake.calls[0]["model"] == "m.gguf"
    call = fake.calls[1]
    assert (call["max_tokens"], call["stop"], call["ignore_eos"]) == (4, ["a b", "c"], True)


@pytest.mark.parametrize("name", ["MAX_TOKENS", "IGNORE_EOS", "QUIET", "VERBOSE", "JSON"])
def test_malformed_variables_of_the_commands_own_options(
    run: Run, fake: type[FakeLLM], name: str
) -> None:
    done = run("generate", "-p", "x", **{f"VKMOE_{name}": "?"})
    assert done.code == 2
    assert f"VKMOE_{name}" in done.err.splitlines()[0]


def test_the_help_describes_every_policy() -> None:
    (item,) = (item for item in FIELDS if item.name == "expert_policy")
    assert tuple(POLICIES_IN_WORDS) == get_args(PolicyName)
    for name, words in POLICIES_IN_WORDS.items():
        assert f"{words} ({name})" in item.metadata["help"]


def test_every_option_has_its_variable_and_its_help() -> None:
    for name, command in root.commands.items():
        for parameter in command.params:
            if isinstance(parameter, TyperOption):
                assert parameter.help, (name, parameter.name)
                assert str(parameter.envvar).startswith("VKMOE_"), (name, parameter.name)
