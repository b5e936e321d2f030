"""tools/assembly on excerpts of what the compilers made of our own kernels.

The figures stand beside the excerpts as counted by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.assembly import Question, count, read
from tools.assembly.flow import Wait

EXCERPTS = Path(__file__).with_name("assembly")

# The norm's sum (a loop over binding 2), then the loop over blocks: the loads of one row are issued
# together, those of the next behind the waits for them. navi31, matvec F16.
AMD = (EXCERPTS / "amd.txt").read_text()


def test_amd_loops_branches_and_counters() -> None:
    # One pass of the main loop: 2 fma_mix, 3 on the longer side, 2 in the dual instruction.
    figures = count(read(AMD, 64), Question(passes={2: 8}))
    assert (figures.alu, figures.weight_bytes, figures.has_main_loop) == (7, 48, True)
    # 8 in the norm, then one wait for two loads (the second was issued before it), then one more.
    assert (figures.rounds, figures.main_rounds) == (8 + 2, 2)
    assert (figures.loads_in_flight, figures.bytes_in_flight) == (2, 32)
    assert figures.scalar_rounds == 1
    # Two passes of the main loop add only its rounds.
    assert count(read(AMD, 64), Question(main_passes=3, passes={2: 8})).rounds == 8 + 6


def test_a_loop_that_is_not_passed_has_no_rounds() -> None:
    assert count(read(AMD, 64), Question(passes={2: 0})).rounds == 2


def test_a_kernel_whose_loads_come_first_has_one_round() -> None:
    # The same three loads, all issued before the first wait: what "loads first" must show.
    text = """\
BB0:
	global_load_b128 v[40:43], v[40:41], off
	global_load_b128 v[48:51], v[46:47], off
	global_load_b128 v[52:55], v[40:41], off
	s_waitcnt vmcnt(2)
	v_fma_mix_f32 v58, v40, v12, neg(0) op_sel_hi:[1,0,0]
	s_waitcnt vmcnt(0)
	v_fma_mix_f32 v58, v52, v12, neg(0) op_sel_hi:[1,0,0]
	s_endpgm
"""
    figures = count(read(text, 64), Question())
    assert (figures.rounds, figures.loads_in_flight, figures.bytes_in_flight) == (1, 3, 48)
    assert (figures.has_main_loop, figures.alu) == (False, 2)


def test_amd_loops_in_loops_and_beside_them() -> None:
    # Two weights of binding 0 in a pass, the second in an inner loop; then a remainder, and a bias.
    text = """\
BB0:
	s_load_b128 s[20:23], s[10:11], null
	s_load_b128 s[28:31], s[10:11], 0x30
BB1:
	s_cbranch_scc0 BB5
BB2:
	buffer_load_b128 v[0:3], v9, s[20:23], 0 offen
	s_waitcnt vmcnt(0)
BB3:
	buffer_load_b32 v4, v9, s[20:23], 0 offen
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v1, v1, v4
	s_cbranch_scc1 BB3
BB4:
	s_branch BB1
BB5:
	s_cbranch_scc0 BB7
BB6:
	buffer_load_b32 v4, v9, s[20:23], 0 offen
	s_waitcnt vmcnt(0)
BB7:
	s_cbranch_scc0 BB9
BB8:
	buffer_load_b32 v4, v9, s[28:31], 0 offen
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v1, v1, v4
BB9:
	s_endpgm
"""
    blocks = read(text, 64)
    whole = count(blocks, Question(weights=0))
    assert (whole.rounds, whole.alu, whole.weight_bytes) == (4, 1, 20)
    assert count(blocks, Question(weights=0, unused=frozenset({3}))).rounds == 3
    main = Question(weights=0, unused=frozenset({3}), main_only=True)
    assert count(blocks, main).rounds == 2


def test_of_loops_that_exclude_each_other_the_better_is_the_main_one() -> None:
    # Whole tiles of rows: two loads at once. The last rows: one after the other, and more code.
    load, wait = "\tbuffer_load_b128 v[0:3], v9, s[20:23], 0 offen\n", "\ts_waitcnt vmcnt(0)\n"
    text = f"""\
BB0:
	s_load_b128 s[20:23], s[10:11], null
	s_cbranch_scc0 BB2
BB1:
{load}{load}{wait}	s_cbranch_scc1 BB1
	s_branch BB3
BB2:
{load}{wait}{load}{wait}	v_mov_b32_e32 v1, 0
	s_cbranch_scc1 BB2
BB3:
	s_endpgm
