"""A token run whole, in steps and in pieces: the same bits, and no failure of a part unseen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import model_path
from vkmoe.batch import BatchKind, RunResult, TokenBatch
from vkmoe.choices import Executor
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import DeviceLostError, OutOfMemoryError
from vkmoe.execute.recorder import HostActions, TokenPrograms
from vkmoe.execute.segments import TARGET_S, part_bytes
from vkmoe.experts.store.table import ExpertTable
from vkmoe.gpu import _native as native
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.program import Program
from vkmoe.llm import demo_model_path

MODELS = ["demo", "moe_odd", "dense_tied", "gptoss_odd", "deepseek2_v3"]
TOKENS = [3, 7, 1, 9, 4, 2]
TINY = 1e3  # bytes per second: no two layers share a submit
PROMPT, WHOLE = BatchKind("decode", 1, 0), BatchKind("decode", 1, 1)


class NothingMoves:
    """The host where all experts are where the table says; it remembers what it was asked for."""

    def __init__(self, table: ExpertTable) -> None:
        self.table = table
        self.log: list[str] = []

    def begin(self, first: bool) -> int:
        self.log.append("begin first" if first else "begin")
        return self.table.address

    def meanwhile(self) -> None:
        self.log.append("meanwhile")

    def end(self) -> None:
        self.log.append("end")

    def bring(self, layer: int, experts: NDArray[np.uint32], guess: bool = True) -> None:
        self.log.append(f"bring {layer}")

    def groups(self, experts: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
        return np.array_split(experts, -(-len(experts) // 2))


class Model:
    """A loaded model, and programs of its decoder that have tensors of their own."""

    def __init__(self, name: str, validation: bool = False) -> None:
        self.cleanup = ExitStack()
        path = demo_model_path() if name == "demo" else model_path(name)
        config = EngineConfig(ctx_size=64, validation=validation)
        self.engine = self.cleanup.enter_context(Engine(path, config))
        self.decoder = self.engine._programs._recorder.decoder
        experts = self.engine.spec.experts
        self.n_used = experts.n_used if experts else 1
        self.n_moe_layers = self.engine.routing().shape[0]
        self.table: ExpertTable = self.engine._table
        self.fused = self.cleanup.enter_context(self.programs())
        self.wanted = self.rows(self.fused)

    def programs(
        self, executor: Executor = "fused", bytes_per_second: float | None = None
    ) -> TokenPrograms:
        backend = Backend(self.engine.device)
        return TokenPrograms(backend, self.decoder, executor, bytes_per_second)

    def rows(
        self, programs: TokenPrograms, n_without: int = 0, host: HostActions | None = None
    ) -> NDArray[np.uint32]:
        """The bits of the logits after each token but the first `n_without`, run without logits."""
        found = []
        for position, token in enumerate(TOKENS):
            batch = TokenBatch.one(token, position, position >= n_without)
            result = programs.run(batch, host or NothingMoves(self.table))
            assert (result.top is None) == (position < n_without)
            if result.top is not None:
                found.append(programs.full_logits().view(np.uint32))
                assert result.top.ids[0] == found[-1].view(np.float32).argmax()
        return np.stack(found)

    def run(self, programs: TokenPrograms, token: int = 1, with_logits: bool = True) -> RunResult:
        """One token at the beginning."""
        batch = TokenBatch.one(token, 0, with_logits)
        return programs.run(batch, NothingMoves(self.table))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    made = Model(request.param)
    with made.cleanup:
        yield made


@pytest.fixture(scope="module")
def odd() -> Iterator[Model]:
    """Whatever the tests do with it, the validation layer stays silent."""
    made = Model("moe_odd", validation=True)
    with made.cleanup:
        yield made
        assert made.engine.device.validation_messages() == []


@pytest.fixture(scope="module")
def steps(odd: Model) -> Iterator[TokenPrograms]:
    with odd.programs("stepped") as programs:
        yield programs


@pytest.fixture(scope="module")
def split(odd: Model) -> Iterator[TokenPrograms]:
    with odd.programs(bytes_per_second=TINY) as programs:
        yield programs


def test_steps_give_the_same_bits(model: Model) -> None:
    with model.programs("stepped") as programs:
        assert len(programs.recorded[WHOLE].segments) == model.n_moe_layers + 1
        np.testing.assert_array_equal(model.rows(programs), model.wanted)
        assert programs.routing().shape == (1, model.n_moe_layers, model.n_used)
        np.testing.assert_array_equal(programs.routing(), model.fused.routing())


def test_a_prompt_in_steps_gives_the_same_bits(steps: TokenPrograms, odd: Model) -> None:
    np.testing.assert_array_equal(odd.rows(steps, n_without=4), odd.wanted[4:])


def test_segments_that_do_not_depend_on_logits_are_recorded_once(
    steps: TokenPrograms, split: TokenPrograms
) -> None:
    for programs in (steps, split):
        whole, prompt = programs.recorded[WHOLE].segments, programs.recorded[PROMPT].segments
        n_shared = len(prompt) - 1
        assert all(a is b for a, b in zip(whole[:n_shared], prompt[:n_shared], strict=True))
        assert not set(map(id, whole[n_shared:])) & set(map(id, prompt[n_shared:]))


def test_a_result_outlives_the_next_run(odd: Model) -> None:
    first = odd.run(odd.fused, 3)
    kept = first.routing.copy()
    second = odd.run(odd.fused, 11)
    assert second.routing.shape == kept.shape and (second.routing != kept).any()
    np.testing.assert_array_equal(first.routing, kept)
    assert first.filled is None, "no expert has a place to land in"


def test_the_host_acts_between_segments_where_it_is_asked_to(
    steps: TokenPrograms, split: TokenPrograms, odd: Model
) -> None:
    expected = {
        steps: ["begin first", "meanwhile", "end", "bring 0", "begin", "end",
                "bring 1", "begin", "end"],
        split: ["begin first", "meanwhile", "end"],
        odd.fused: ["begin first", "meanwhile", "end"],
    }  # fmt: skip
    assert odd.n_moe_layers == 2
    for programs, wanted in expected.items():
        host = NothingMoves(odd.table)
        programs.run(TokenBatch.one(1, 0), host)
        assert host.log == wanted


def test_a_batch_of_more_rows_than_any_program_is_refused(odd: Model) -> None:
    serial = odd.fused.io.serial
    batch = TokenBatch((1, 2), (0, 1), (0, 0), (True, True))
    with pytest.raises(AssertionError):
        odd.fused.run(batch, NothingMoves(odd.table))
    assert odd.fused.io.serial == serial


def test_chunks_are_as_long_as_their_submits_allow(odd: Model) -> None:
    """The first run of a program says nothing."""
    with odd.programs() as programs:
        sizes = odd.decoder.workspace.row_sizes["prompt"]
        assert sizes[:3] == (32, 64, 128) and programs.prompt_rows == 32

        def runs(n_rows: int, *seconds: float) -> int:
            recorded = programs.recording(BatchKind("prompt", n_rows, 0))
            for each in seconds:
                for submit in recorded.submits:
                    submit.took(each * 1e9)
                programs._fit_chunks(n_rows, recorded)
            return programs.prompt_rows

        assert runs(32, 9.0) == 32
        assert runs(32, 0.3) == 64, "the bound for CPU devices is a second"
        assert runs(64, 9.0, 0.6) == 64


def test_a_step_tells_its_routing_before_any_expert_is_read(odd: Model) -> None:
    """No expert has an address until the step before has asked for it, then only those."""
    entries = odd.table.entries

    class OnlyWhatIsAsked(NothingMoves):
        def __init__(self, table: ExpertTable) -> None:
            super().__init__(table)
            self.asked: list[tuple[int, int]] = []

        def begin(self, first: bool) -> int:
            assert first == (not self.asked)
            self.table.set_all(np.arange(entries.size), np.zeros(entries.size, np.uint64))
            for layer, expert in self.asked:
                self.table.set(layer, expert, int(entries[layer, expert]))
            self.table.publish()
            return self.table.address

        def meanwhile(self) -> None:
            pass

        def end(self) -> None:
            pass

        def bring(self, layer: int, experts: NDArray[np.uint32], guess: bool = True) -> None:
            self.asked = [(layer, expert) for expert in experts[0].tolist()]

    with (
        ExpertTable(odd.engine.device, *entries.shape) as table,
        odd.programs("stepped") as programs,
    ):
        for position, token in enumerate(TOKENS):
            programs.run(TokenBatch.one(token, position), OnlyWhatIsAsked(table))
            found = programs.full_logits().view(np.uint32)
            np.testing.assert_array_equal(found, odd.wanted[position])


def test_pieces_give_the_same_bits(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    n_layers = model.engine.spec.n_layers
    with model.programs(bytes_per_second=TINY) as programs:
        assert len(caplog.records) == 1 and "alone may keep the GPU busy" in caplog.text
        n_pieces = {kind: len(item.segments) for kind, item in programs.recorded.items()}
        assert n_pieces == {PROMPT: n_layers, WHOLE: n_layers + 1}
        np.testing.assert_array_equal(model.rows(programs), model.wanted)
        model.run(programs, TOKENS[0], with_logits=False)
        assert len(programs.intervals()) == n_layers
    assert len(caplog.records) == 1


@pytest.mark.parametrize("share", [0.3, 1.1])
def test_every_split_gives_the_same_bits(odd: Model, share: float) -> None:
    """Bounds of parts of a layer, and of several."""
    span_bytes = odd.decoder.weights.layers[-1].span_bytes
    speed = share * 4 * span_bytes * odd.n_used
    with odd.programs(bytes_per_second=speed) as programs:
        np.testing.assert_array_equal(odd.rows(programs), odd.wanted)


def test_rows_that_are_decoded_together_are_bounded_together(
    odd: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """At worst each reads experts of its own."""
    with odd.programs(bytes_per_second=1e12) as programs:
        recorder = programs._recorder
        parts = part_bytes(odd.decoder.weights, odd.n_used, odd.decoder.cache_bytes)
        slow = replace(recorder, bytes_per_second=1.01 * sum(parts) / TARGET_S)
        assert slow.bounds(1).borders == ()
        assert len(slow.bounds(8).borders) > len(slow.bounds(2).borders) > 0


def test_a_fast_link_leaves_one_submit(odd: Model) -> None:
    with odd.programs(bytes_per_second=1e12) as programs:
        assert len(programs.recorded[WHOLE].segments) == 1
        assert programs.recorded[WHOLE].program == odd.fused.recorded[WHOLE].program


def test_what_is_printed_does_not_depend_on_the_pieces(odd: Model, split: TokenPrograms) -> None:
    """The program as a whole: parameters in, the decoder's, the serial, results out."""
    io = odd.fused.io
    for flag in (False, True):
        kind = BatchKind("decode", 1, int(flag))
        body = odd.decoder.program(kind)
        plain = Program(body.name)
        io.copy_in(plain)
        plain.commands.extend(body.commands)
        odd.decoder.close_program(plain)
        io.copy_out(plain, odd.fused._recorder.outputs(kind))
        assert str(odd.engine.program(flag)) == str(plain)
        for programs in (odd.fused, split):
            assert str(programs.program(flag)) == str(plain)
            assert programs.program(flag).commands == plain.commands


