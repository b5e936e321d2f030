"""Experts read from the file: the bytes the loader lays out, whatever happens to the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import NAMES, Tensor, model_path, retyped, rewrite
from tests.live import live_objects
from vkmoe.errors import ModelFileError
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.gpu.arena import Arena, lay_out_spans
from vkmoe.gpu.device import Device
from vkmoe.llm import demo_model_path
from vkmoe.models import read_spec
from vkmoe.models.tensors import ModelTensors, read_tensors
from vkmoe.quants import to_device
from vkmoe.weights import span_reader
from vkmoe.weights.sizes import expert_shape, span_parts
from vkmoe.weights.span_reader import FileReads, SpanReader

Bytes = NDArray[np.uint8]
POISON = 0xFF
MODELS = {name: model_path(name) for name in NAMES if name.startswith("moe_")}
MODELS["demo"] = demo_model_path()


def tensors_of(file: GgufFile) -> ModelTensors:
    return read_tensors(file, read_spec(file))


def laid_out(file: GgufFile) -> list[Bytes]:
    """Every expert's span from the mapping, by number."""
    spans = []
    for block in tensors_of(file).expert_layers:
        for expert in range(block.n_experts):
            span = np.zeros(expert_shape(block).span_bytes, np.uint8)
            for source, matrix in span_parts(block):
                (tensor,) = source.parts
                rows = file.data(tensor.name).reshape(-1, matrix.n_rows, file_row_bytes(tensor))
                out = span[matrix.offset : matrix.offset + matrix.n_bytes]
                out = out.reshape(matrix.n_rows, matrix.row_bytes)
                to_device(tensor.type, rows[expert], matrix.n_columns, out=out)
            spans.append(span)
    return spans


