"""A stand-in for the model, and a way to run commands inside the test process."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.generate.conftest import tiny_metadata, tokenizer_of
from vkmoe.cli import main
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import PromptError, UnsupportedModelError
from vkmoe.experts.records.profiler import Served, Tally
from vkmoe.experts.records.report import ExpertReport, Setup
from vkmoe.facts import Allocation, DeviceInfo, DeviceLimits, Heap, MemoryPlan
from vkmoe.generate.chat.template import ChatTemplate
from vkmoe.kv_types import both
from vkmoe.llm import LLM, GenerationStatistics, Piece
from vkmoe.modes import Resident

DEVICE = DeviceInfo(
    0, "Invented GPU", "cpu", 0, "driver", "1.0", (1, 3, 0), 8, True, frozenset(),
    (Heap(1 << 30, True),), (), DeviceLimits(),
)  # fmt: skip


class FakeSpec(NamedTuple):
    context_length: int = 1024
    name: str = "fake model"


NO_CACHE = ExpertReport(
    Setup("fake model", "fake", "Invented GPU", "device", 8, 2),
    3,
    Served(Tally(9, 9)),
)


class FakeLLM:
    """Replies with fixed pieces and remembers how it was called."""

    calls: list[dict[str, Any]] = []  # noqa: RUF012  # emptied by the fixture
    pieces: Sequence[str] = ("one ", "two", " thrée")
    vocabulary: Mapping[str, Any] = tiny_metadata()
    fail_after: tuple[int, BaseException] | None = None
    validation_messages: Sequence[str] = ()  # what the layer says in each run
    expert_statistics = NO_CACHE
    fail_at_close: BaseException | None = None
    template: str | None = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"

    def __init__(
        self,
        model: str | None,
        config: EngineConfig,
        *,
        chat_template: str | None,
        progress: Callable[..., None] | None,
    ) -> None:
        self.calls.append({"model": model, "config": config})
        self.template = chat_template or self.template
        self.tokenizer = tokenizer_of(self.vocabulary)
        self.spec, self.device_info = FakeSpec(), DEVICE
        lines = (Allocation("things", "device", 5, "why"),)
        self.plan = MemoryPlan(1024, both("f16"), Resident(), lines)
        self.memory = {"device": 5 << 20, "host": 0}
        self.load_seconds = 0.5
        reported = list(self.validation_messages)
        native = SimpleNamespace(has_upload_queue=True)
        device = SimpleNamespace(validation_messages=lambda: reported, native=native)
        self.engine = SimpleNamespace(device=device, link=None)
        self.last_statistics: GenerationStatistics | None = None

    @property
    def chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise UnsupportedModelError("the model has no chat template", "use vkmoe generate")
        return ChatTemplate(self.template)

    def stream(
        self, prompt: str | list[int], sampling: SamplingConfig, **limits: Any
    ) -> Iterator[Piece]:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        self.calls.append({"prompt": text, "sampling": sampling, **limits})
        if len(text) > 200:
            raise PromptError("the prompt has 201 tokens, the context holds 200", "shorten it")
        return self._stream(text, sampling)

    def _stream(self, text: str, sampling: SamplingConfig) -> Iterator[Piece]:
        n_done = 0
        try:
            for n_done, piece in enumerate(self.pieces):
                if self.fail_after is not None and n_done == self.fail_after[0]:
                    raise self.fail_after[1]
                yield Piece(n_done, piece)
            yield Piece(-1, "!")
        finally:
            self.last_statistics = GenerationStatistics(
                0.5, len(text), 0, n_done + 1, 0.1, 0.1, 0.4, sampling.seed or 77, "length"
            )

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append({"closed": True})
        if self.fail_at_close is not None:
            raise self.fail_at_close


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _no_vkmoe_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VKMOE_")]:
        if name != "VKMOE_DEVICE":
            monkeypatch.delenv(name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """A fresh FakeLLM in the place of LLM."""
    fresh = type("FreshLLM", (FakeLLM,), {"calls": []})
    monkeypatch.setattr("vkmoe.llm.LLM", fresh)
    return fresh


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run `vkmoe ARGUMENTS` in this process; keywords are environment variables."""

    def run_command(*arguments: str, stdin: bytes = b"", **environment: str) -> Ran:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            for name, value in environment.items():
                patch.setenv(name, value)
            capsys.readouterr()
            code = main(list(arguments))
        done = capsys.readouterr()
        return Ran(code, done.out, done.err)

    return run_command


@pytest.fixture(scope="module")
def demo_llm() -> Iterator[LLM]:
    with LLM(ctx_size=64) as llm:
        yield llm


@pytest.fixture
def demo(demo_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The demo model with an empty context, in the place of any that a command loads."""
    demo_llm.forget()
    monkeypatch.setattr("vkmoe.cli.notes._load", lambda *_: nullcontext(demo_llm))
    return demo_llm
