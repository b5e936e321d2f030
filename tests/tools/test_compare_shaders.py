"""The machine code of prompts' kernels beside llama.cpp's: what is counted of a main loop, what it
costs, and which shaders of llama.cpp it is compared with. The texts are shortened from compilers'.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.invented import AMD, with_matrix_units
from tools import compare_shaders
from tools.assembly import read
from tools.assembly.cost import Work, main_loop_work
from tools.compare_shaders import OURS, THEIRS, Comparison, Row, ratios, table
from tools.llama_cpp_matmul import matmul_shaders, why_none
from vkmoe.facts import DeviceInfo, MatrixShape

WMMA = "\tv_wmma_f32_16x16x16_f16 v[1:8], v[9:16], v[17:24], v[1:8]\n"
DPAS = "dpas.8x8(16)    g44<1>F  g12<1,1,0>F  g52<1,1,0>HF  g36<1,1,0>HF { align1 WE_all 1H $7 };\n"

# A loop that begins anew (BB1) round the steps (BB2), which have a branch to many products (BB4) or
# few (BB5), and a loop of their own (BB3).
AMD_TEXT = f"""\
BB0:
	v_mov_b32_e32 v1, 0
BB1:
	s_mov_b32 s1, 0
BB2:
	global_load_b128 v[40:43], v[40:41], off
	s_barrier
	ds_store_b128 v1, v[40:43]
	v_pk_fma_f16 v1, v2, v3, v4
BB3:
	ds_load_2addr_b32 v[1:2], v3 offset0:1 offset1:2
	s_cbranch_scc1 BB3
	s_barrier
	ds_load_b128 v[9:12], v30
	s_cbranch_scc1 BB5
BB4:
{WMMA}{WMMA}{WMMA}	scratch_load_b32 v1, off, s1
	s_cbranch_scc1 BB2
	s_branch BB6
BB5:
{WMMA}	s_cbranch_scc1 BB2
BB6:
	s_cbranch_scc1 BB1
	s_endpgm
"""

INTEL_TEXT = f"""\
LABEL1:
send(16)        g1UD  g2UD  nullUD  0x6210d500  0x03000000
                ugm MsgDesc: ( load, a64, d32, V4, L1STATE_L3MOCS ) {{ align1 1H $5 }};
send(16)        nullUD  g8UD  nullUD  0x02000004  0x00000000
                gateway MsgDesc: (barrier msg) mlen 1 ex_mlen 0 rlen 0 {{ align1 WE_all 1H $3 }};
(+f0.0.any16h) sync bar(16) null<0,1,0>UB {{ align1 WE_all 1H }};
send(16)        g1UD  g2UD  nullUD  0x6210d500  0x03000000
                slm MsgDesc: ( load, a32, d32, V4, L1STATE_L3MOCS flat ) {{ align1 1H $6 }};
send(1)         g1UD  g2UD  nullUD  0x0210151f  0x00000000
                slm MsgDesc: ( fence, a32, threadgroup, none ) {{ align1 WE_all 1N $8 }};
send(1)         g8UD  g64UD nullUD  0x4220e500  a0.2<0>UD
                ugm MsgDesc: ( load, a32, d32, V32, transpose, ss ) {{ align1 WE_all 1N $7 }};
mov(1)          g1<1>UD g2<0,1,0>UD {{ align1 WE_all 1N }};
(+f0.0) add(32) g1<1>D  g2<1,1,0>D  g3<1,1,0>D {{ align1 }};
{DPAS}{DPAS}while(16)       JIP:  LABEL1 {{ align1 1H }};
send(16)        nullUD  g126UD  nullUD  0x02000000  0x00000000
                gateway MsgDesc: (open) mlen 1 ex_mlen 0 rlen 0 {{ align1 WE_all 1H EOT }};
