"""A token run whole, in steps and in pieces: the same bits, and no failure of a part unseen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import model_path
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import DeviceLostError, OutOfMemoryError
from vkmoe.execute.recorder import TokenPrograms
from vkmoe.experts.store.table import ExpertTable
from vkmoe.gpu import _native as native
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.program import Program
from vkmoe.llm import demo_model_path

MODELS = ["demo", "moe_odd", "dense_tied", "gptoss_odd", "deepseek2_v3"]
TOKENS = [3, 7, 1, 9, 4, 2]
TINY = 1e3  # bytes per second: no two layers share a submit


class Model:
    """A loaded model, and programs of its decoder that have tensors of their own."""

    def __init__(self, name: str, validation: bool = False) -> None:
        self.cleanup = ExitStack()
        path = demo_model_path() if name == "demo" else model_path(name)
        config = EngineConfig(ctx_size=64, validation=validation)
        self.engine = self.cleanup.enter_context(Engine(path, config))
        self.decoder = self.engine._programs._recorder._decoder
        experts = self.engine.spec.experts
        self.n_used = experts.n_used if experts else 1
        self.n_moe_layers = self.engine.routing().shape[0]
        self.table: ExpertTable = self.engine._table
        self.fused = self.cleanup.enter_context(self.programs())
        self.wanted = self.rows(self.fused)

    def programs(
        self,
        executor: Literal["fused", "stepped"] = "fused",
        bytes_per_second: float | None = None,
    ) -> TokenPrograms:
        return TokenPrograms(
            Backend(self.engine.device),
            self.decoder,
            self.engine.workspace,
            self.n_moe_layers,
            self.n_used,
            executor,
            bytes_per_second,
        )

    def rows(self, programs: TokenPrograms) -> NDArray[np.uint32]:
        """The bits of the logits after each token, whole."""
        found = []
        for position, token in enumerate(TOKENS):
            programs.run(token, position, self.table.address, True)
            found.append(programs.full_logits().view(np.uint32))
        return np.stack(found)

    def stepped(self, programs: TokenPrograms, n_without: int = 0) -> NDArray[np.uint32]:
        """In steps; the first `n_without` tokens without logits."""
        found = []
        for position, token in enumerate(TOKENS):
            flag = position >= n_without
            for step in range(programs.n_steps):
                programs.run_step(step, token, position, self.table.address, flag)
            if flag:
                found.append(programs.full_logits().view(np.uint32))
        return np.stack(found)


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
        assert programs.n_steps == model.n_moe_layers + 1
        assert not programs.recorded, "only what the executor needs is recorded"
        np.testing.assert_array_equal(model.stepped(programs), model.wanted)
        assert programs.routing().shape == (model.n_moe_layers, model.n_used)
        np.testing.assert_array_equal(programs.routing(), model.fused.routing())
        assert programs.candidates().ids[0] == model.wanted[-1].view(np.float32).argmax()


def test_a_prompt_in_steps_gives_the_same_bits(steps: TokenPrograms, odd: Model) -> None:
    np.testing.assert_array_equal(odd.stepped(steps, n_without=4), odd.wanted[4:])


def test_all_steps_but_the_last_are_recorded_once(steps: TokenPrograms) -> None:
    with_logits, without = steps._steps[True], steps._steps[False]
    assert all(a is b for a, b in zip(with_logits[:-1], without[:-1], strict=True))
    assert with_logits[-1] is not without[-1]


def test_the_other_executor_is_recorded_when_it_is_used(odd: Model) -> None:
    with odd.programs("stepped") as programs:
        np.testing.assert_array_equal(odd.rows(programs), odd.wanted)
        assert set(programs.recorded) == {False, True}


def test_a_step_tells_its_routing_before_any_expert_is_read(odd: Model) -> None:
    """No expert has an address until the step before has asked for it, then only those."""
    entries = odd.table.entries
    with (
        ExpertTable(odd.engine.device, *entries.shape) as table,
        odd.programs("stepped") as programs,
    ):
        for position, token in enumerate(TOKENS):
            for step in range(programs.n_steps):
                known = programs.step_routing(step - 1).tolist() if step else []
                table.set_all(range(entries.size), [0] * entries.size)
                for expert in known:
                    table.set(step - 1, expert, int(entries[step - 1, expert]))
                table.publish()
                programs.run_step(step, token, position, table.address, True)
            found = programs.full_logits().view(np.uint32)
            np.testing.assert_array_equal(found, odd.wanted[position])


def test_pieces_give_the_same_bits(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    n_layers = model.engine.spec.n_layers
    with model.programs(bytes_per_second=TINY) as programs:
        assert len(caplog.records) == 1 and "alone may keep the GPU busy" in caplog.text
        n_pieces = {flag: len(item.recordings) for flag, item in programs.recorded.items()}
        assert n_pieces == {False: n_layers, True: n_layers + 1}
        np.testing.assert_array_equal(model.rows(programs), model.wanted)
        programs.run(TOKENS[0], 0, model.table.address, False)
        assert len(programs.intervals()) == n_layers
    assert len(caplog.records) == 1


@pytest.mark.parametrize("share", [0.3, 1.1])
def test_every_split_gives_the_same_bits(odd: Model, share: float) -> None:
    """Bounds of parts of a layer, and of several."""
    span_bytes = odd.decoder.weights.layers[-1].span_bytes
    speed = share * 4 * span_bytes * odd.n_used
    with odd.programs(bytes_per_second=speed) as programs:
        np.testing.assert_array_equal(odd.rows(programs), odd.wanted)


def test_a_fast_link_leaves_one_submit(odd: Model) -> None:
    with odd.programs(bytes_per_second=1e12) as programs:
        assert len(programs.recorded[True].recordings) == 1
        assert programs.recorded[True].program == odd.fused.recorded[True].program


def test_what_is_printed_does_not_depend_on_the_pieces(odd: Model, split: TokenPrograms) -> None:
    """The program as a whole: parameters in, the decoder's, the serial, results out."""
    io = odd.fused.io
    for flag in (False, True):
        body = odd.decoder.token_program(flag)
        plain = Program(body.name)
        io.copy_in(plain)
        plain.commands.extend(body.commands)
        odd.decoder.close_program(plain)
        io.copy_out(plain, 2 if flag else 1)
        assert str(odd.engine.program(flag)) == str(plain)
        for programs in (odd.fused, split):
            assert str(programs.recorded[flag].program) == str(programs.program(flag)) == str(plain)
            assert programs.recorded[flag].program.commands == plain.commands


