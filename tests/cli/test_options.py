"""Options are generated: flags, defaults, variables and errors, for every field of the configs."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from typer.core import TyperOption

from vkmoe.choices import POLICIES_IN_WORDS, PolicyName
from vkmoe.cli.app import root
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.option_fields import environment_name, flags_of, long_flag

from .conftest import FakeLLM, Run

FIELDS = [*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingConfig)]
# A value other than the default for each type, and one that cannot be read.
GIVEN: dict[str, tuple[str, Any, str | None]] = {
    "device": ("intel", "intel", None),
    "ctx_size": ("77", 77, "many"),
    "cache_type_k": ("Q8_0", "q8_0", "f64"),
    "cache_type_v": ("f32", "f32", "q4_0"),
    "parallel": ("4", 4, "0"),
    "ubatch_size": ("64", 64, "some"),
    "threads": ("3", 3, "0"),
    "draft": ("Lookup", "lookup", "model"),
    "validation": ("yes", True, "perhaps"),
    "tuning": ("TABLE", "table", "chair"),
    "vram_margin": ("1GiB", "1GiB", "-1"),
    "expert_mode": ("Hybrid", "hybrid", "gpu"),
    "cpu_moe": ("0", False, "2"),
    "n_cpu_moe": ("3", 3, "-1"),
    "gpu_layers": ("99", 99, "-1"),
    "expert_cache": ("1.5 gib", "1.5 gib", "0"),
    "expert_slots": ("9", 9, "0"),
    "expert_policy": ("lfru", "lfru", "fifo"),
    "expert_allocation": ("Global", "global", "both"),
    "moe_warmpin": ("0", 0, "-1"),
    "moe_warmpin_after": ("5", 5, "0"),
    "expert_resident_ids": ("1, 2,,3", "1, 2,,3", "1,two"),
    "host_pool": ("8 GiB", "8 GiB", "0"),
    "executor": ("Stepped", "stepped", "cut"),
    "miss": ("gather", "gather", "wait"),
    "promote_on_read": ("Disabled", False, "2"),
    "moe_predict_prefetch": ("off", False, "maybe"),
    "expert_copies": ("wait", "wait", "later"),
    "expert_profile": ("uses.npz", "uses.npz", None),
    "expert_stats": ("stats.txt", "stats.txt", None),
    "temp": ("0.25", 0.25, "warm"),
    "top_k": ("3", 3, "3.5"),
    "top_p": ("0.5", 0.5, "1.5"),
    "min_p": ("0.1", 0.1, "-1"),
    "repeat_penalty": ("1.5", 1.5, "0"),
    "repeat_last_n": ("8", 8, "-2"),
    "presence_penalty": ("0.5", 0.5, "nan"),
    "frequency_penalty": ("-0.5", -0.5, "inf"),
    "typical_p": ("0.5", 0.5, "2"),
    "xtc_probability": ("0.5", 0.5, "-0.1"),
    "xtc_threshold": ("0.2", 0.2, "1.5"),
    "dry_multiplier": ("0.8", 0.8, "101"),
    "dry_base": ("2", 2.0, "0.5"),
    "dry_allowed_length": ("3", 3, "0"),
    "dry_penalty_last_n": ("64", 64, "-2"),
    "dry_sequence_breakers": ('["x"]', '["x"]', "x"),
    "mirostat": ("2", 2, "3"),
    "mirostat_tau": ("4.5", 4.5, "-1"),
    "mirostat_eta": ("0.2", 0.2, "2"),
    "seed": ("123", 123, "-1"),
}


# What a field needs beside itself.
BESIDE = {"expert_num_resident": {"VKMOE_EXPERT_RESIDENT_SELECTION": "first_n"}}


def configured(fake: type[FakeLLM], name: str) -> Any:
    configs = (fake.calls[0]["config"], fake.calls[1]["sampling"])
    return next(getattr(config, name) for config in configs if hasattr(config, name))


def flag_of(item: dataclasses.Field[Any]) -> str:
    return long_flag(flags_of(item))


def test_every_field_has_a_case_here() -> None:
    assert set(GIVEN) == {item.name for item in FIELDS}


def test_defaults_are_those_of_the_dataclasses(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VKMOE_DEVICE")
    assert run("generate", "-p", "x").code == 0
    assert fake.calls[0]["config"] == EngineConfig()
    assert fake.calls[1]["sampling"] == SamplingConfig()


@pytest.mark.parametrize("item", FIELDS, ids=lambda item: item.name)
def test_flag_and_variable_set_the_field(
    run: Run, fake: type[FakeLLM], item: dataclasses.Field[Any]
) -> None:
    text, value, _ = GIVEN[item.name]
    beside = BESIDE.get(item.name, {})
    flag = long_flag(flags_of(item), value)
    words = [flag] if isinstance(value, bool) else [flag, text]
    assert run("generate", "-p", "x", *words, **beside).code == 0
    assert configured(fake, item.name) == value
    fake.calls.clear()
    assert run("generate", "-p", "x", **{environment_name(item.name): text}, **beside).code == 0
    assert configured(fake, item.name) == value
    fake.calls.clear()
    assert run("generate", "-p", "x", **{environment_name(item.name): ""}).code == 0
    assert configured(fake, item.name) == item.default


@pytest.mark.parametrize(
    "item", [item for item in FIELDS if GIVEN[item.name][2]], ids=lambda item: item.name
)
def test_malformed_values_name_flag_and_variable(
    run: Run, fake: type[FakeLLM], item: dataclasses.Field[Any]
) -> None:
    bad = GIVEN[item.name][2]
    assert bad is not None
    done = run("generate", "-p", "x", **{environment_name(item.name): bad})
    assert done.code == 2
    first = done.err.splitlines()[0]
    assert first.startswith("error: ")
    assert environment_name(item.name) in first
    assert flag_of(item) in first
    assert bad in first
    assert not fake.calls


WORDS = {True: "1 true on yes enabled", False: "0 false off no disabled"}
SWITCHES = [item for item in FIELDS if isinstance(GIVEN[item.name][1], bool)]


@pytest.mark.parametrize("item", SWITCHES, ids=lambda item: item.name)
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