@pytest.mark.parametrize("cut", ["split", "steps"])
def test_a_segment_that_did_not_run_is_noticed(
    cut: str, odd: Model, request: pytest.FixtureRequest
) -> None:
    """Its fence is signalled as if it had: so do drivers that reset a GPU."""
    programs: TokenPrograms = request.getfixturevalue(cut)
    odd.run(programs)  # parameters that the others can be run with
    whole = programs.recorded[WHOLE]
    empty = odd.engine.device.native.recorder().finish()
    for index in range(len(whole.segments)):
        segments = [*whole.segments]
        segments[index] = replace(segments[index], recording=empty)
        programs.recorded[WHOLE] = replace(whole, segments=tuple(segments))
        host = NothingMoves(odd.table)
        try:
            with pytest.raises(DeviceLostError, match="log was not written"):
                programs.run(TokenBatch.one(1, 0), host)
        finally:
            programs.recorded[WHOLE] = whole
        assert host.log.count("end") == (index if cut == "steps" else 0)
    np.testing.assert_array_equal(odd.rows(programs), odd.wanted)


def test_serials_begin_anew_without_the_one_that_means_none(
    split: TokenPrograms, odd: Model
) -> None:
    """The log is cleared to 0 at first, which no submit may have."""
    split.io.serial = 0xFFFFFFFE
    np.testing.assert_array_equal(odd.rows(split), odd.wanted)
    assert split.io.serial == len(TOKENS) - 1


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_piece_that_cannot_be_submitted_is_told(
    split: TokenPrograms, odd: Model, piece: int
) -> None:
    native.inject_failure("vkQueueSubmit", piece, "VK_ERROR_OUT_OF_HOST_MEMORY")
    with pytest.raises(OutOfMemoryError):
        odd.run(split)
    native.clear_injections()
    np.testing.assert_array_equal(odd.rows(split), odd.wanted)


