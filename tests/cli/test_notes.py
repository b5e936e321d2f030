"""What stderr tells about the CPU and about the validation layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkmoe.errors import PromptError
from vkmoe.facts import DeviceInfo

from .conftest import DEVICE, FakeLLM, Run

GPU = replace(DEVICE, index=1, name="Real GPU", type="discrete",
              features=frozenset({"buffer_device_address"}))  # fmt: skip
CPU = replace(DEVICE, features=GPU.features)
NO_GPU = "no GPU found: running on the CPU"
MESSAGES = ("SYNC-HAZARD-READ-AFTER-WRITE:\n  of a buffer", "VUID-1: wrong")


def machine(monkeypatch: pytest.MonkeyPatch, devices: list[DeviceInfo], blocked: list[str]) -> None:
    monkeypatch.setattr("vkmoe.gpu.device.list_devices", lambda: devices)
    monkeypatch.setattr("vkmoe.gpu.device.blocked_render_nodes", lambda: blocked)


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("chat",), ("devices",)])
def test_no_gpu(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    machine(monkeypatch, [CPU], [])
    done = run(*command)
    assert done.code == 0 and NO_GPU in done.err
    assert "render" not in done.err


def test_a_cpu_beside_a_gpu_is_a_choice(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, [CPU, GPU], [])
    for command in (("generate", "-p", "x", "--device", "0"), ("devices", "--device", "0")):
        done = run(*command)
        assert "running on the CPU, not on Real GPU" in done.err
        assert NO_GPU not in done.err
    assert "CPU" not in run("devices").err, "the GPU is chosen"


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("devices",)])
def test_a_blocked_gpu_is_named(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """The driver of a GPU that may not be opened lists nothing; only the CPU's is left."""
    machine(monkeypatch, [CPU], ["/dev/dri/renderD128", "/dev/dri/renderD129"])
    done = run(*command)
    assert NO_GPU in done.err
    assert "no permission to open /dev/dri/renderD128, /dev/dri/renderD129" in done.err
    assert "`render` group" in done.err


def test_quiet_says_nothing_of_the_cpu(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, [CPU], ["/dev/dri/renderD128"])
    assert run("generate", "-p", "x", "-q").err == ""


def test_a_silent_validation_layer_is_said_so(run: Run, fake: type[FakeLLM]) -> None:
    done = run("generate", "-p", "x", "--validation")
    assert done.code == 0 and "validation: no messages\n" in done.err
    assert run("generate", "-p", "x", "--validation", "-q").err == ""
    assert "validation" not in run("generate", "-p", "x").err


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("chat",)])
@pytest.mark.parametrize("more", [(), ("-q",)])
def test_validation_messages_are_shown_and_fail(
    run: Run, fake: type[FakeLLM], command: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Each on one line, whatever was asked to be quiet; the text is not held back."""
    fake.validation_messages = MESSAGES
    done = run(*command, "--validation", *more)
    assert done.code == 1
    assert "validation: SYNC-HAZARD-READ-AFTER-WRITE: of a buffer\n" in done.err
    assert "validation: VUID-1: wrong\n" in done.err
    assert "error: the validation layer reported 2 messages\nhint: " in done.err
    assert fake.calls[-1] == {"closed": True}
    assert done.out == ("one two thrée!\n" if command[0] == "generate" else "")


def test_validation_messages_are_shown_before_an_error(run: Run, fake: type[FakeLLM]) -> None:
    fake.validation_messages = MESSAGES[1:]
    fake.fail_after = (1, PromptError("it does not fit", "shorten it"))
    done = run("generate", "-p", "x", "--validation")
    assert done.code == 1
    assert done.err.endswith(
        "validation: VUID-1: wrong\nerror: it does not fit\nhint: shorten it\n"
    )