"""


def work(text: str, lanes: int) -> Work:
    return main_loop_work(read(text, lanes), lanes)


def test_a_step_of_amd_is_priced_by_its_longer_side() -> None:
    found = work(AMD_TEXT, 64)
    assert (found.matrix, found.multiply_adds, found.vector) == (3, 3 * 4096, 1)
    assert found.shared_bytes == 64 * (16 + 8 + 16) and found.spill_bytes == 64 * 4
    assert (found.loads, found.load_bytes, found.barriers) == (1, 64 * 16, 2)
    assert found.inner_loops == 1
    assert found.cycles == 3 * 32 + 2 + 64 * 40 / 64
    assert found.per_thousand(found.matrix_cycles) == 7.8125


def test_a_wave_of_half_as_many_lanes_has_half_of_all_but_matrices() -> None:
    found = work(AMD_TEXT, 32)
    assert (found.matrix_cycles, found.vector_cycles, found.shared_cycles) == (96, 1, 20)


def test_a_step_of_intel_counts_lanes_of_each_instruction() -> None:
    found = work(INTEL_TEXT, 16)
    assert (found.matrix, found.multiply_adds, found.vector) == (2, 2 * 2048, 2)
    assert (found.loads, found.load_bytes, found.barriers) == (1, 16 * 16, 1)
    assert (found.shared_bytes, found.spill_bytes) == (16 * 16, 32 * 4)
    assert found.cycles == 2 * 16 + (1 + 2) + 16 * 16 / 16


def test_engines_of_8_lanes_take_twice_as_long() -> None:
    found = work(INTEL_TEXT.replace("dpas.8x8(16)", "dpas.8x8(8)"), 16)
    assert found.multiply_adds == 2 * 1024
    assert found.cycles == 2 * 16 + (1 + 4) + 16 * 16 / 8


def test_matrices_of_8_bits_are_twice_as_deep() -> None:
    found = work(INTEL_TEXT.replace(">HF", ">B"), 16)
    assert (found.multiply_adds, found.matrix_cycles) == (2 * 4096, 2 * 16)


def test_a_loop_that_multiplies_inside_counts_as_often_as_it_runs() -> None:
    text = AMD_TEXT.replace("BB3:\n", f"BB3:\n{WMMA}")
    found, once = main_loop_work(read(text, 64), 64, passes=2), work(AMD_TEXT, 64)
    assert (found.matrix, found.vector) == (3 + 2, once.vector)
    assert found.shared_bytes == once.shared_bytes + 64 * 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AMD_TEXT.replace("v_wmma", "v_fma"), "there is no matrix instruction"),
        (f"BB0:\n{WMMA}\ts_endpgm\n", "no loop multiplies matrices"),
        (AMD_TEXT.replace("s_barrier", "s_nop"), "has a barrier"),
        (AMD_TEXT.replace("BB3:\n", f"BB3:\n{WMMA}"), "nothing says how often"),
        (AMD_TEXT.replace("16x16x16_f16", "16x16x16_iu4"), "no rate is known"),
        (AMD_TEXT.replace("ds_load_b128", "ds_load_tr"), "how many bytes"),
        (INTEL_TEXT.replace("dpas.8x8(16)", "dpas.8x8(32)"), "no rate is known"),
        (INTEL_TEXT.replace(">HF", ">UW"), "no rate is known"),
        (INTEL_TEXT.replace("d32, V4, L1STATE_L3MOCS flat", "what, flat"), "how many bytes"),
    ],
)
def test_what_cannot_be_counted_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        work(text, 16 if "dpas" in text else 64)


FEW, MANY = work(AMD_TEXT, 32), work(AMD_TEXT, 64)
ROWS = [
    Row("q4_k", matrices, side, "f16", 64, 200, 0, counted)
    for matrices, ours, theirs in (("dense", FEW, MANY), ("down", MANY, FEW))
    for side, counted in ((OURS, ours), (THEIRS, theirs))
]
FOUND = Comparison("navi31", "a card", "a driver", [], ROWS)


def test_ratios_are_ours_to_theirs_of_the_same_matrices() -> None:
    less, more = FEW.cycles / MANY.cycles, MANY.cycles / FEW.cycles
    assert less < 0.9 and [ratio for _, ratio in ratios(ROWS)] == [None, less, None, more]
    lines = table(FOUND).splitlines()
    assert f"{less:6.2f}" in lines[4] and "passed once" in lines[-1]


def test_a_record_has_the_command_and_every_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_shaders, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["compare_shaders.py", "--gpu", "navi31"])
    found = json.loads(compare_shaders.record([FOUND]).read_text())
    assert found["card"]["command"] == "python -m tools.compare_shaders --gpu navi31"
    assert found["card"]["drivers"] == {"navi31": "a card, a driver"}
    (gpu,) = found["results"]
    assert [row["work"]["matrix"] for row in gpu["rows"]] == [3] * 4
    assert gpu["rows"][1]["ratio"] == round(FEW.cycles / MANY.cycles, 3)


# ----- what llama.cpp takes -----


def card(vendor_id: int, least: int, lanes: int, shape: MatrixShape) -> DeviceInfo:
    info = replace(with_matrix_units(AMD), vendor_id=vendor_id, subgroup_size=lanes)
    return replace(info, subgroup_range=(least, lanes), matrix_shapes=(shape,))


RDNA3 = card(0x1002, 32, 64, MatrixShape(16, 16, 16, "f16", "f32"))
XE2 = card(0x8086, 16, 32, MatrixShape(8, 16, 16, "f16", "f32"))
ARC_A = card(0x8086, 8, 32, MatrixShape(8, 8, 16, "f16", "f32"))


def test_rdna3_multiplies_int8_where_llama_cpp_has_it_and_f16_in_waves_of_64() -> None:
    first, second = matmul_shaders(RDNA3, "q4_k", experts=False)
    assert (first.factors, first.subgroup_size, second.factors) == ("int8", 32, "f16")
    assert second.constants == [256, 128, 128, 32, 64, 64, 2, 16, 16, 16, 64, 1, 12]
    assert second.macros["ACC_TYPE"] == "float16_t"
    (only,) = matmul_shaders(RDNA3, "iq3_xxs", experts=True)
    assert only.constants[:3] == [128, 64, 64] and only.macros["B_TYPE_SCALAR"] == "float"
    assert only.macros["DATA_A_IQ3_XXS"] == "1" and only.n_bindings == 5


def test_xe2_multiplies_f16_with_sums_of_f32_in_subgroups_of_its_tiles() -> None:
    (dense,) = matmul_shaders(XE2, "q8_0", experts=False)
    (experts,) = matmul_shaders(XE2, "q8_0", experts=True)
    assert dense.constants == [512, 128, 256, 32, 32, 32, 2, 8, 16, 16, 16, 1, 8]
    assert (dense.subgroup_size, experts.subgroup_size) == (16, 32)
    assert dense.macros["ACC_TYPE"] == "float" and experts.macros["B_TYPE_SCALAR"] == "float16_t"


def test_where_it_multiplies_no_matrices_the_reason_is_said() -> None:
    assert why_none(RDNA3) is None and why_none(XE2) is None
    assert "before Xe2" in str(why_none(ARC_A))
    assert "offers no matrices" in str(why_none(AMD))
