"""Which shaders store by address, and where to; that storing does not change what they compute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu.spirv import (
    DECORATE,
    DOT,
    F_MUL,
    LOAD,
    NO_CONTRACTION,
    STORE,
    VECTOR_TIMES_SCALAR,
    Access,
)
from tests.gpu.test_shaders_static import (
    APPENDING_FAMILIES,
    ATTENTION_FAMILIES,
    EXPERT_FAMILIES,
    KEEP_FAMILIES,
    NAMES,
    RECURRENT_FAMILIES,
    every_variant,
    family,
    module,
)

SHADERS = Path(__file__).resolve().parent.parent.parent / "shaders"
# These fill places on the device, to land in or to be brought to; others append to the KV cache.
STORING_FAMILIES = {"gather", "bring_experts"} | KEEP_FAMILIES
CACHING_FAMILIES = ATTENTION_FAMILIES | APPENDING_FAMILIES


@every_variant
def test_memory_reached_by_address_is_only_read(name: str) -> None:
    """But for STORING_FAMILIES: whole 16-byte words, biases, and scales of types in planes.

    What appends to a cache stores words of rows; what is recurrent stores its state.
    """
    stores = {access for access in module(name).accesses if access.opcode != LOAD}
    wide = Access(STORE, "v2u64" if name.endswith("+blocks64") else "v4u32", 16)
    wanted = {wide} if family(name) in STORING_FAMILIES else set()
    if family(name) in KEEP_FAMILIES | CACHING_FAMILIES | RECURRENT_FAMILIES:
        wanted |= {Access(STORE, "u32", 4)}
    assert stores == wanted


def test_stores_by_address_go_to_places_on_the_device_only() -> None:
    """Never through an address that may be a home. The text of the shaders, call by call.

    A landing place comes from the routing: the partner of a slot, or for gather the address of a
    slot that has a partner; router_topk gives no home there, as its twin and tests say. A place to
    be brought to is the second address of a pair that expert_tiles made, as its twin says.
    """
    texts = {path.name: path.read_text() for path in SHADERS.rglob("*.comp")}
    texts |= {path.name: path.read_text() for path in SHADERS.rglob("*.glsl")}
    code = {name: re.sub(r"//.*", "", text) for name, text in texts.items()}
    writable = [name for name, text in code.items()
                if re.search(r"layout\(buffer_reference[^)]*\) (?!readonly)", text)]  # fmt: skip
    assert sorted(writable) == ["kv_types.glsl", "store.glsl"]
    calls = {name: set(re.findall(r"(?<!void )store_words?4?\((.*?),", text))
             for name, text in code.items() if name != "store.glsl"}  # fmt: skip
    assert {name: found for name, found in calls.items() if found} == {
        "copy_span.glsl": {"address_add(target"},
        "recurrent.glsl": {"kept"},
        "weight_row.glsl": {"address_add(row.landing"},
    }
    kept = {name: re.findall(r"(?<!void )store_kept\((\w+)", text) for name, text in code.items()}
    assert {name: found for name, found in kept.items() if found} == {
        "delta_inputs.comp": ["ring_place"],
        "delta_step.comp": ["address_add"],
    }
    assert "store_kept(address_add(state_row(" in code["delta_step.comp"]
    makers = [name for name, text in code.items() if re.search(r"\bWeightRow\(", text)]
    assert makers == ["weight_row.glsl"]
    landings = {name: re.findall(r"(?<!WeightRow )weight_row\((?:.* : )?\w+, (.*)\);", text)
                for name, text in code.items()}  # fmt: skip
    assert {name: found for name, found in landings.items() if found} == {
        "expert_gate_up.comp": ["landing_of(slot, n_slots)"],
        "expert_down.comp": ["landing_of(slot, n_slots)"],
    }
    assert sum(text.count(" weight_row(") for text in code.values()) == 4, "2 definitions, 2 calls"
    biases = {name: re.findall(r"(?<!float )span_bias\((.*), \w*bias\w*, row\)", text)
              for name, text in code.items()}  # fmt: skip
    assert {name: found for name, found in biases.items() if found} == {
        "expert_gate_up.comp": ["expert_span"],
        "expert_down.comp": ["slot_span(s)"],
        "expert_matmul.comp": ["expert_span"],
    }
    copies = {name: re.findall(r"if (.*) (copy_span\(.*\));", text) for name, text in code.items()}
    assert {name: found for name, found in copies.items() if found} == {
        "gather.comp": [("(!is_null(home))", "copy_span(home, landing, n_units)")],
        "bring_experts.comp": [("(!is_null(way.xy))", "copy_span(home, place, n_units)")],
    }
    assert "uvec2 partner = routed_partner(slot, n_slots)" in code["gather.comp"]
    assert "uvec2 home = lands ? partner : uvec2(0u);" in code["gather.comp"]
    assert "place = address_add(way.zw, skipped_units * 16u);" in code["bring_experts.comp"]
    assert "brought[at] = uvec4(home, place);" in code["expert_tiles.comp"]


@pytest.mark.parametrize("name", [n for n in NAMES if family(n) in EXPERT_FAMILIES])
def test_a_kernel_that_keeps_computes_the_same_bits(name: str) -> None:
    """The same float operations in the same order, and no product that a driver may contract.

    A product and a sum can become one rounding instead of two; drivers choose so module by module.
    """
    keep = name.replace(".", "_keep.", 1)
    assert module(keep).float_operations == module(name).float_operations
    for made in (module(name), module(keep)):
        products = {words[1] for words in made.of(F_MUL, VECTOR_TIMES_SCALAR, DOT)}
        exact = {words[0] for words in made.of(DECORATE) if words[1] == NO_CONTRACTION}
        assert products and products <= exact