def file_row_bytes(tensor: Any) -> int:
    return int(tensor.n_bytes // np.prod(tensor.shape[:-1]))


def read(reader: SpanReader, number: int, n_bytes: int) -> Bytes:
    out = np.full(n_bytes, POISON, np.uint8)
    reader.read(number, out)
    return out


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model of its own to be destroyed, with experts of two types."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for kind in ("gate", "down"):
            name = f"blk.1.ffn_{kind}_exps.weight"
            tensors[name] = retyped(tensors[name], "Q8_0")

    return rewrite(model_path("moe_plain"), tmp_path / "small.gguf", change)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device() as opened:
        yield opened


# ----- the bytes -----


@pytest.mark.parametrize("path", MODELS.values(), ids=MODELS)
def test_experts_are_read_as_the_loader_lays_them_out(path: Path) -> None:
    """All of them, from last to first; what lies between matrices is zero, as in fresh memory."""
    with open_gguf(path) as file, SpanReader(file, tensors_of(file)) as reader:
        expected = laid_out(file)
        n_experts = len(expected) // len(reader.span_bytes)
        for number in reversed(range(len(expected))):
            assert reader.span_bytes[number // n_experts] == expected[number].size
            assert (read(reader, number, expected[number].size) == expected[number]).all(), number


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("staging_bytes", [1, 100, 5000, 1 << 20])
def test_every_type_is_read_in_pieces_of_any_size(
    tmp_path: Path, type_name: str, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The K types are the demo model's; staging smaller than a row holds one row."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_exps" in name]:
            tensors[name] = retyped(tensors[name], type_name)

    monkeypatch.setattr(span_reader, "STAGING_BYTES", staging_bytes)
    path = rewrite(model_path("moe_plain"), tmp_path / "model.gguf", change)
    with open_gguf(path) as file, SpanReader(file, tensors_of(file)) as reader:
        for number, expected in enumerate(laid_out(file)):
            assert (read(reader, number, expected.size) == expected).all()


def test_experts_of_a_model_in_parts(tmp_path: Path) -> None:
    """An expert's three matrices can be in three files; any part opens the model."""
    first = rewrite(model_path("moe_plain"), tmp_path / "m.gguf", lambda *_: None, per_part=1)
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert len(paths) > 10 and first == paths[0]
    n_open = len(os.listdir("/proc/self/fd"))
    with open_gguf(paths[5]) as file, SpanReader(file, tensors_of(file)) as reader:
        for number, expected in enumerate(laid_out(file)):
            assert (read(reader, number, expected.size) == expected).all()
        parts = {tensor.part for name, tensor in file.tensors.items() if "blk.0.ffn_" in name}
        assert len(parts) > 3
    del file
    assert len(os.listdir("/proc/self/fd")) <= n_open + len(paths)  # the mappings', while they live


def test_nothing_is_read_through_the_mapping(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_gguf(small) as file:
        expected = laid_out(file)
        tensors = tensors_of(file)
        with SpanReader(file, tensors) as reader:
            monkeypatch.setattr(GgufFile, "data", lambda *_: pytest.fail("the mapping was read"))
            monkeypatch.setattr(GgufFile, "_buffer", lambda *_: pytest.fail("it was read"))
            file.close()
            for number in (3, 0):
                assert (read(reader, number, expected[number].size) == expected[number]).all()


def test_pages_are_dropped_behind(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is given for what is to be read, and for what was read."""
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *args: calls.append(args))
    with open_gguf(small) as file, SpanReader(file, tensors_of(file)) as reader:
        reader.will_read(2)
        read(reader, 2, reader.span_bytes[0])
        for matrix in next(tensors_of(file).expert_layers).matrices:
            (tensor,) = matrix.parts
            n_bytes = tensor.n_bytes // tensor.shape[0]
            span = (tensor.offset + 2 * n_bytes, n_bytes)
            wanted = (*span, os.POSIX_FADV_WILLNEED), (*span, os.POSIX_FADV_DONTNEED)
            assert [call for call in calls if call[:2] == span] == list(wanted)
        calls.clear()
        reader.drop_pages()
        assert calls == [(0, 0, os.POSIX_FADV_DONTNEED)]


def test_readers_in_several_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has staging of its own: with a little, pieces of several experts alternate."""
    monkeypatch.setattr(span_reader, "STAGING_BYTES", 3000)
    with open_gguf(demo_model_path()) as file, SpanReader(file, tensors_of(file)) as reader:
        expected = laid_out(file)
        wrong: list[int] = []

        def work(seed: int) -> None:
            for number in np.random.default_rng(seed).permutation(len(expected))[:40].tolist():
                if not (read(reader, number, expected[number].size) == expected[number]).all():
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


# ----- what happens to the file -----


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def write_over(path: Path) -> None:
    contents = path.read_bytes()
    path.write_bytes(bytes(len(contents)))
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [(cut, "ends after 4096 bytes"), (empty, "ends after 0 bytes"), (write_over, "was written to")],
)
def test_a_file_harmed_while_it_is_used_is_an_error(
    small: Path, harm: Callable[[Path], None], complaint: str
) -> None:
    """It says which expert was asked for. Through the mapping it would be the end of the process,
    or other weights."""
    with open_gguf(small) as file:
        reader = SpanReader(file, tensors_of(file))
        n_bytes = reader.span_bytes[0]
        harm(small)
        with pytest.raises(ModelFileError, match=complaint) as caught:
            reader.read(7, np.empty(n_bytes, np.uint8))
        assert "expert 7 of blk.0.ffn_gate_exps.weight" in str(caught.value)
        assert caught.value.hint
        reader.close()


def test_a_file_replaced_before_reading_begins_is_refused(small: Path) -> None:
    with open_gguf(small) as file:
        tensors = tensors_of(file)
        copy = small.with_name("copy.gguf")
        copy.write_bytes(small.read_bytes())
        copy.replace(small)
        with pytest.raises(ModelFileError, match="is not the file that was opened before"):
            SpanReader(file, tensors)


def test_one_part_of_a_split_model_missing_leaves_none_open(tmp_path: Path) -> None:
    rewrite(model_path("moe_plain"), tmp_path / "m.gguf", lambda *_: None, per_part=9)
    with open_gguf(tmp_path / "m-00001-of-00003.gguf") as file:
        tensors = tensors_of(file)
        (tmp_path / "m-00003-of-00003.gguf").unlink()
        n_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ModelFileError, match="m-00003-of-00003"):
            SpanReader(file, tensors)
        assert len(os.listdir("/proc/self/fd")) == n_open


def test_a_closed_reader_says_so(small: Path) -> None:
    with open_gguf(small) as file:
        reader = SpanReader(file, tensors_of(file))
        reader.close()
        reader.close()
        with pytest.raises(ModelFileError, match="is closed"):
            read(reader, 0, reader.span_bytes[0])


# ----- as an uploader -----


def test_file_reads_bring_experts_into_places(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours are left alone."""
    with open_gguf(demo_model_path()) as file, SpanReader(file, tensors_of(file)) as reader:
        expected = laid_out(file)
        n_experts = len(expected) // len(reader.span_bytes)
        numbers = [0, 5, len(expected) - 1]
        arena = Arena(
            device, "host", "pool", lay_out_spans(device.info, [max(reader.span_bytes)] * 7)
        )
        places = [arena.place(max(reader.span_bytes)) for _ in range(7)]
        for place in places:
            place.buffer.view()[place.offset :][: max(reader.span_bytes)] = POISON
        copies = [
            (number, places[2 * i + 1], reader.span_bytes[number // n_experts])
            for i, number in enumerate(numbers)
        ]
        hinted: list[int] = []
        monkeypatch.setattr(SpanReader, "will_read", lambda _, number: hinted.append(number))
        upload = FileReads(reader).start(copies)
        upload.wait()
        assert hinted == [number for number, _, _ in copies], "the disk is asked ahead, once"
        began, ended = upload.interval() or (0, 0)
        assert upload.done() and not upload.cancel() and 0 < began <= ended
        for number, place, n_bytes in copies:
            found = place.buffer.view()[place.offset : place.offset + n_bytes]
            assert (found == expected[number]).all()
        for place in places[::2]:
            assert (place.buffer.view()[place.offset :][: min(reader.span_bytes)] == POISON).all()
        arena.close()


def test_file_reads_that_fail_raise_at_once(device: Device, small: Path) -> None:
    """Who keeps the error does not keep the memory that was to be written."""
    n_before = live_objects().get("memory", 0)
    with open_gguf(small) as file, SpanReader(file, tensors_of(file)) as reader:
        arena = Arena(device, "host", "pool", lay_out_spans(device.info, reader.span_bytes[:1]))
        place = arena.place(reader.span_bytes[0])
        cut(small)
        reads = FileReads(reader)
        with pytest.raises(ModelFileError, match="ends after 4096 bytes") as caught:
            reads.start([(0, place, reader.span_bytes[0])])
        arena.close()
        assert caught.value.hint and live_objects().get("memory", 0) == n_before


def test_an_error_of_the_disk_keeps_no_memory_either(
    device: Device, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_before = live_objects().get("memory", 0)
    with open_gguf(small) as file, SpanReader(file, tensors_of(file)) as reader:
        arena = Arena(device, "host", "pool", lay_out_spans(device.info, reader.span_bytes[:1]))
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(ModelFileError, match="Input/output error") as caught:
            n_bytes = reader.span_bytes[0]
            FileReads(reader).start([(0, arena.place(n_bytes), n_bytes)])
        arena.close()
        assert caught.value.__context__ is not None
        assert live_objects().get("memory", 0) == n_before


def refuse(*args: object) -> int:
    raise OSError(5, "Input/output error")
