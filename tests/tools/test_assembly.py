"""tools/assembly on excerpts of what the compilers made of our own kernels.

The numbers stand beside the excerpts as counted by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.assembly import loads_in_flight, read
from tools.assembly.flow import Wait

EXCERPTS = Path(__file__).with_name("assembly")

# The norm's sum (a loop over binding 2), then the loop over blocks: the loads of one row are issued
# together, those of the next behind the waits for them. navi31, matvec F16.
AMD = (EXCERPTS / "amd.txt").read_text()


def test_amd_loops_branches_and_counters() -> None:
    assert loads_in_flight(read(AMD, 64)) == 2


def test_loads_before_the_first_wait_are_all_in_flight() -> None:
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
    assert loads_in_flight(read(text, 64)) == 3


def test_the_path_leads_through_the_loop_that_reads_most_weights() -> None:
    # The branch round the loop reads more at once, but less than the loop in it.
    load, wait = "\tglobal_load_b128 v[0:3], v[8:9], off\n", "\ts_waitcnt vmcnt(0)\n"
    text = f"""\
BB0:
	s_cbranch_scc0 BB2
BB1:
{load}{wait}{load}{load}{wait}	s_cbranch_scc1 BB1
	s_branch BB3
BB2:
{load}{wait}
BB3:
	s_endpgm
"""
    assert loads_in_flight(read(text, 64)) == 2


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
    blocks = read(NVIDIA, 32)
    assert loads_in_flight(blocks) == 1
    loads = [i for block in blocks for i in block.instructions if i.kind == "load"]
    assert {(load.binding, load.n_bytes) for load in loads} == {(0, 16), (None, 16)}


# Eight lanes a wave: a uniform load, two of the buffer that the NIR calls binding 0, a loop with a
# break, two by address, of which the second needs the token of the first. anv-dg2, matvec F16.
INTEL = (EXCERPTS / "intel.txt").read_text()
NIR = "%24 = @resource_intel (%23 (0xdead), %28 (0x1), %3 (0x0)) (desc_set=0, binding=0)"


def test_intel_loops_bindings_and_tokens() -> None:
    blocks = read(INTEL, 8, NIR)
    assert loads_in_flight(blocks) == 1
    instructions = [i for block in blocks for i in block.instructions]
    assert 0 in {i.binding for i in instructions if i.kind == "load"}
    waits = [i.waits for i in instructions]
    assert waits.count((Wait("$5"),)) == 3 and (Wait("*"),) in waits  # two sends, one sync


def test_intel_messages_before_arc() -> None:
    text = (EXCERPTS / "intel_xe_lp.txt").read_text()
    address, buffer, shared = read(text, 8, NIR)[0].instructions
    assert (address.n_bytes, address.binding) == (4, None)
    assert (buffer.n_bytes, buffer.binding, shared.kind) == (16, 0, "shared")


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="ACO"):
        read("define void @main()", 64)
    with pytest.raises(ValueError, match="no weights"):
        loads_in_flight(read("\tv_nop\n\ts_endpgm\n", 64))


@pytest.mark.parametrize(
    ("text", "mark"),
    [(AMD, "\n\t"), (NVIDIA, "// delay="), (INTEL, "};\n")],
    ids=("amd", "nvidia", "intel"),
)
def test_no_instruction_is_left_out(text: str, mark: str) -> None:
    assert sum(len(block.instructions) for block in read(text, 8)) == text.count(mark)
