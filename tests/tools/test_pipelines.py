"""The pipelines of real models are all that vkmoe compiles."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from tests.models.invented import TUNINGS
from tools.pipelines import MODELS, Pipeline, pipelines
from vkmoe.gpu.device import spirv_folder
from vkmoe.gpu.kernels import KERNELS
from vkmoe.kernels.launches import KEEPING, Tile
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants import HAS_KERNEL

found = cache(pipelines)
ON_MATRIX_UNITS = replace(TUNINGS[0], matrix_tile=Tile(256, 256, 64, 32, 16, 16, 16, 32, 1, 32))
pytestmark = pytest.mark.full


def test_every_compiled_variant_is_in_a_pipeline_of_some_tuning() -> None:
    """What no model of the list uses would never meet a real compiler."""
    tunings = (*TUNINGS, ON_MATRIX_UNITS)
    used = {pipeline.variant for tuning in tunings for pipeline in found(tuning)}
    assert used == {path.stem for path in spirv_folder().glob("*.spv")}


def test_those_of_a_type_are_the_same_without_the_others() -> None:
    every = found(TUNINGS[0])
    of_type = {pipeline: models for pipeline, models in every.items() if ".iq3_s" in pipeline.name}
    assert of_type and pipelines(TUNINGS[0], ".iq3_s") == of_type


@pytest.mark.parametrize("tuning", [*TUNINGS, ON_MATRIX_UNITS])
def test_every_kernel_and_model_is_there_and_no_name_twice(tuning: Tuning) -> None:
    assert {pipeline.kernel for pipeline in found(tuning)} == set(KERNELS)
    assert {model for models in found(tuning).values() for model in models} == set(MODELS)
    assert len({pipeline.name for pipeline in found(tuning)}) == len(found(tuning))


@pytest.mark.parametrize("kernel", ["expert_gate_up", "expert_gate_up_keep"])
@pytest.mark.parametrize("kind", sorted(HAS_KERNEL))
def test_gate_and_up_come_together_and_apart(kind: str, kernel: str) -> None:
    names = [p.name for p in found(TUNINGS[0]) if p.variant == f"{kernel}.{kind.lower()}+subgroup"]
    passes = {match[0] for name in names for match in [re.search(r"pass=\d", name)] if match}
    assert passes == {"pass=0", "pass=1", "pass=2"}


def test_biases_and_the_activation_of_gpt_oss_are_compiled_for_it_alone() -> None:
    of_gpt_oss = {p for p in found(TUNINGS[0]) if "activation=1 biased=1" in p.name}
    assert {found(TUNINGS[0])[p] for p in of_gpt_oss} == {("gpt-oss-20b", "gpt-oss-120b")}


def test_only_the_kernels_of_experts_require_a_size_of_subgroups() -> None:
    requiring = Tuning("lanes", 64, 4, True, subgroup_size=32, required_subgroup_size=32)
    kernels = {p.kernel for p in found(requiring) if p.subgroup_size == 32}
    assert kernels == {*KEEPING, *KEEPING.values()}


def test_a_name_has_what_a_pipeline_is_specialised_for() -> None:
    pipeline = Pipeline("matvec", "matvec.q4_k", (64, 4, 4, 1, 16), 4, 80, 0)
    sizes = "workgroup_size=64 rows=4 walk_rows=4 columns=1 loaded_words=16"
    assert pipeline.name == f"matvec.q4_k {sizes}"
