"""What breaks stays one clear error: lost devices, lies of the driver, no memory, Ctrl-C."""

from __future__ import annotations

import _thread
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.tiny import expected, model_path
from tests.live import live_objects
from tests.samples import sampled
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import DeviceLostError, GpuError, OutOfMemoryError
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import memory_type_candidates
from vkmoe.gpu.program import Program
from vkmoe.llm import LLM

SMALLEST = model_path("moe_unnormalised")
TINY = model_path("moe_plain")
PROMPT: list[int] = expected("moe_plain")["tokens"][:6].tolist()
GREEDY: dict[str, Any] = {"temp": 0, "ignore_eos": True}
N_TOKENS = 8
CREATIONS = [
    "vkCreateInstance",
    "vkEnumeratePhysicalDevices",
    "vkCreateDevice",
    "vkCreateBuffer",
    "vkAllocateMemory",
    "vkBindBufferMemory",
    "vkMapMemory",
    "vkCreateDescriptorPool",
    "vkCreateDescriptorSetLayout",
    "vkAllocateDescriptorSets",
    "vkCreateShaderModule",
    "vkCreatePipelineLayout",
    "vkCreatePipelineCache",
    "vkCreateComputePipelines",
    "vkCreateCommandPool",
    "vkAllocateCommandBuffers",
    "vkBeginCommandBuffer",
    "vkEndCommandBuffer",
    "vkCreateFence",
    "vkQueueSubmit",
    "vkWaitForFences",
]
GROWING = (0, 1, 2, 4, 7, 11, 17, 26, 40, 61, 92)
pytestmark = pytest.mark.usefixtures("one_device")


class FaultyDevice:
    """The native device, but its submits go wrong as `fault(device, recordings)` says."""

    def __init__(self, device: Any, n_sound: int, fault: Callable[[Any, Any], Any]) -> None:
        self._device, self._n_sound, self._fault = device, n_sound, fault

    def submit(self, recording: Any) -> Any:
        self._n_sound -= 1
        if self._n_sound == -1:
            return self._fault(self._device, recording)
        return self._device.submit(recording)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(TINY, ctx_size=64) as opened:
        yield opened


def right_text(llm: LLM) -> list[int]:
    """What the model replies when nothing goes wrong; leaves nothing in the cache."""
    token_ids = llm.generate(PROMPT, max_tokens=N_TOKENS, **GREEDY).token_ids
    llm.forget()
    return token_ids


def run_into(
    llm: LLM,
    error: type[BaseException],
    after: int = 0,
    begins: Callable[[], None] = lambda: None,
) -> tuple[list[int], BaseException]:
    """The tokens handed out before the error; `begins` what goes wrong after so many of them."""
    published: list[int] = []
    try:
        if not after:
            begins()
        for piece in llm.stream(PROMPT, max_tokens=N_TOKENS, **GREEDY):
            published.append(piece.token_id)
            if len(published) == after:
                begins()
    except error as caught:
        return published, without_frames(caught)
    raise AssertionError(f"no {error.__name__}")


