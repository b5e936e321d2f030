"""All kernels by the self-test's own cases, and experts whose parts lie apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cpu.programs import Rig, words
from vkmoe.cpu.device import CpuDevice, cpu_info
from vkmoe.facts import Activation
from vkmoe.kernels.experts.operations import ACTIVATIONS, Descriptors
from vkmoe.kernels.experts.twins import activated
from vkmoe.kernels.families import FAMILIES
from vkmoe.kernels.inputs import random_rows
from vkmoe.kernels.rounding import multiply
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.quants.types import TYPES
from vkmoe.selftest.suite import run_variant, variants_of

# What no program of a CPU has: experts are read where they are, a GPU joins what both computed,
# no kernel is only measured, and lanes share no memory.
NOT_HERE = ("gather", "bring_experts", "expert_gate_up_keep", "expert_down_keep", "join_rows",
            "read_words", "fill_shared")  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.sample(10)
def test_what_the_self_test_asks_of_shaders_holds_here(native: Any, family: str) -> None:
    """In all types, with the bounds of shaders, beside twins that round as ggml does."""
    info = cpu_info()
    variants = [variant for variant in variants_of(info) if variant.family == family]
    assert bool(variants) == (family in native.kernels()) != (family in NOT_HERE)
    with CpuDevice(2) as device:
        for variant in variants:
            cases = list(run_variant(variant, device, choose_tuning(info)))
            assert cases and all(case.ok for case in cases), [c for c in cases if not c.ok]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_biased", [False, True])
def test_experts_are_found_by_the_addresses_of_their_matrices(
    native: Any, activation: Activation, is_biased: bool
) -> None:
    """Gate and up of one type, down of another, all apart; a row without experts is left alone."""
    rng, rig = np.random.default_rng(8), Rig(native)
    width, inner, n_slots, n_rows = 256, 512, 3, 2
    experts, places = [], []
    for _ in range(4):
        matrices = [random_rows("Q4_K", inner, width, rng) for _ in range(2)]
        matrices.append(random_rows("Q6_K", width, inner, rng))
        biases = [rng.standard_normal(n, np.float32) for n in (inner, inner, width)]
        scales = rng.uniform(0.5, 2.0, 3).astype(np.float32)
        experts.append((matrices, biases, scales))
        parts: list[NDArray[Any]] = [*matrices, *biases]
        made = Descriptors.of(1)
        made.addresses[:] = [rig.place(part) for part in parts]
        made.scales[:] = scales
        places.append(rig.place(made.words))
    routing = np.zeros((3, 6 * n_slots), np.uint32)
    chosen, weights = ((2, 0, 3), (1, 3, 0)), rng.random((n_rows, n_slots), np.float32)
    for row in range(n_rows):
        routing[row, n_slots : 2 * n_slots] = weights[row].view(np.uint32)
        used = np.array([places[expert] for expert in chosen[row]], np.uint64)
        routing[row, 2 * n_slots : 4 * n_slots] = used.view(np.uint32)
    x = rng.standard_normal((3, width), np.float32)
    act = np.full((3, n_slots * inner), 5, np.float32)
    before = rng.standard_normal((3, width), np.float32)
    hidden, gained, gain = before.copy(), np.zeros_like(before), rng.random(width, np.float32)
    partials = np.zeros((3, 16), np.float32)
    shared = {"span": 0, "n_slots": n_slots, "biased": int(is_biased), "routing_pitch": 18}
    bias_at = dict(zip(("gate_bias", "up_bias", "down_bias"), (24, 32, 40), strict=True))
    gate_up = {**shared, **bias_at, "gate_offset": 0, "up_offset": 8, "n_rows": inner,
               "row_bytes": experts[0][0][0].shape[1], "n_blocks": 1, "n_partials": 0,
               "inverse_width": 0.0, "eps": 0.0, "x_pitch": width // 4, "partials_pitch": 0,
               "act_pitch": n_slots * inner, "rows": 48, "pass": 0,
               "activation": ACTIVATIONS.index(activation)}  # fmt: skip
    tensors = {"x": words(x), "norm_partials": words(partials), "routing": words(routing),
               "act": words(act)}  # fmt: skip
    groups = (-(-inner // 48), n_slots, 3)
    rig.recording.dispatch("expert_gate_up", "expert_gate_up.q4_k", gate_up, tensors, groups)
    down = {**shared, **bias_at, "gain": rig.place(gain), "down_offset": 16,
            "weight_word": 0xFFFFFFFF, "n_rows": width, "row_bytes": experts[0][0][2].shape[1],
            "n_blocks": 2, "slot_vec4s": inner // 4, "act_pitch": n_slots * inner // 4,
            "hidden_pitch": width, "partials_pitch": 16, "rows": 16, "sparse": 0,
                "adds": 1}  # fmt: skip
    tensors = {"act": words(act), "routing": words(routing), "hidden": words(hidden),
               "gained": words(gained), "partials": words(partials)}  # fmt: skip
    rig.recording.dispatch("expert_down", "expert_down.q6_k", down, tensors, (16, 1, 3))
    rig.run()

    form = TYPES["Q8_K"].ggml_id
    for row in range(n_rows):
        total = before[row].astype(np.float64)
        for slot, expert in enumerate(chosen[row]):
            (gate, up, back), biases, scales = experts[expert]
            added = biases if is_biased else (0.0, 0.0, 0.0)
            inside = activated(
                scales[0] * multiply("Q4_K", gate, x[row], form) + added[0],
                scales[1] * multiply("Q4_K", up, x[row], form) + added[1],
                activation,
            )
            found = act[row, slot * inner :][:inner]
            assert np.abs(found - inside).max() <= 1e-4 * np.abs(inside).max()
            product = scales[2] * multiply("Q6_K", back, found, form)
            total += weights[row, slot] * (product + added[2])
        assert np.abs(hidden[row] - total).max() <= 1e-4 * np.abs(total).max()
        assert (gained[row] == hidden[row] * gain).all()
        squares = (total.reshape(16, 16) ** 2).sum(axis=1)
        assert partials[row] == pytest.approx(squares, rel=1e-3)
    assert (act[2] == 5).all() and (hidden[2] == before[2]).all() and (partials[2] == 0).all()
