"""Programs are data: they print, count, and keep the ranges their commands were given."""

from __future__ import annotations

import pytest

from vkmoe.gpu.kernels import KernelSpec, kernel
from vkmoe.gpu.program import Copy, Dispatch, Program, Range, TensorRef, memory_range

X, Y = TensorRef("x", 8), TensorRef("y", 8)
TENSORS = {"source": X, "sum": Y, "target": TensorRef("z", 4)}
NUMBERS = {"rows": 2, "workgroup_size": 64, "factor": 0.5, "weights": 1 << 40, "n_words": 7}


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """A kernel that is registered for this test only."""
    monkeypatch.setattr("vkmoe.gpu.kernels.KERNELS", {})
    return kernel("scale", "r:source rw:sum w:target",
                  "u32:n_words address:weights f32:factor", "workgroup_size rows")  # fmt: skip


def dispatch(spec: KernelSpec, **changes: object) -> Dispatch:
    arguments: dict[str, object] = {
        "variant": "scale.f32",
        "numbers": NUMBERS,
        "tensors": TENSORS,
        "groups": (3, 1, 1),
        "label": "layer 3 scale",
    }
    return spec.dispatch(**(arguments | changes))  # type: ignore[arg-type]


def words(line: str) -> str:
    """A line without its padding."""
    return " ".join(line.split())


def test_a_printed_program(spec: KernelSpec) -> None:
    """A bar marks each command that waits for those above it."""
    program = Program("token")
    program.copy(Range("host", 0, 32), X.whole, "params in")
    program.append(dispatch(spec))
    program.copy(Y.whole, Range("readback", 64, 96), "out")
    lines = str(program).splitlines()
    assert lines[0] == "program token: 3 commands"
    assert [line[0] for line in lines[1:]] == [" ", "|", "|"]
    assert words(lines[1]) == "params in copy 32 bytes host+0 -> x+0"
    assert words(lines[2]) == "| layer 3 scale scale.f32 [3 1 1] (x, y, z)"
    assert words(lines[3]) == "| out copy 32 bytes y+0 -> readback+64"
    assert len(program.dispatches()) == 1


def test_dispatches_by_label(spec: KernelSpec) -> None:
    program = Program("token")
    for layer in (3, 30, 4):
        program.append(dispatch(spec, label=f"layer {layer} scale"))
    assert [item.label for item in program.dispatches("layer 3 ")] == ["layer 3 scale"]


def test_ranges_follow_the_bindings(spec: KernelSpec) -> None:
    weights = memory_range(4096, 64)
    made = dispatch(spec, tensors=TENSORS | {"sum": Y.part(2, 3)}, reads=(weights,))
    assert made.reads == (X.whole, Range("y", 8, 20), weights)
    assert made.writes == (Range("y", 8, 20), Range("z", 0, 16))


def test_constants_and_pushes_are_in_the_order_of_the_specification(spec: KernelSpec) -> None:
    """An address is aligned to 8 bytes, as std430 has it."""
    made = dispatch(spec)
    assert made.constants == (64, 2)
    wanted = (7).to_bytes(4, "little") + bytes(4) + (1 << 40).to_bytes(8, "little")
    assert made.push == wanted + b"\x00\x00\x00\x3f"
    assert len(made.push) == spec.push_bytes


@pytest.mark.parametrize("name", ["rows", "factor"])
def test_a_forgotten_number_is_a_bug(spec: KernelSpec, name: str) -> None:
    with pytest.raises(AssertionError, match=f"scale.*{name}"):
        dispatch(spec, numbers={key: NUMBERS[key] for key in NUMBERS if key != name})


def test_a_forgotten_tensor_is_a_bug(spec: KernelSpec) -> None:
    with pytest.raises(AssertionError, match="scale"):
        dispatch(spec, tensors={"source": X, "sum": Y})


def test_more_than_128_bytes_of_push_constants_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="136 bytes of push constants"):
        kernel("wide", "r:x", " ".join(f"address:a{i}" for i in range(17)), "workgroup_size")


def test_a_copy_of_unequal_sizes_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Copy(Range("a", 0, 8), Range("b", 0, 4), "copy")


def test_words_outside_a_tensor_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        X.words(4, 5)