def without_frames(error: BaseException) -> BaseException:
    """The error without its tracebacks, whose frames keep Vulkan objects alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def nothing_runs(device: Any, recordings: Any) -> Any:
    return device.submit(device.recorder().finish())


def two_run(device: Any, recordings: Any) -> Any:
    assert len(recordings) > 2, "a prompt is one submit of many recordings"
    return device.submit(recordings[:2])


# What goes wrong, after so many tokens: at the prompt's begin, within it, in the reply.
PLACES = pytest.mark.parametrize(
    ("fault", "after"), [(nothing_runs, 0), (two_run, 0), (nothing_runs, 3)]
)


@PLACES
def test_a_fence_that_lies_publishes_nothing(
    llm: LLM, fault: Callable[[Any, Any], Any], after: int
) -> None:
    right = right_text(llm)
    sound = llm.engine.device.native
    faulty: Any = FaultyDevice(sound, 0, fault)
    published, error = run_into(
        llm, DeviceLostError, after, lambda: setattr(llm.engine.device, "native", faulty)
    )
    assert published == right[:after]
    assert isinstance(error, DeviceLostError) and error.hint
    assert "log was not written" in str(error)
    assert llm.scheduler.regions.tokens(0) == ()
    assert llm.last_statistics is not None
    assert llm.last_statistics.finish_reason == "interrupt"
    llm.engine.device.native = sound
    assert right_text(llm) == right, "what the failed token left was used"


@pytest.mark.usefixtures("nothing_left")
def test_a_program_that_ran_half_is_refused_too(llm: LLM) -> None:
    right_text(llm)
    engine = llm.engine
    program = engine.program(False)
    n_half = len(program.commands) // 2
    half = Program("half", [*program.commands[:n_half], program.commands[-1]])
    assert half.commands[-1].label == "log out"
    recording = engine._backend.record(half)
    sound = engine.device.native
    faulty = FaultyDevice(sound, 0, lambda device, _: device.submit(recording))
    engine.device.native = faulty  # type: ignore[assignment]
    assert run_into(llm, DeviceLostError)[0] == []


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkWaitForFences"])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.sample(2)
def test_a_lost_device_is_told_once(call: str, after: int) -> None:
    llm = LLM(TINY, ctx_size=64)
    right = right_text(llm)
    published, error = run_into(
        llm, DeviceLostError, after, lambda: native.inject_failure(call, 0, "VK_ERROR_DEVICE_LOST")
    )
    assert isinstance(error, DeviceLostError)
    assert error.hint and call in str(error) and error.result == "VK_ERROR_DEVICE_LOST"
    assert published == right[:after]
    # Nothing is tried again: this second injection is never used up.
    native.inject_failure("vkQueueSubmit", 0, "VK_ERROR_OUT_OF_HOST_MEMORY")
    assert run_into(llm, DeviceLostError)[0] == []
    llm.close()
    llm.close()


@pytest.mark.usefixtures("everything_staged", "nothing_left")
@pytest.mark.parametrize(
    ("result", "error"),
    [
        ("VK_ERROR_DEVICE_LOST", DeviceLostError),
        ("VK_ERROR_OUT_OF_DEVICE_MEMORY", OutOfMemoryError),
    ],
)
@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("vkQueueSubmit", 0),  # clears the KV cache
        ("vkQueueSubmit", 4),  # uploads
        ("vkAllocateMemory", 2),
        *sampled(
            [
                ("vkQueueSubmit", 1),
                ("vkQueueSubmit", 16),
                ("vkWaitForFences", 0),
                ("vkAllocateMemory", 5),
            ],
            lambda case: False,
        ),
    ],
)
@pytest.mark.sample(2)
def test_a_failure_while_loading(call: str, after: int, result: str, error: type[GpuError]) -> None:
    native.inject_failure(call, after, result)
    config = EngineConfig(ctx_size=32, expert_mode="resident")  # else less is tried
    failure = failure_of_opening(config)
    assert isinstance(failure, error) and failure.hint and failure.result == result


@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkWaitForFences"])
def test_memory_that_ran_out_in_a_token_is_not_a_lost_device(llm: LLM, call: str) -> None:
    right = right_text(llm)
    result = "VK_ERROR_OUT_OF_DEVICE_MEMORY"
    published, error = run_into(
        llm, OutOfMemoryError, 2, lambda: native.inject_failure(call, 0, result)
    )
    assert published == right[:2]
    assert isinstance(error, OutOfMemoryError) and error.hint
    assert right_text(llm) == right


def failure_of_opening(config: EngineConfig) -> BaseException | None:
    """What opening the smallest model raises; a tidy world afterwards."""
    before = live_objects()
    try:
        with Engine(SMALLEST, config) as engine:
            engine.run_token(1, 0)
            engine.full_logits()
    except BaseException as error:
        failure: BaseException | None = without_frames(error)
    else:
        failure = None
    finally:
        native.clear_injections()
    gc.collect()
    assert native.live_objects() == before
    return failure


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("places", [(0, 6), pytest.param(GROWING, marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("call", sampled(CREATIONS, CREATIONS[::4].__contains__))
@pytest.mark.sample(2)
def test_no_memory_at_any_call_is_one_clear_error(
    call: str, places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first such call fails, then others behind it, until there are no more."""
    # Another memory type would save the day; that is tested with invented devices.
    monkeypatch.setattr(
        "vkmoe.gpu.device.memory_type_candidates",
        lambda device, intent: memory_type_candidates(device, intent)[:1],
    )
    config = EngineConfig(ctx_size=64, expert_slots=1)  # and places to bring experts to
    for n_sound in places:  # such calls before the one that fails
        native.inject_failure(call, n_sound)
        failure = failure_of_opening(config)
        if failure is None:
            assert n_sound > 0, "opening never makes this call"
            return
        assert isinstance(failure, GpuError), repr(failure)
        assert failure.hint and "\n" not in str(failure)
        assert failure.result == "VK_ERROR_OUT_OF_DEVICE_MEMORY"
    assert places != GROWING, "there are more such calls"


@pytest.mark.usefixtures("nothing_left")
def test_a_damaged_file_leaves_nothing_open() -> None:
    for path in (TINY.with_suffix(".npz"), TINY.parent, TINY.parent / "none.gguf"):
        with pytest.raises(Exception, match=path.name) as caught:
            LLM(path)
        assert getattr(caught.value, "hint", "")


@pytest.mark.parametrize("options", [{}, {"expert_slots": 6}], ids=["resident", "cache"])
def test_ctrl_c_at_any_time_leaves_the_model_usable(options: dict[str, Any]) -> None:
    prompt = "class Stack:\n    def push(self, item):\n"
    with LLM(ctx_size=128, **options) as llm:
        right = llm.generate(prompt, max_tokens=4, **GREEDY).text
        for delay_ms in (1, 40, 90, 260):
            llm.forget()
            llm.last_statistics = None
            begun = threading.Event()

            def interrupt(begun: threading.Event = begun, delay_ms: int = delay_ms) -> None:
                begun.wait()
                time.sleep(delay_ms / 1000)
                _thread.interrupt_main()

            thread = threading.Thread(target=interrupt)
            thread.start()  # waits for the thread, and must not be what is interrupted
            with pytest.raises(KeyboardInterrupt):
                while True:
                    for _ in llm.stream(prompt, **GREEDY):
                        begun.set()
            thread.join()
            assert llm.last_statistics is not None, "no statistics after an interrupt"
            assert llm.generate(prompt, max_tokens=4, **GREEDY).text == right


@pytest.mark.usefixtures("nothing_left")
def test_ctrl_c_while_loading_leaves_nothing() -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LLM(TINY, progress=interrupt)
