"""The map of experts in a browser: it moves with the text, explains itself, and changes things."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.conftest import Served
from tests.server.page.conftest import opened, warmed

pytestmark = pytest.mark.usefixtures("one_device")

ASKED = {"prompt": "def main():", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
PIXELS = "document.querySelector('.x-canvas').toDataURL()"
N_SLOTS = 12


@pytest.fixture(scope="module")
def cached() -> Iterator[Served]:
    with warmed(device="llvmpipe", expert_mode="cache", expert_slots=N_SLOTS) as served:
        yield served


@pytest.fixture
def shown(browser: Browser, cached: Served) -> Iterator[Page]:
    with opened(browser, cached.address) as page:
        expect(page.locator(".x-state")).to_have_text("live")
        yield page


def generating(served: Served, texts: list[str]) -> threading.Thread:
    def generate() -> None:
        texts.append(served.post("/v1/completions", ASKED).json()["choices"][0]["text"])

    thread = threading.Thread(target=generate)
    thread.start()
    return thread


@pytest.mark.full
def test_the_map_moves_while_a_text_is_generated_and_rests_after_it(
    shown: Page, cached: Served
) -> None:
    before = shown.evaluate(PIXELS)
    thread = generating(cached, [])
    shown.wait_for_function(f"before => {PIXELS} !== before", arg=before)
    thread.join()
    expect(shown.locator(".x-chart .x-value").first).to_contain_text("%")
    expect(shown.locator(".x-sentence")).to_contain_text("of a token's")
    # Flashes fade within a second; then neither a frame is asked for, nor a pixel changed.
    shown.wait_for_timeout(1_500)
    shown.evaluate(
        "() => { const ask = requestAnimationFrame; window.frames_asked = 0;"
        " window.requestAnimationFrame = (f) => (window.frames_asked++, ask(f)); }"
    )
    at_rest = shown.evaluate(PIXELS)
    shown.wait_for_timeout(600)
    assert shown.evaluate(PIXELS) == at_rest and shown.evaluate("window.frames_asked") == 0
    places = "".join(cached.client.get("/experts").json()["places"])
    for letter, name in (("d", "device"), ("h", "host")):
        wanted = f"{places.count(letter)} {name}"
        expect(shown.locator(".x-summary .x-legend")).to_contain_text(wanted)


def test_a_pointer_over_an_expert_explains_it(shown: Page, cached: Served) -> None:
    now = cached.client.get("/experts").json()
    box = shown.locator(".x-canvas").bounding_box()
    assert box is not None
    xy = shown.evaluate(
        "async ([layers, experts, width]) => {"
        " const { layOut, cellAt } = await import('/page/js/experts/grid.js');"
        " const cell = cellAt(layOut(layers, experts, width, 1), 2, 5);"
        " return [cell.x + cell.w / 2, cell.y + cell.h / 2]; }",
        [len(now["layers"]), now["n_experts"], int(box["width"])],
    )
    shown.mouse.move(box["x"] + xy[0], box["y"] + xy[1])
    tip = shown.locator(".x-tip")
    expect(tip).to_contain_text(f"Layer {now['layers'][2]}, expert 5")
    where = {"d": "On the device", "h": "In host memory"}[now["places"][2][5]]
    expect(tip).to_contain_text(where)
    expect(tip).to_contain_text("Click to pin it")
    shown.mouse.move(5, 5)
    expect(tip).to_be_hidden()


def test_the_keyboard_pins_an_expert_and_a_button_unpins_it(shown: Page, cached: Served) -> None:
    shown.locator(".x-canvas").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        shown.keyboard.press(key)
    pinned = shown.get_by_role("button", name="Unpin expert 2 of layer 1")
    expect(pinned).to_be_visible()
    expect(shown.locator(".x-tip")).to_contain_text("Pinned")
    assert 2 in cached.client.get("/experts").json()["pinned"][1]
    pinned.click()
    expect(pinned).to_have_count(0)
    assert cached.client.get("/experts").json()["pinned"][1] == []


@pytest.mark.full
def test_slots_and_policy_changed_while_a_text_streams_leave_it_as_it_is(
    shown: Page, cached: Served
) -> None:
    wanted: list[str] = []
    generating(cached, wanted).join()
    texts: list[str] = []
    thread = generating(cached, texts)
    slots = shown.get_by_label("Number of slots of each layer")
    slots.fill("8")
    slots.press("Enter")
    expect(shown.get_by_label("Slots of each layer", exact=True)).to_have_value("8")
    shown.get_by_label("Policy", exact=True).select_option("lru")
    thread.join()
    assert texts == wanted
    now = cached.client.get("/experts").json()
    assert set(now["slots"]) == {8} and now["policy"] == "lru"
    shown.get_by_label("Slots of each layer", exact=True).press("End")
    expect(slots).to_have_value(str(N_SLOTS))
    shown.wait_for_function(
        "async (n) => (await (await fetch('/experts')).json()).slots[0] === n", arg=N_SLOTS
    )


def test_a_refused_change_is_shown_with_its_reason(browser: Browser, cached: Served) -> None:
    with opened(browser, cached.address, faults=False) as page:
        slots = page.get_by_label("Number of slots of each layer")
        slots.fill("99")
        slots.press("Enter")
        expect(page.locator(".x-message.is-error")).to_contain_text("a layer can have")
        expect(slots).to_have_value(str(N_SLOTS))


def test_where_nothing_can_be_changed_the_panel_says_why(page: Page) -> None:
    expect(page.locator(".x-refusal")).to_contain_text("the CPU reads all experts")
    expect(page.locator(".x-fields")).to_be_hidden()


def test_a_dense_model_has_no_map_and_a_broken_stream_comes_back(
    browser: Browser, cached: Served
) -> None:
    dense: dict[str, Any] = {**cached.client.get("/experts").json(), "model": "dense"}
    dense |= {"reason": "the model has no experts: every token uses all of it"}
    dense |= {"layers": [], "n_experts": 0, "n_used": 0, "places": [], "heat": [], "pinned": []}
    with opened(browser, cached.address, faults=False) as page:
        body = f"event: snapshot\ndata: {json.dumps(dense)}\n\n"
        page.route(
            "**/experts/stream*",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        page.reload()
        expect(page.locator(".x-note")).to_contain_text("The model has no experts")
        expect(page.locator(".x-map")).to_be_hidden()
        expect(page.locator(".x-state")).to_have_text("reconnecting")
        page.unroute("**/experts/stream*")
        expect(page.locator(".x-state")).to_have_text("live")
        expect(page.locator(".x-map")).to_be_visible()


def test_a_snapshot_with_deltas_over_it_is_the_next_snapshot(shown: Page) -> None:
    found = shown.evaluate(
        "async () => {"
        " const { begin, putOver } = await import('/page/js/experts/state.js');"
        " const rest = { layers: [0, 1], n_experts: 2, slots: [1, 1], policy: 'lru' };"
        " const first = { ...rest, places: ['dh', 'hd'], heat: ['AAA=', '/wA='],"
        "   pinned: [[], [1]] };"
        " const next = { ...rest, places: ['hd', 'hd'], heat: ['AP8=', '/wA='],"
        "   pinned: [[0], []], slots: [2, 2] };"
        " const state = begin(first);"
        " const { flashes } = putOver(state, { moves: [[0, 0, 'h', 'evicted for 1'],"
        "   [0, 1, 'd', 'missed']], uses: [[0, 1, 0]], heat: next.heat, pinned: next.pinned,"
        "   slots: next.slots }, 7);"
        " const wanted = begin(next);"
        " const plain = (s) => JSON.stringify([s.info, [...s.places], [...s.heat],"
        "   [...s.pinned]]);"
        " return [plain(state), plain(wanted), flashes.map((f) => f.kind), state.moves.get(0)]; }"
    )
    assert found[0] == found[1]
    assert found[2] == ["miss", "out", "in"]
    assert found[3] == {"place": "h", "why": "evicted for 1", "at": 7}


@pytest.mark.parametrize("shape", [(4, 8), (16, 64), (94, 256)])
@pytest.mark.parametrize("width", [340, 540])
@pytest.mark.sample(2)
def test_cells_fill_the_map_at_every_size(shown: Page, shape: tuple[int, int], width: int) -> None:
    """Every cell is found again at its middle, none covers another, and the map is never high."""
    found = shown.evaluate(
        "async ([layers, experts, width]) => {"
        " const { layOut, cellAt, cellUnder } = await import('/page/js/experts/grid.js');"
        " const grid = layOut(layers, experts, width, 2);"
        " let wrong = 0;"
        " for (let l = 0; l < layers; l++) for (let e = 0; e < experts; e++) {"
        "   const { x, y, w, h } = cellAt(grid, l, e);"
        "   const under = cellUnder(grid, (x + w / 2) / 2, (y + h / 2) / 2);"
        "   wrong += under?.layer !== l || under?.expert !== e;"
        "   wrong += x + w > grid.xs[e + 1] || y + h > grid.ys[l + 1];"
        " }"
        " return [wrong, grid.xs[experts] / 2, grid.height]; }",
        [*shape, width],
    )
    assert found[0] == 0 and found[1] <= width and found[2] <= 360
