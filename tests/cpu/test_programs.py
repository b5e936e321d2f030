"""Programs on CPU threads: kernels beside twins, the same bits on any threads, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cpu.programs import Rig, words
from vkmoe.gpu.kernels import KERNELS
from vkmoe.kernels.inputs import random_rows
from vkmoe.kernels.rounding import multiply
from vkmoe.quants import decode
from vkmoe.quants.types import TYPES, Bytes

Q8_K = TYPES["Q8_K"].ggml_id
WIDTH = 512


def product(rows: Bytes, x: np.ndarray[Any, Any], name: str = "Q4_K") -> Any:
    return multiply(name, rows, x, Q8_K)


def test_every_kernel_is_one_that_programs_name(native: Any) -> None:
    import vkmoe.kernels.matvec.operations
    import vkmoe.kernels.norms.operations  # noqa: F401

    assert set(native.kernels()) <= set(KERNELS)


def test_three_matrices_are_multiplied_by_each_vector(native: Any) -> None:
    """With biases and the scale of a norm; vectors lie a pitch apart, and y has more beside."""
    rng, rig = np.random.default_rng(1), Rig(native)
    matrices = [random_rows("Q4_K", n, WIDTH, rng) for n in (40, 7, 70)]
    x = rng.standard_normal((4, WIDTH + 64), np.float32)
    y = np.full((4, 130), 7, np.float32)
    bias = rng.standard_normal(130, np.float32)
    partials = rng.random((4, 8), np.float32)
    rig.matvec("Q4_K", matrices, x, y, bias=rig.place(bias), output_offset=5, columns=2,
               n_partials=6, partials_pitch=8, inverse_width=1 / WIDTH, eps=1e-5,
               norm_partials=partials)  # fmt: skip
    rig.run()
    for vector in range(4):
        scale = 1 / np.sqrt(partials[vector, :6].sum() / WIDTH + 1e-5)
        found = np.concatenate([product(rows, x[vector, :WIDTH]) for rows in matrices]) * scale
        assert y[vector, 5:122] == pytest.approx(found + bias[5:122], rel=1e-4, abs=1e-4)
        assert (y[vector, :5] == 7).all() and (y[vector, 122:] == 7).all()


def test_heads_have_vectors_of_their_own(native: Any) -> None:
    rng, rig = np.random.default_rng(2), Rig(native)
    stack = random_rows("Q4_K", 3 * 20, 256, rng)
    x = rng.standard_normal((2, 3 * 260 + 8), np.float32)
    y = np.zeros((2, 60), np.float32)
    ends = dict.fromkeys(("rows_end0", "rows_end1", "n_rows"), 20)
    rig.matvec("Q4_K", [stack], x, y, **ends, x_offset=2, x_stride=65, groups=(2, 3, 2))
    rig.run()
    for vector in range(2):
        for head in range(3):
            own = x[vector, 8 + head * 260 :][:256]
            found = product(stack[head * 20 : head * 20 + 20], own)
            assert y[vector, head * 20 :][:20] == pytest.approx(found, rel=1e-4, abs=1e-4)


def residual(rig: Rig, rows: Bytes, x: Any, state: dict[str, Any], **more: Any) -> None:
    numbers = {"weights": rig.place(rows), "gain": rig.place(state["gain"]), "bias": 0,
               "n_rows": len(rows), "row_bytes": rows.shape[1], "n_blocks": x.shape[1] // 256,
               "x_pitch": x.shape[1] // 4, "hidden_pitch": state["hidden"].shape[1],
               "partials_pitch": state["partials"].shape[1], "columns": 1, "rows": 16,
               "adds": 1, **more}  # fmt: skip
    tensors = {name: words(state[name]) for name in ("hidden", "gained", "partials")}
    tensors["x"], groups = words(x), (-(-len(rows) // 16), 1, len(x))
    rig.recording.dispatch("matvec_residual", "matvec_residual.q4_k", numbers, tensors, groups)


def state_of(rng: np.random.Generator, n_vectors: int, width: int) -> dict[str, Any]:
    return {"hidden": rng.standard_normal((n_vectors, width), np.float32),
            "gained": np.zeros((n_vectors, width), np.float32),
            "partials": np.zeros((n_vectors, 40), np.float32),
            "gain": rng.standard_normal(width, np.float32)}  # fmt: skip


@pytest.mark.parametrize("adds", [1, 0])
def test_a_residual_leaves_what_the_next_norm_takes(native: Any, adds: int) -> None:
    rng, rig = np.random.default_rng(3), Rig(native)
    rows, x = random_rows("Q4_K", 100, WIDTH, rng), rng.standard_normal((3, WIDTH), np.float32)
    state, bias = state_of(rng, 3, 100), rng.standard_normal(100, np.float32)
    before = adds * state["hidden"]
    if not adds:
        state["hidden"][:] = np.nan
    residual(rig, rows, x, state, bias=rig.place(bias), adds=adds)
    rig.run()
    for vector in range(3):
        hidden = before[vector] + product(rows, x[vector]) + bias
        assert state["hidden"][vector] == pytest.approx(hidden, rel=1e-4, abs=1e-4)
        assert state["gained"][vector] == pytest.approx(hidden * state["gain"], rel=1e-4, abs=1e-4)
        squares = [(hidden[i : i + 16] ** 2).sum() for i in range(0, 100, 16)]
        assert state["partials"][vector, :7] == pytest.approx(squares, rel=1e-4)


def test_embeddings_are_looked_up_for_the_rows_in_use(native: Any) -> None:
    """An id beyond the vocabulary is its last one."""
    rng, rig = np.random.default_rng(4), Rig(native)
    rows, state = random_rows("Q4_K", 9, WIDTH, rng), state_of(rng, 3, WIDTH)
    before = state["hidden"][2].copy()
    params = np.zeros(8 + 4 * 3, np.uint32)
    params[[3, 8, 12]] = 2, 5, 1000
    numbers = {"embeddings": rig.place(rows), "gain": rig.place(state["gain"]), "n_vocab": 9,
               "row_bytes": rows.shape[1], "n_blocks": WIDTH // 256, "hidden_pitch": WIDTH,
               "partials_pitch": 40, "workgroup_size": 8, "scale": 1.0}  # fmt: skip
    tensors = {name: words(state[name]) for name in ("hidden", "gained", "partials")}
    rig.recording.dispatch("embed", "embed.q4_k", numbers, {"params": params, **tensors}, (2, 1, 3))
    rig.run()
    values = decode("Q4_K", rows, 9 * WIDTH).reshape(9, WIDTH)
    for vector, token in ((0, 5), (1, 8)):
        assert (state["hidden"][vector] == values[token]).all()
        assert (state["gained"][vector] == values[token] * state["gain"]).all()
        squares = (values[token].astype(np.float64) ** 2).reshape(2, 256).sum(axis=1)
        assert state["partials"][vector, :2] == pytest.approx(squares, rel=1e-5)
    assert (state["hidden"][2] == before).all(), "a row that the batch does not have"


def test_a_norm_of_its_own(native: Any) -> None:
    rng, rig = np.random.default_rng(5), Rig(native)
    x, y = rng.standard_normal((2, 100), np.float32), np.zeros((2, 64), np.float32)
    gain = rng.standard_normal(50, np.float32)
    numbers = {"gain": rig.place(gain), "x_offset": 30, "width": 50, "x_pitch": 100, "y_pitch": 64,
               "eps": 1e-6}  # fmt: skip
    rig.recording.dispatch("rms_norm", "rms_norm", numbers, {"x": words(x), "y": words(y)},
                           (1, 1, 2))  # fmt: skip
    rig.run()
    for vector in range(2):
        part = x[vector, 30:80].astype(np.float64)
        found = part / np.sqrt((part**2).mean() + 1e-6) * gain
        assert y[vector, :50] == pytest.approx(found, rel=1e-5)
        assert (y[vector, 50:] == 0).all()


def test_bits_do_not_depend_on_the_number_of_threads(native: Any) -> None:
    """Of a program whose commands read what those before them wrote, run again and again."""
    rng = np.random.default_rng(6)
    rows, square = random_rows("Q4_K", 1000, WIDTH, rng), random_rows("Q4_K", WIDTH, WIDTH, rng)
    first = rng.standard_normal((2, WIDTH), np.float32)
    expected = None
    for n_threads in (1, 2, 3, 4, 8):
        rig, x = Rig(native, n_threads), first.copy()
        y, state = np.zeros((2, 1000), np.float32), state_of(np.random.default_rng(0), 2, WIDTH)
        rig.matvec("Q4_K", [rows], x, y)
        residual(rig, square, x, state)
        rig.recording.copy(*(words(each).view(np.uint8) for each in (state["hidden"], x)))
        rig.matvec("Q4_K", [rows], x, y)
        assert rig.recording.n_steps == 7 and rig.pool.n_threads == n_threads
        for _ in range(20):
            x[:], state = first, state
            rig.run()
        found = b"".join(each.tobytes() for each in (x, y, state["gained"], state["partials"]))
        expected = expected or found
        assert found == expected, n_threads


WRONG: list[tuple[str, Any]] = [
    ("n_blocks", 0),
    ("n_blocks", 3),  # longer than a row
    ("n_rows", 0),
    ("n_rows", 41),
    ("rows", 0),
    ("rows_end0", 50),
    ("row_bytes", 100),
    ("weights0", 64),
    ("weights0", 0),
    ("bias", 1 << 40),
    ("y_pitch", 1000),
    ("x_pitch", 1000),
    ("n_partials", 2),
    ("output_offset", 1),
    ("eps", 1),  # no fraction
    ("n_rows", 1.0),
    ("groups", (1, 1, 3)),
    ("groups", (1, 1, 0)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_does_not_fit_is_refused_when_it_is_recorded(
    native: Any, name: str, value: Any
) -> None:
    """ggml itself would end the process, and addresses lead anywhere."""
    rng, rig = np.random.default_rng(7), Rig(native)
    rows = random_rows("Q4_K", 40, WIDTH, rng)
    x, y = np.zeros((2, WIDTH), np.float32), np.zeros((2, 40), np.float32)
    rig.matvec("Q4_K", [rows], x, y)
    with pytest.raises(ValueError):
        rig.matvec("Q4_K", [rows], x, y, **{name: value})
    assert rig.recording.n_steps == 2, "only what fits is recorded"


def test_a_pool_runs_programs_of_any_length_one_after_the_other(native: Any) -> None:
    """Each gone when it has run, with more threads than cores: some are late for most steps."""
    pool, random = native.Pool(5), np.random.default_rng(8)
    for n_copies in random.integers(0, 60, 150):
        places = np.zeros((n_copies + 1, 40_000), np.uint32)
        recording = native.Recording(native.Regions(), native.Scratch())
        recording.fill(places[0], 7)
        for number in range(n_copies):  # from one place to the next: each waits for the last
            n_words = int(random.integers(1, places.shape[1] + 1))
            places[number + 1, n_words:] = 7
            source, target = places[number, :n_words], places[number + 1, :n_words]
            recording.copy(source.view(np.uint8), target.view(np.uint8))
        recording.run(pool)
        assert (places == 7).all()


def test_names_that_mean_nothing_are_refused(native: Any) -> None:
    rig = Rig(native)
    tensors = {"x": np.zeros(4, np.uint32), "y": np.zeros(4, np.uint32)}
    numbers = {"gain": rig.place(np.ones(4, np.float32)), "x_offset": 0, "width": 4, "x_pitch": 4,
               "y_pitch": 4, "eps": 1e-6}  # fmt: skip
    dispatch = rig.recording.dispatch
    dispatch("rms_norm", "rms_norm", numbers, tensors, (1, 1, 1))
    with pytest.raises(ValueError, match="no kernel"):
        dispatch("other", "other", numbers, tensors, (1, 1, 1))
    with pytest.raises(ValueError, match="no tensor y"):
        dispatch("rms_norm", "rms_norm", numbers, {"x": tensors["x"]}, (1, 1, 1))
    with pytest.raises(ValueError, match="no count width"):
        dispatch("rms_norm", "rms_norm", {**numbers, "width": 4.5}, tensors, (1, 1, 1))
    with pytest.raises(ValueError, match="needs 8 words of y"):
        dispatch("rms_norm", "rms_norm", {**numbers, "x_pitch": 0}, tensors, (1, 1, 2))
    with pytest.raises(TypeError):
        floats = {name: each.view(np.float32) for name, each in tensors.items()}
        dispatch("rms_norm", "rms_norm", numbers, floats, (1, 1, 1))
    with pytest.raises(ValueError):
        rig.recording.copy(np.zeros(3, np.uint8), np.zeros(4, np.uint8))
    with pytest.raises(ValueError):
        native.Pool(0)