"""
    assert count(read(text, 64), Question(weights=0, main_only=True)).rounds == 1
    assert count(read(text, 64), Question(weights=0)).rounds == 2


@pytest.mark.parametrize(
    ("line", "n_bytes", "counter"),
    [
        ("flat_load_dwordx4 v[8:11], v[8:9]", 16, "vector"),  # polaris10
        ("global_load_dwordx4 v[12:15], v[14:15], off", 16, "vector"),  # vega10, navi21
        ("buffer_load_dwordx2 v[2:3], v1, s[28:31], 0 offen", 8, "vector"),
        ("global_load_d16_u16 v5, v[6:7], off", 2, "vector"),
        ("buffer_load_ubyte v5, v1, s[28:31], 0 offen", 1, "vector"),
        ("buffer_load_i8 v5, v1, s[28:31], 0 offen", 1, "vector"),
        ("s_load_dwordx4 s[28:31], s[12:13], 0x20", 16, "scalar"),
    ],
)
def test_amd_loads_of_every_generation(line: str, n_bytes: int, counter: str) -> None:
    block = read(f"BB0:\n\t{line}\n\ts_endpgm\n", 64)[0]
    load = block.instructions[0]
    assert (load.n_bytes, load.counter) == (n_bytes, counter)


def test_amd_waits_of_every_generation() -> None:
    lines = ("s_waitcnt vmcnt(3) lgkmcnt(0)", "s_wait_loadcnt 0x2", "s_wait_loadcnt_dscnt 0x102")
    text = "".join(f"\t{line}\n" for line in (*lines, "s_waitcnt_depctr 0xfff", "s_endpgm"))
    waits = [i.waits for i in read(text, 64)[0].instructions]
    assert waits == [
        (Wait("vector", 3), Wait("scalar", 0)),
        (Wait("vector", 2),),
        (Wait("vector", 1),),
        (),
        (),
    ]


# A loop whose end stands behind the code that follows it; the first load is of the buffer 0, the
# second by address. nvk-ampere, matvec Q4_K.
NVIDIA = (EXCERPTS / "nvidia.txt").read_text()


def test_nvidia_loops_bindings_and_scoreboards() -> None:
    figures = count(read(NVIDIA, 32), Question(main_passes=2))
    # isetp, two iadd3, fadd, i2f, ffma; r2ur goes to the scalar unit.
    assert (figures.alu, figures.weight_bytes) == (6, 32)
    assert (figures.rounds, figures.main_rounds) == (4, 2)
    assert figures.loads_in_flight == 1
    assert count(read(NVIDIA, 32), Question(weights=0)).weight_bytes == 16


# Eight lanes a wave: a uniform load, two of the buffer that the NIR calls binding 0, a loop with a
# break, two by address, of which the second needs the token of the first. anv-dg2, matvec F16.
INTEL = (EXCERPTS / "intel.txt").read_text()
NIR = "%24 = @resource_intel (%23 (0xdead), %28 (0x1), %3 (0x0)) (desc_set=0, binding=0)"


def test_intel_loops_bindings_and_tokens() -> None:
    figures = count(read(INTEL, 8, NIR), Question(main_passes=2))
    # cmp, add, mov (4 lanes take the time of 8), the longer side of the if: three movs.
    assert (figures.alu, figures.weight_bytes) == (6, 24)
    # $5 and $4 of a pass are one round ($4 is waited for by the send that takes it), $4 another.
    assert (figures.rounds, figures.main_rounds) == (4, 2)
    assert (figures.scalar_rounds, figures.loads_in_flight) == (1, 1)
    assert count(read(INTEL, 8, NIR), Question(weights=0)).weight_bytes == 16
    waits = [i.waits for block in read(INTEL, 8, NIR) for i in block.instructions]
    assert waits.count((Wait("$5"),)) == 3 and (Wait("*"),) in waits  # two sends, one sync
    # In a wave of 16 lanes, instructions of 8 are half of it.
    assert count(read(INTEL, 16, NIR), Question()).alu == 3


def test_intel_messages_before_arc() -> None:
    text = (EXCERPTS / "intel_xe_lp.txt").read_text()
    address, buffer, shared = read(text, 8, NIR)[0].instructions
    assert (address.n_bytes, address.binding) == (4, None)
    assert (buffer.n_bytes, buffer.binding, shared.kind) == (16, 0, "shared")


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="ACO"):
        read("define void @main()", 64)
    with pytest.raises(ValueError, match="no weights"):
        count(read("\tv_nop\n\ts_endpgm\n", 64), Question())


@pytest.mark.parametrize(
    ("text", "mark"),
    [(AMD, "\n\t"), (NVIDIA, "// delay="), (INTEL, "};\n")],
    ids=("amd", "nvidia", "intel"),
)
def test_no_instruction_is_left_out(text: str, mark: str) -> None:
    assert sum(len(block.instructions) for block in read(text, 8)) == text.count(mark)