def test_a_failure_of_an_earlier_piece_is_told(
    split: TokenPrograms, odd: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the last one went well."""
    waited: list[Any] = []

    class Failing:
        def __init__(self, real: native.Submission) -> None:
            self.real = real

        def wait(self, expected_ns: int = 0) -> bool:
            self.real.wait(expected_ns)
            waited.append(self)
            if len(waited) == 2:
                error = native.VulkanError("injected")
                error.result, error.call = "VK_ERROR_OUT_OF_HOST_MEMORY", "vkWaitForFences"
                raise error
            return True

    class Proxy:
        def __init__(self, real: native.Device) -> None:
            self.settle = real.settle
            self.submit = lambda recording: Failing(real.submit(recording))

    backend = split._backend
    monkeypatch.setattr(backend.device, "native", Proxy(backend.device.native))
    with pytest.raises(OutOfMemoryError):
        odd.run(split)
    assert len(waited) == 2


def test_submits_are_timed_in_order(steps: TokenPrograms, split: TokenPrograms, odd: Model) -> None:
    odd.rows(steps)
    odd.rows(split)
    odd.rows(odd.fused)
    assert len(odd.fused.intervals()) == 1
    assert len(steps.intervals()) == odd.n_moe_layers + 1
    assert len(split.intervals()) == len(split.recorded[WHOLE].segments) > 2
    for found in (odd.fused.intervals(), steps.intervals(), split.intervals()):
        assert all(begin < end for begin, end in found)
        assert all(before[1] <= after[0] for before, after in pairwise(found))


def test_without_timestamps_there_are_no_intervals(
    odd: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.Device, "has_timestamps", lambda device, queue="compute": False)
    with odd.programs() as programs:
        np.testing.assert_array_equal(odd.rows(programs), odd.wanted)
        assert programs.intervals() == []
