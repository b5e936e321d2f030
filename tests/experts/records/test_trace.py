"""The trace file: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.experts.invented_traces import drifting, header, trace_of
from vkmoe.errors import VkmoeError
from vkmoe.experts.records.trace import Trace, TraceWriter, joined, read_trace

HEADER = header(2, 8, 2)
PROMPT = {"phase": "prompt", "experts": [[0, 7], [3, 1]]}
DECODE = {"phase": "decode", "experts": [[1, 2], [4, 5]]}


def write(path: Path, trace: Trace) -> Path:
    with TraceWriter(path, trace.header) as writer:
        for routing, is_prompt in zip(trace.routing, trace.is_prompt, strict=True):
            writer.write(routing, bool(is_prompt))
    return path


def lines(path: Path, *records: Any, end: str = "\n") -> Path:
    """A file of these records, each JSON unless it is text already."""
    texts = [item if isinstance(item, str) else json.dumps(item) for item in records]
    path.write_text("\n".join(texts) + end)
    return path


def changed(**changes: Any) -> dict[str, Any]:
    """The header line with changes; None removes."""
    record = {**HEADER.document(), **changes}
    return {name: value for name, value in record.items() if value is not None}


def with_experts(experts: Any) -> dict[str, Any]:
    return {"phase": "decode", "experts": experts}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 1, 4, 4), (40, 6, 32, 4), (9, 48, 128, 8)])
def test_what_is_written_is_read_again(path: Path, shape: tuple[int, int, int, int]) -> None:
    n_tokens, n_layers, n_experts, n_used = shape
    trace = trace_of(drifting(n_tokens, n_layers, n_experts, n_used), n_experts, n_prompt=2)
    found = read_trace(write(path, trace))
    assert found.header == trace.header
    assert found.routing.dtype == np.uint32
    assert np.array_equal(found.routing, trace.routing)
    assert np.array_equal(found.is_prompt, trace.is_prompt)
    assert (found.starts, found.notes) == ((0,), ())


def test_every_line_is_in_the_file_before_the_next_token(path: Path) -> None:
    """What a killed run has recorded is not lost."""
    trace = trace_of(drifting(3, 2, 8, 2), 8)
    with TraceWriter(path, trace.header) as writer:
        for n_written, routing in enumerate(trace.routing, 1):
            writer.write(routing, False)
            assert read_trace(path).n_tokens == writer.n_tokens == n_written


def test_the_file_names_no_text_and_its_lines_are_as_documented(path: Path) -> None:
    write(path, trace_of(np.array([[[0, 7], [3, 1]]], np.uint32), 8, n_prompt=1))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "format": "vkmoe-trace", "version": 1, "model": "invented", "architecture": "qwen3moe",
        "layer_numbers": [1, 2], "n_experts": 8, "n_used": 2, "span_bytes": [1000, 1001],
    }  # fmt: skip
    assert second == PROMPT


def test_a_last_line_cut_short_is_left_out_with_a_note(path: Path) -> None:
    whole = json.dumps(DECODE)
    for n_left in range(1, len(whole) + 1):
        lines(path, HEADER.document(), PROMPT, whole[:n_left], end="")
        found = read_trace(path)
        assert found.n_tokens == 1
        assert "last line is cut short" in found.notes[0]


def test_traces_of_one_model_are_joined_in_order() -> None:
    routing = drifting(10, 2, 8, 2)
    parts = [trace_of(routing[:4], 8, 1), trace_of(routing[4:9], 8, 2, starts=(0, 3)),
             trace_of(routing[9:], 8)]  # fmt: skip
    whole = joined(parts)
    assert np.array_equal(whole.routing, routing)
    assert whole.starts == (0, 4, 7, 9)
    assert np.flatnonzero(whole.is_prompt).tolist() == [0, 4, 5]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (header(2, 9, 2), "n_experts 8 in one, 9 in the other"),
        (header(2, 8, 2, model="another"), "model 'invented' in one, 'another' in the other"),
        (header(3, 8, 2), "layer_numbers (1, 2) in one, (1, 2, 3) in the other"),
        (
            header(2, 8, 2, span_bytes=(1000, 7)),
            "span_bytes (1000, 1001) in one, (1000, 7) in the other",
        ),
    ],
)
def test_traces_of_different_models_are_not_joined(path: Path, other: Any, difference: str) -> None:
    first = read_trace(write(path, trace_of(drifting(2, 2, 8, 2), 8)))
    routing = drifting(2, other.n_layers, 8, 2)
    second = read_trace(write(path.with_name("2"), Trace(other, routing, np.zeros(2, np.bool_))))
    with pytest.raises(VkmoeError) as caught:
        joined([first, second])
    expected = f"{path} and {path.with_name('2')} are of different models: {difference}"
    assert str(caught.value) == expected


def test_a_trace_that_cannot_be_written_is_one_error_that_names_it(path: Path) -> None:
    for bad in (Path("/dev/full"), path.parent, path / "none"):
        with pytest.raises(VkmoeError, match=f"the trace {bad} cannot be written: ") as caught:
            TraceWriter(bad, HEADER)
        assert caught.value.hint
    writer = TraceWriter(path, HEADER)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), writer._file.fileno())  # the disk fills up meanwhile
    with pytest.raises(VkmoeError, match="No space left"), writer:
        writer.write(np.array([[0, 1], [2, 3]], np.uint32), False)
    assert writer.n_tokens == 0


SHAPE = "needs 2 ids in each of 2 layers"
HUGE = "9" * 4000  # Python refuses to read ints of more than 4300 digits
LAYERS = "needs a number of each layer as layer_numbers"
HEADERS: list[tuple[Any, str]] = [
    ("{}", "is no header"),
    ("[]", "is not a JSON object"),
    ("GGUF\x00\x01", "is not JSON"),
    ('{"format": ', "is not JSON"),
    (PROMPT, "is no header"),
    (changed(format="other"), "is no header"),
    (changed(version="1"), "has version '1'"),
    (changed(version=None), "has version None"),
    (changed(model=7), "has no text model"),
    (changed(layer_numbers=[]), LAYERS),
    (changed(layer_numbers=[1] * 5000), LAYERS),
    (changed(n_experts=1 << 22), "has n_experts 4194304, not a whole number from 1 to 65536"),
    (changed(n_experts=True), "has n_experts True"),
    (changed(n_experts=8.0), "has n_experts 8.0"),
    (json.dumps(changed()).replace('"n_experts": 8', f'"n_experts": {HUGE}'), "99..."),
    (json.dumps(changed()).replace('"n_experts": 8', f'"n_experts": {HUGE * 9}'), "not JSON"),
    (changed(n_used=9), "has n_used 9, not a whole number from 1 to 8"),
    (changed(n_experts=512, n_used=300), "has n_used 300, not a whole number from 1 to 256"),
    (changed(span_bytes=[1]), "needs 2 numbers as span_bytes"),
    (changed(span_bytes=[1, -1]), "has span_bytes -1"),
    (changed(layer_numbers="ab"), LAYERS),
    (changed(model="x" * (1 << 20)), "is too long"),
    ("[" * 100_000, "is not JSON"),
]
TOKENS: list[tuple[Any, str]] = [
    ({"phase": "warmup", "experts": []}, "has no phase"),
    ({"phase": ["prompt"], "experts": []}, "has no phase"),
    ("not json", "is not JSON"),
    ('{"phase": "decode", "exper', "is not JSON"),
    ({"phase": "decode"}, SHAPE),
    (with_experts([[0, 1]]), SHAPE),
    (with_experts([[0, 1], [2]]), SHAPE),
    (with_experts([[0, 1], "ab"]), SHAPE),
    (with_experts([[2, 2], [0, 1]]), "names an expert twice in a layer"),
    (with_experts([[0, 8], [2, 3]]), "has expert id 8; the model has 8"),
    (with_experts([[0, -1], [2, 3]]), "has expert id -1"),
    (with_experts([[0, 1.0], [2, 3]]), SHAPE),
    (with_experts([[0, None], [2, 3]]), SHAPE),
    (with_experts([[0, [1]], [2, 3]]), SHAPE),
    (with_experts([[0, 1 << 32], [2, 3]]), "has expert id 4294967296"),
    (f'{{"phase":"decode","experts":[[0,{HUGE}],[2,3]]}}', "has expert id 99"),
    ('{"phase":"decode","experts":[[0,1e999],[2,3]]}', SHAPE),
    ('{"phase":"decode","experts":[[0,NaN],[2,3]]}', SHAPE),
    (" " * (2 << 20), "is too long"),
]
BAD: list[tuple[list[Any], int, str]] = [
    *(([record], 1, problem) for record, problem in HEADERS),
    *(([HEADER.document(), PROMPT, record, DECODE], 3, problem) for record, problem in TOKENS),
]


@pytest.mark.parametrize(("records", "line", "problem"), BAD, ids=[item[2] for item in BAD])
def test_a_bad_line_is_named(path: Path, records: Sequence[Any], line: int, problem: str) -> None:
    lines(path, *records)
    with pytest.raises(VkmoeError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: line {line} ")
    assert problem in message
    assert len(message) < len(str(path)) + 200
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the trace is empty"),
        ("\n\n", "the trace is empty"),
        (json.dumps(changed()) + "\n", "holds no tokens"),
        (json.dumps(changed()) + "\n" + json.dumps(DECODE)[:-1], "holds no tokens"),
        (json.dumps(changed(version=2)), "has version 2, this vkmoe reads 1"),
    ],
)
def test_a_file_without_a_token_or_of_the_future_is_refused(
    path: Path, text: str, problem: str
) -> None:
    path.write_text(text)
    with pytest.raises(VkmoeError, match=problem):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for missing, problem in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(VkmoeError, match=f"cannot be read: {problem}"):
            read_trace(missing)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_changed_anywhere_is_read_rightly_or_refused(
    path: Path, data: st.DataObject
) -> None:
    lines(path, HEADER.document(), PROMPT, DECODE, DECODE)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    try:
        found = read_trace(path)
    except VkmoeError:
        return
    assert found.routing.shape == (found.n_tokens, found.header.n_layers, found.header.n_used)
    assert found.routing.max() < found.header.n_experts
    assert len(found.is_prompt) == found.n_tokens
