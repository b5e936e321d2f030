"""Expert profiles: what was saved comes back, and no other file gets in."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.changed_specs import with_experts
from vkmoe.errors import VkmoeError
from vkmoe.experts.decide.token_table import History, TokenRows
from vkmoe.experts.records.profile import (
    MAX_COUNT,
    ProfiledModel,
    load_profile,
    profile_text,
    profiled_model,
)
from vkmoe.facts import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec, RopeSpec
from vkmoe.gguf_file import TensorInfo

EXPERTS = ExpertSpec(8, 2, 64)
LAYER = LayerSpec(AttentionSpec(4, 2, 16, RopeSpec(16), "per_head"), EXPERTS)
SPEC = ModelSpec("qwen3moe", "toy", 64, 100, 128, 1e-6, True, (LAYER,) * 3)
TENSORS = [
    TensorInfo(f"blk.{layer}.ffn_{part}_exps.weight", "Q4_K", (8, 64, 64), 1000)
    for layer in range(3)
    for part in ("gate", "up", "down")
]
MODEL = profiled_model(SPEC, 3, TENSORS)
N_VOCAB = SPEC.n_vocab
COUNTS = np.random.default_rng(1).random(3 * 8) * 100
COUNTS[3] = 0.0
LEFT = History(COUNTS)
TOKENS = TokenRows(
    np.array([70, 3, 12]),
    np.array([1, 32, 2], np.uint16),
    np.arange(3 * 3 * 4, dtype=np.uint16).reshape(3, 3, 4) % 8,
    np.arange(3 * 3 * 4, dtype=np.uint16).reshape(3, 3, 4) * 1820,
)


def save_profile(path: Path, model: ProfiledModel, counts: NDArray[np.float64]) -> None:
    path.write_text(profile_text(model, History(counts)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound profile."""
    save_profile(tmp_path / "profile.json", MODEL, COUNTS)
    return tmp_path / "profile.json"


def refusal(path: Path, model: Any = MODEL) -> str:
    """What is said of a file that must not be taken: one line, naming it, and a remedy."""
    with pytest.raises(VkmoeError) as caught:
        load_profile(path, model, N_VOCAB)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and message.isprintable()
    assert len(message) < len(str(path)) + 250
    own = "belongs to another model" in str(caught.value)  # a good file, which must not go
    assert ("remove the file" in caught.value.hint) != own
    assert "--expert-profile" in caught.value.hint
    return message


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


# ----- saving and loading -----


def test_counts_come_back_bit_for_bit(path: Path) -> None:
    loaded = load_profile(path, MODEL, N_VOCAB)
    assert loaded is not None and loaded.tokens is None
    assert loaded.counts.dtype == np.float64 and np.array_equal(loaded.counts, COUNTS)


def test_what_is_known_of_tokens_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text(profile_text(MODEL, History(COUNTS, TOKENS)))
    loaded = load_profile(path, MODEL, N_VOCAB)
    assert loaded is not None and loaded.tokens is not None
    for name in TokenRows._fields:
        ours, theirs = getattr(loaded.tokens, name), getattr(TOKENS, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([], "no object"),
        ({"ids": [70, 3, 3]}, "distinct"),
        ({"ids": [70, 3]}, "more than"),
        ({"ids": [70, 3, -1]}, "no ids"),
        ({"ids": [70, 3, 10**400]}, "no ids"),
        ({"ids": [70, 3, 1.0]}, "no ids"),
        ({"ids": None}, "no ids"),
        ({"seen": [1, 33, 2]}, "how often"),
        ({"seen": [1, 0, 2]}, "how often"),
        ({"seen": [1, True, 2]}, "how often"),
        ({"experts": "A" * 96}, None),
        ({"experts": "CAAI" * 24}, "needs experts"),
        ({"experts": "A" * 92}, "needs experts"),
        ({"experts": "*" * 96}, "needs experts"),
        ({"shares": 7}, "needs experts"),
        ({"shares": "A" * 100}, "needs experts"),
    ],
)
def test_what_is_said_of_tokens_is_checked(tmp_path: Path, change: Any, words: str | None) -> None:
    path = tmp_path / "p"
    path.write_text(profile_text(MODEL, History(COUNTS, TOKENS)))

    def damage(document: dict[str, Any]) -> None:
        if isinstance(change, dict):
            document["tokens"].update(change)
        else:
            document["tokens"] = change

    edit(path, damage)
    if words is None:
        assert load_profile(path, MODEL, N_VOCAB) is not None, "the damage is what is refused"
    else:
        assert words in refusal(path)


def test_a_missing_file_is_a_beginning(tmp_path: Path) -> None:
    assert load_profile(tmp_path / "none.json", MODEL, N_VOCAB) is None
    assert load_profile(tmp_path / "no" / "folder.json", MODEL, N_VOCAB) is None


def test_counts_above_the_bound_are_saved_as_it(tmp_path: Path) -> None:
    save_profile(tmp_path / "p", MODEL, np.full_like(COUNTS, 1e200))
    loaded = load_profile(tmp_path / "p", MODEL, N_VOCAB)
    assert loaded is not None and set(loaded.counts.tolist()) == {MAX_COUNT}