def test_a_piece_that_did_not_run_is_noticed(split: TokenPrograms, odd: Model) -> None:
    """Its fence is signalled as if it had: so do drivers that reset a GPU."""
    split.run(1, 0, odd.table.address, True)  # parameters that the others can be run with
    whole = split.recorded[True]
    empty = odd.engine.device.native.recorder().finish()
    for index in range(len(whole.recordings)):
        parts = [*whole.recordings]
        parts[index] = empty
        split.recorded[True] = replace(whole, recordings=tuple(parts))
        try:
            with pytest.raises(DeviceLostError, match="log was not written"):
                split.run(1, 0, odd.table.address, True)
        finally:
            split.recorded[True] = whole
    np.testing.assert_array_equal(odd.rows(split), odd.wanted)


def test_a_step_that_did_not_run_is_noticed(steps: TokenPrograms, odd: Model) -> None:
    odd.stepped(steps)
    recorded = steps._steps[True]
    empty = odd.engine.device.native.recorder().finish()
    for step in range(steps.n_steps):
        recorded[step], kept = replace(recorded[step], recordings=(empty,)), recorded[step]
        with pytest.raises(DeviceLostError, match="log was not written"):
            for index in range(step + 1):
                steps.run_step(index, 1, 0, odd.table.address, True)
        assert index == step
        recorded[step] = kept


def test_serials_begin_anew_without_the_one_that_means_none(
    split: TokenPrograms, odd: Model
) -> None:
    """The pieces clear the log's serial to 0, which no submit may have."""
    split.io.serial = 0xFFFFFFFE
    np.testing.assert_array_equal(odd.rows(split), odd.wanted)
    assert split.io.serial == len(TOKENS) - 1


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_piece_that_cannot_be_submitted_is_told(
    split: TokenPrograms, odd: Model, piece: int
) -> None:
    native.inject_failure("vkQueueSubmit", piece, "VK_ERROR_OUT_OF_HOST_MEMORY")
    with pytest.raises(OutOfMemoryError):
        split.run(1, 0, odd.table.address, True)
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
        split.run(1, 0, odd.table.address, True)
    assert len(waited) == 2


def test_submits_are_timed_in_order(steps: TokenPrograms, split: TokenPrograms, odd: Model) -> None:
    odd.stepped(steps)
    odd.rows(split)
    odd.rows(odd.fused)
    assert len(odd.fused.intervals()) == 1
    assert len(steps.intervals()) == steps.n_steps
    assert len(split.intervals()) == len(split.recorded[True].recordings) > 2
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
