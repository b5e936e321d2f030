"""Where the loader puts a file's bytes: the same ones as the span reader, mapped memory or not.

Without a GPU: memory is NumPy's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.other_types import UNEVEN, noisy_demo, of_types, one_by_one
from tests.engine.tiny import ONE_OF_EACH, Change, Tensor, model_path, retyped, rewrite
from vkmoe.errors import UnsupportedModelError
from vkmoe.gguf_file import GgufFile, open_gguf
from vkmoe.gpu.arena import Placement, round_up
from vkmoe.models import read_spec
from vkmoe.models.tensors import FeedForwardTensors, read_tensors
from vkmoe.quants import decode, lay_out
from vkmoe.weights import placer as placing
from vkmoe.weights.placer import Placer, Progressing
from vkmoe.weights.sizes import expert_shape, span_parts
from vkmoe.weights.span_reader import SpanReader

Bytes = NDArray[np.uint8]
POISON = 0xFF


class Memory:
    """An arena and its only buffer, of zeros like fresh memory."""

    def __init__(self, n_bytes: int, mapped: bool) -> None:
        self.bytes = np.zeros(n_bytes, np.uint8)
        self.mapped = mapped
        self._used = 0

    def place(self, n_bytes: int) -> Placement:
        place = Placement(self, self._used, self._used)  # type: ignore[arg-type]
        self._used += round_up(n_bytes)
        return place

    def view(self) -> Bytes:
        assert self.mapped
        return self.bytes


class Staged:
    """A transfer that writes to such memory, and says who asked it to."""

    threads: ClassVar[set[str]] = set()

    def __init__(self, device: Any) -> None:
        self.threads.clear()

    def write(self, target: Memory, offset: int, data: Bytes) -> None:
        self.threads.add(threading.current_thread().name)
        target.bytes[offset : offset + data.size] = data

    def close(self) -> None:
        """Nothing is under way."""


@pytest.fixture
def placers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes placers whose trunk is `memory`."""
    monkeypatch.setattr(placing, "Transfer", Staged)
    made: list[Placer] = []

    def make(file: GgufFile, memory: Memory, progress: Any = None) -> Placer:
        progressing = Progressing(1 << 40, progress)
        made.append(Placer(file, None, memory, progressing))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for placer in made:
        placer.close()


def half_biases(kind: str) -> Change:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_exps.bias")]:
            tensors[name] = retyped(tensors[name], kind)

    return change


def both(first: Change, second: Change) -> Change:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        first(metadata, tensors)
        second(metadata, tensors)

    return change


CHANGES = {
    "types of old files": ("moe_plain", of_types(UNEVEN)),
    "one by one": ("mixtral_plain", one_by_one),
    "one by one, types of old files": ("mixtral_plain", both(of_types(UNEVEN), one_by_one)),
    "biases in F16": ("gptoss_odd", half_biases("F16")),
    "biases in BF16": ("gptoss_odd", half_biases("BF16")),
}