# ----- other models -----


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SPEC, architecture="qwen2moe"), "architecture is 'qwen3moe'.* 'qwen2moe'"),
        (replace(SPEC, name="other\nname"), r"name is 'toy', this model's 'other\\nname'"),
        (with_experts(SPEC, n_experts=16), "number of experts is '8', .* '16'"),
        (with_experts(SPEC, n_used=4), "experts per token is '2', .* '4'"),
        (replace(SPEC, width=128), "the fingerprint of sizes and tensors differs"),
        (with_experts(SPEC, width=96), "the fingerprint"),
    ],
)
def test_another_model_is_refused_with_what_differs(
    path: Path, spec: ModelSpec, words: str
) -> None:
    message = refusal(path, profiled_model(spec, 3, TENSORS))
    assert "belongs to another model" in message
    assert re.search(words, message), message


def test_another_quantisation_is_another_model(path: Path) -> None:
    mixed = [TENSORS[0]._replace(type="Q6_K"), *TENSORS[1:]]
    assert "expert types is 'Q4_K', this model's 'Q4_K, Q6_K'" in refusal(
        path, profiled_model(SPEC, 3, mixed)
    )


@pytest.mark.parametrize(
    "change", [{"name": "x"}, {"type": "Q6_K"}, {"shape": (8, 64, 32)}, {"shape": (64, 8, 64)}]
)
def test_the_fingerprint_sees_every_tensor(change: dict[str, Any]) -> None:
    changed = [*TENSORS[:-1], TENSORS[-1]._replace(**change)]
    for other in (changed, TENSORS[:-1]):
        assert profiled_model(SPEC, 3, other).fingerprint != MODEL.fingerprint
    moved = [tensor._replace(offset=7, part=1) for tensor in reversed(TENSORS)]
    assert profiled_model(SPEC, 3, moved) == MODEL, "order and place in the file say nothing"


def test_profiles_of_earlier_versions_stay_good() -> None:
    assert MODEL.fingerprint == ("f066326381c4f8a286f8637c8a511057b831a3aff28068453280a7b5beda92db")


# ----- damaged and hostile files -----


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"\x00\xff\xfe" * 9,
        b"[]",
        b"null",
        b'{"format": "something else"}',
        b'{"format": "vkmoe expert profile"',
        b"[" * 40_000,
        b'{"format": ' + b"9" * 30_000 + b"}",
        "über".encode("latin-1"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p").write_bytes(data)
    assert "is not an expert profile, or damaged" in refusal(tmp_path / "p")


def test_every_truncation_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for n_bytes in range(0, len(whole.rstrip()), 37):
        path.write_bytes(whole[:n_bytes])
        refusal(path)


@pytest.mark.parametrize("version", [1, 3, 2.0, True, "2", None, [[2]], 10**4000])
def test_another_version_is_refused(path: Path, version: Any) -> None:
    assert "version" in refusal(edit(path, lambda d: d.update(version=version)))


@pytest.mark.parametrize("model", [None, [], "toy", {}, {"architecture": ["qwen3moe"]}])
def test_a_profile_without_its_model_is_refused(path: Path, model: Any) -> None:
    assert "model" in refusal(edit(path, lambda d: d.update(model=model)))


def test_control_characters_of_a_file_are_not_printed(path: Path) -> None:
    refusal(edit(path, lambda d: d["model"].update(name="\x1b[2J\n" + "x" * 5000)))


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1, 1e16, 10**4000, None, [1], {}])
def test_a_count_that_is_none_is_refused(path: Path, count: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        document["counts"][2][5] = count

    assert "needs 3 layers of 8 counts" in refusal(edit(path, change))


@pytest.mark.parametrize(
    "counts",
    [None, {}, [[1.0] * 8] * 2, [[1.0] * 8, [1.0] * 7, [1.0] * 8], [1.0] * 3, [[[1.0] * 8]] * 3],
)
def test_counts_of_another_shape_are_refused(path: Path, counts: Any) -> None:
    assert "needs 3 layers of 8 counts" in refusal(edit(path, lambda d: d.update(counts=counts)))


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    with open(tmp_path / "p", "wb") as stream:
        stream.truncate(1 << 40)  # sparse
    tracemalloc.start()
    try:
        assert "is larger than" in refusal(tmp_path / "p")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_has_no_more_ids_than_the_vocabulary(path: Path) -> None:
    """Parsing takes many times as much memory as the text."""
    path.write_text("[" + "{}," * 10_000 + "{}]")
    assert "is not an expert profile" in refusal(path)
    path.write_text("[" + "{}," * 100_000 + "{}]")
    assert "is larger than" in refusal(path)


def test_a_sound_profile_is_far_below_the_bound_on_size(tmp_path: Path) -> None:
    counts = np.full(3 * 8, 1 / 3e-7)  # as many digits as a count can have
    save_profile(tmp_path / "p", MODEL, counts)
    big = replace(MODEL, n_moe_layers=48, n_experts=128)
    save_profile(tmp_path / "big", big, np.full(48 * 128, 1 / 3e-7))
    assert load_profile(tmp_path / "big", big, N_VOCAB) is not None
    assert (tmp_path / "big").stat().st_size < 48 * 128 * 64


def test_a_folder_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in refusal(tmp_path)
