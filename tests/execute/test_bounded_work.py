"""How much work a submit of a fused token may be, by estimate."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.models.invented import ATTENTION, EXPERTS, Memory, Types, layer
from vkmoe.execute.segments import LIMIT_S, TARGET_S, bound_submits, part_bytes
from vkmoe.facts import DenseSpec, LayerSpec
from vkmoe.gpu.program import memory_range
from vkmoe.models.weights import AttentionWeights, ModelWeights

SECONDS = st.lists(st.floats(0, 1) | st.just(TARGET_S) | st.just(0.0), min_size=1, max_size=60)


def groups(seconds: list[float]) -> list[list[float]]:
    starts = [0, *bound_submits(seconds).borders]
    return [seconds[a:b] for a, b in itertools.pairwise([*starts, len(seconds)])]


@given(SECONDS)
def test_no_submit_takes_longer_unless_it_is_one_part(seconds: list[float]) -> None:
    found = groups(seconds)
    assert list(itertools.chain(*found)) == seconds
    for group in found:
        assert group, "no empty submit"
        assert sum(group) <= TARGET_S + 1e-9 or len(group) == 1
        assert sum(group) <= LIMIT_S or len(group) == 1
    for before, after in itertools.pairwise(found):
        assert sum(before) + after[0] > TARGET_S, "no more submits than needed"


@given(SECONDS)
def test_only_a_part_above_the_limit_is_warned_of(seconds: list[float]) -> None:
    bounded = bound_submits(seconds)
    assert bounded.too_long == tuple((i, s) for i, s in enumerate(seconds) if s > LIMIT_S)
    assert (bounded.warning(len(seconds)) is None) == (max(seconds) <= LIMIT_S)


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=60), st.floats(1e6, 1e12))
def test_slower_links_only_make_more_submits(n_bytes: list[int], speed: float) -> None:
    counts = [
        len(bound_submits([n / rate for n in n_bytes]).borders) for rate in (speed, speed / 2)
    ]
    assert counts[0] <= counts[1] < len(n_bytes)


def test_the_warning_names_the_longest_part_and_its_time() -> None:
    assert "layer 1 alone may keep the GPU busy for 0.9 s" in str(
        bound_submits([0.6, 0.9, 0.1]).warning(2)
    )
    assert str(bound_submits([0.1, 0.2, 3.0]).warning(2)).startswith("the output head alone")


def weights() -> ModelWeights:
    memory = Memory()
    return ModelWeights(
        embeddings=memory.matrix("Q8_0", 1000, 512),
        output_gain=0,
        output=memory.matrix("Q6_K", 1000, 512),
        layers=tuple(
            layer(memory, Types(), LayerSpec(ATTENTION, block))
            for block in (DenseSpec(256), EXPERTS, EXPERTS)
        ),
        expert_table=memory_range(0, 1),
    )


def test_over_a_link_only_missed_experts_count() -> None:
    model = weights()
    span = model.layers[1].span_bytes
    assert part_bytes(model, 2, None) == [0, 2 * span, 2 * span, 0]
    assert part_bytes(model, 8, None) == [0, 8 * span, 8 * span, 0]


def test_in_shared_memory_all_weights_and_the_kv_cache_count() -> None:
    model = weights()
    span = model.layers[1].span_bytes
    dense, first, second, head = part_bytes(model, 2, [1000] * 3)
    assert head == 1000 * model.output.row_bytes
    router = model.layers[1].feed_forward.router
    assert router is not None
    assert first == second == dense + span + router.n_rows * router.row_bytes
    assert [a - b for a, b in zip((dense, first), part_bytes(model, 2, [0] * 3), strict=False)] == [
        1000,
        1000,
    ]
    attention = model.layers[0].mixer
    assert isinstance(attention, AttentionWeights)
    larger = replace(attention.q, n_rows=2 * attention.q.n_rows)
    changed = replace(model.layers[0], mixer=replace(attention, q=larger))
    grown = part_bytes(replace(model, layers=(changed, *model.layers[1:])), 2, [1000] * 3)
    assert grown[0] - dense == attention.q.n_rows * attention.q.row_bytes


def test_a_token_of_a_large_model_over_a_slow_link_becomes_some_submits() -> None:
    """48 layers of 8 experts of 3 MB each: 1.2 GB, at 2 GB/s more than half a second."""
    seconds = [8 * 3e6 / 2e9] * 48 + [0.0]
    assert len(groups(seconds)) == 3
    assert bound_submits([8 * 3e6 / 24e9] * 48 + [0.0]).borders == ()
