"""Numbers that stand in a shader and in Python are the same, read from the GLSL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vkmoe.experts.store import table
from vkmoe.gpu import token_io
from vkmoe.kernels.attention import operations as attention
from vkmoe.kernels.attention import shapes as attention_shapes
from vkmoe.kernels.experts import operations as experts
from vkmoe.kernels.logits import operations as candidates
from vkmoe.kernels.logits import twins
from vkmoe.kernels.matmul import operations as matmul
from vkmoe.kernels.memory import operations as memory
from vkmoe.kernels.prompt_attention import operations as prompt_attention
from vkmoe.kernels.prompt_experts import twins as prompt_twins
from vkmoe.kernels.router import operations as router
from vkmoe.kernels.router import twins as router_twins

SHADERS = Path(__file__).resolve().parents[2] / "shaders"
CONSTANTS = {
    "include/params.glsl": {
        "HEADER_WORDS": token_io.HEADER_WORDS,
        "ROW_WORDS": token_io.ROW_WORDS,
    },
    "router_topk.comp": {
        "MAX_USED": router.MAX_USED,
        "FLAG_RENORMALISE": router.RENORMALISE,
        "FLAG_SIGMOID": router.SIGMOID,
        "FLAG_SHARED_GATE": router.SHARED_GATE,
        "FLAG_GATHER": router.GATHER,
        "AT_HOME": table.AT_HOME,
    },
    "expert_down.comp": {"NO_WORD": experts.NO_WORD},
    "combine_rows.comp": {"NO_WORD": experts.NO_WORD},
    "include/copy_span.glsl": {"UNITS": memory.UNITS_PER_LANE},
    "include/tile_list.glsl": {"N_ROUNDS": matmul.N_ROUNDS},
    "expert_tiles.comp": {"AT_HOME": table.AT_HOME},
    "include/prompt_tile.glsl": {
        "BLOCK": prompt_attention.BLOCK,
        "CHUNK": prompt_attention.CHUNK,
    },
    "include/prompt_matrix.glsl": {
        "BLOCK": prompt_attention.BLOCK,
        "CHUNK_SLICES": prompt_attention.CHUNK_SLICES,
        "WHOLE_SLICES": prompt_attention.WHOLE_SLICES,
    },
    "attention_combine.comp": {"MAX_SPLITS": attention_shapes.MAX_SPLITS},
    "include/attention_cache.glsl": {
        "WHOLE": attention.WHOLE,
        "APPEND": attention.APPEND,
        "READ": attention.READ,
    },
    "include/select_top.glsl": {
        "N_TOP": candidates.N_CANDIDATES,
        "ID_RANGE": candidates.MAX_VOCAB - 1,
    },
    "include/candidate_lists.glsl": {
        "LIST_IDS": candidates.IDS_AT,
        "LIST_LOGITS": candidates.LOGITS_AT,
        "LIST_WORDS": candidates.LIST_WORDS,
        "OUT_IDS": candidates.IDS_AT,
        "OUT_LOGITS": candidates.LOGITS_AT,
    },
}
DECLARATION = re.compile(r"^const uint ([^;]+);", re.MULTILINE)
NUMBER = re.compile(r"(\w+) = (0x[0-9A-F]+|\d+)u(?:,|$)")


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_shader_has_the_numbers_of_its_host_code(name: str) -> None:
    text = (SHADERS / name).read_text()
    found = {
        constant: int(number, 0)
        for declaration in DECLARATION.findall(text)
        for constant, number in NUMBER.findall(declaration)
    }
    wanted = CONSTANTS[name]
    assert {constant: found.get(constant) for constant in wanted} == wanted


def test_twins_have_them_too() -> None:
    assert router_twins.AT_HOME == table.AT_HOME
    assert twins.N_CANDIDATES == candidates.N_CANDIDATES
    assert prompt_twins.N_ROUNDS == matmul.N_ROUNDS