@pytest.fixture(params=[*ONE_OF_EACH, *CHANGES, "demo"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GgufFile]:
    name = str(request.param)
    if name == "demo":
        path = noisy_demo(tmp_path / "noisy.gguf")
    elif name in CHANGES:
        path = rewrite(model_path(CHANGES[name][0]), tmp_path / "m.gguf", CHANGES[name][1])
    else:
        path = model_path(name)
    with open_gguf(path) as file:
        yield file


def spans_of(file: GgufFile, block: FeedForwardTensors) -> list[Bytes]:
    """What each expert's span must hold, tensor by tensor."""
    spans = [np.zeros(expert_shape(block).span_bytes, np.uint8) for _ in range(block.n_experts)]
    for source, matrix in span_parts(block):
        wholes = [
            lay_out(part.type, matrix.type, file.data(part.name).reshape(
                part.n_weights // source.n_columns, -1), source.n_columns)
            for part in source.parts
        ]  # fmt: skip
        experts = np.concatenate(wholes).reshape(block.n_experts, -1)
        skipped = source.first * experts.shape[1] // (source.pitch or source.n_rows)
        for span, rows in zip(spans, experts, strict=True):
            rows = rows[skipped : skipped + matrix.n_bytes]
            span[matrix.offset : matrix.offset + matrix.n_bytes] = rows
    return spans


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "staged"])
def test_experts_have_the_same_bytes_from_the_loader_and_the_span_reader(
    opened: GgufFile, mapped: bool, placers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces that end within experts and blocks of rows; also shared and dense blocks."""
    tensors = read_tensors(opened, read_spec(opened))
    piece_bytes = expert_shape(tensors.layers[0].block).span_bytes // 7
    monkeypatch.setattr(placing, "PIECE_BYTES", piece_bytes)
    number = 0
    with SpanReader(opened, tensors) as reader:
        for layer in tensors.layers:
            for block in (layer.block, layer.feed_forward.get("shared")):
                if not isinstance(block, FeedForwardTensors):
                    continue
                wanted = spans_of(opened, block)
                memory = Memory(sum(span.size for span in wanted), mapped)
                placer = placers(opened, memory)
                found = placer.spans(block, memory)
                for place, span in zip(found, wanted, strict=True):
                    assert np.array_equal(memory.bytes[place.offset :][: span.size], span)
                    if block is layer.block and layer.has_experts:
                        read = np.full(span.size, POISON, np.uint8)
                        reader.read(number, read)
                        assert np.array_equal(read, span), number
                        number += 1
    assert number == reader.n_experts * len(reader.span_bytes)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_biases_are_float32_at_multiples_of_16(kind: str, tmp_path: Path) -> None:
    """As kernels load them; an expert's from its row of the tensor."""
    path = rewrite(model_path("gptoss_odd"), tmp_path / "m.gguf", half_biases(kind))
    with open_gguf(path) as file:
        tensors = read_tensors(file, read_spec(file))
        block = tensors.layers[1].block
        shape = expert_shape(block)
        assert shape.biases is not None
        with SpanReader(file, tensors) as reader:
            for expert in range(block.n_experts):
                span = np.full(shape.span_bytes, POISON, np.uint8)
                reader.read(block.n_experts + expert, span)
                for name, offset in shape.biases._asdict().items():
                    tensor = file.tensors[f"blk.1.ffn_{name}_exps.bias"]
                    values = decode(tensor.type, file.data(tensor.name), tensor.n_weights)
                    values = values.reshape(tensor.shape)[expert]
                    assert offset % 16 == 0
                    found = span[offset : offset + values.nbytes].view(np.float32)
                    np.testing.assert_array_equal(found, values)


def test_rows_are_laid_out_by_several_threads(
    placers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two must meet in it, or it takes too long; staged rows are sent by who asked for them."""
    monkeypatch.setattr(placing, "PIECE_BYTES", 1000)
    meeting = threading.Barrier(2)
    threads: set[str] = set()

    def slow(*arguments: Any) -> Bytes:
        name = threading.current_thread().name
        if name not in threads and len(threads) < 2:
            threads.add(name)
            meeting.wait(10)
        return lay_out(*arguments)

    monkeypatch.setattr(placing, "lay_out", slow)
    path = rewrite(model_path("moe_plain"), tmp_path / "m.gguf", of_types(UNEVEN))
    with open_gguf(path) as file:
        block = read_tensors(file, read_spec(file)).layers[0].block
        memory = Memory(1 << 20, mapped=False)
        steps: list[int] = []
        placers(file, memory, lambda done, total: steps.append(done)).spans(block, memory)
    assert len(threads) == 2 and Staged.threads == {threading.current_thread().name}
    assert len(steps) > 10 and steps == sorted(steps)


def test_few_rows_that_are_laid_out_wait_for_their_turn(
    placers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of memory that is not mapped; else a large tensor would be in host memory as a whole."""
    monkeypatch.setattr(placing, "PIECE_BYTES", 1000)
    n_made = 0
    ahead: list[int] = []
    lock = threading.Lock()

    def counted(*arguments: Any) -> Bytes:
        nonlocal n_made
        with lock:
            n_made += 1
        return lay_out(*arguments)

    def write(self: Staged, target: Memory, offset: int, data: Bytes) -> None:
        ahead.append(n_made - len(ahead))

    monkeypatch.setattr(placing, "lay_out", counted)
    monkeypatch.setattr(Staged, "write", write)
    path = rewrite(model_path("moe_plain"), tmp_path / "m.gguf", of_types(UNEVEN))
    with open_gguf(path) as file:
        block = read_tensors(file, read_spec(file)).layers[0].block
        memory = Memory(1 << 20, mapped=False)
        placers(file, memory).spans(block, memory)
    assert len(ahead) > 2 * placing.N_AHEAD and max(ahead) <= placing.N_AHEAD


def test_an_error_of_a_thread_ends_loading_and_leaves_no_thread(
    placers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had not begun is left out."""
    monkeypatch.setattr(placing, "PIECE_BYTES", 100)

    def failing(*arguments: Any) -> Bytes:
        raise UnsupportedModelError("cannot be decoded")

    monkeypatch.setattr(placing, "lay_out", failing)
    with open_gguf(model_path("moe_plain")) as file:
        block = read_tensors(file, read_spec(file)).layers[0].block
        memory = Memory(1 << 20, mapped=True)
        placer = placers(file, memory)
        with pytest.raises(UnsupportedModelError, match="cannot be decoded"):
            placer.spans(block, memory)
        placer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]
    assert not memory.bytes.any()
