"""The chat, in Debian's Chromium: what is typed is answered, and what was said stays."""

from __future__ import annotations

import re
import threading

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.conftest import Served, serving
from tests.server.page.conftest import is_done, opened, scripted, send
from vkmoe.config import EngineConfig
from vkmoe.llm import LLM

SETTINGS = {"temperature": 0, "seed": 5, "max_tokens": 24}


def keep(page: Page, name: str, value: object) -> None:
    """Put settings where the page keeps them, and load it again."""
    page.evaluate(
        "([name, value]) => localStorage.setItem(name, JSON.stringify(value))",
        [f"vkmoe.{name}", value],
    )
    page.reload()
    page.wait_for_selector("#state[data-state=ready]")


def test_a_reply_streams_into_the_page_with_its_figures(page: Page, server: Served) -> None:
    keep(page, "settings", SETTINGS)
    send(page, "Once upon a time")
    is_done(page, 2)
    body = {"messages": [{"role": "user", "content": "Once upon a time"}], **SETTINGS}
    wanted = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    shown = page.locator(".assistant .body .prose").inner_text()
    assert shown.split() == wanted.split() and shown
    figures = page.locator(".assistant .figures").inner_text()
    assert re.search(r"tok/s · \d+\.\d\d s to the first token · \d+ tokens", figures)
    assert "of 256 tokens of the context used" in page.locator(".note").inner_text()
    expect(page.locator("[aria-live=polite]").first).to_contain_text("Reply:")


def test_escape_stops_a_reply_and_another_is_a_branch_beside_it(page: Page) -> None:
    keep(page, "settings", {"seed": 1})
    page.evaluate(
        "() => { window.seen = 0; new MutationObserver(() => { const t = document.querySelector("
        "'.assistant .body .prose'); if (t && t.innerText.length > 3) window.seen = 1; })"
        ".observe(document.body, { childList: true, subtree: true, characterData: true }); }"
    )
    send(page, "The little dog")
    page.wait_for_function("() => window.seen === 1")
    page.keyboard.press("Escape")
    is_done(page, 2)
    expect(page.locator(".assistant .figures")).to_contain_text("stopped")
    first = page.locator(".assistant .body .prose").inner_text()
    scripted(page, {"content": "Another one."})
    page.get_by_label("Write another reply").click()
    is_done(page, 2)
    expect(page.locator(".assistant .body .prose")).to_have_text("Another one.")
    expect(page.locator(".assistant .count")).to_have_text("2 / 2")
    page.get_by_label("Show the version before").click()
    assert page.locator(".assistant .body .prose").inner_text() == first


def test_an_edited_message_is_sent_in_the_place_of_the_old_one(page: Page) -> None:
    asked = scripted(page, {"content": "Fine."})
    for n, text in enumerate(("first", "second"), start=1):
        send(page, text)
        is_done(page, 2 * n)
    message = page.locator(".message.user").first
    message.hover()
    message.get_by_label("Edit and send anew").click()
    page.get_by_label("Edit your message").fill("changed")
    page.keyboard.press("Control+Enter")
    is_done(page, 2)
    assert [each["content"] for each in asked[-1]["messages"]] == ["changed"]
    page.get_by_label("Show the version before").click()
    expect(page.locator(".message.user")).to_have_count(2)


def test_conversations_stay_in_the_browser_and_can_be_deleted(page: Page) -> None:
    scripted(page, {"reasoning_content": "Hm."}, {"content": "Kept *here*."})
    send(page, "A title")
    is_done(page, 2)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    page.get_by_role("button", name="A title", exact=True).click()
    expect(page.locator(".assistant .body em")).to_have_text("here")
    thoughts = page.locator(".assistant .thoughts")
    expect(thoughts.locator(".prose")).not_to_be_visible()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".prose")).to_have_text("Hm.")
    page.get_by_label("Delete the conversation A title").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("button", name="A title", exact=True)).to_be_visible()


def test_a_conversation_deleted_during_its_reply_stays_deleted(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    send(page, "Gone")
    page.get_by_label("Delete the conversation Gone").click()
    expect(page.locator(".send.stop")).to_have_count(0)
    listed = page.get_by_role("button", name="Gone", exact=True)
    expect(listed).to_have_count(0)
    page.reload()
    page.wait_for_selector("#state[data-state=ready]")
    expect(listed).to_have_count(0)


def test_lists_tasks_and_columns_are_as_they_were_written(page: Page) -> None:
    scripted(page, {"content": "3. third\n\n- [x] done\n\n|a|\n|-:|\n|b|"})
    send(page, "List")
    is_done(page, 2)
    prose = page.locator(".assistant .body .prose")
    expect(prose.locator("ol")).to_have_attribute("start", "3")
    expect(prose.locator("input[type=checkbox]")).to_be_checked()
    expect(prose.locator("td")).to_have_attribute("align", "right")


def test_settings_go_along_with_each_request(page: Page) -> None:
    asked = scripted(page, {"content": "Yes."})
    page.get_by_label("Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Repeat penalty").fill("1.1")
    page.get_by_label("Top-p").fill("7")  # which is none, and is not taken
    page.get_by_role("button", name="Done").click()
    page.keyboard.press("Escape")
    send(page, "Now?")
    is_done(page, 2)
    assert asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert asked[0]["temperature"] == 0.25 and "top_p" not in asked[0]
    assert asked[0]["repeat_penalty"] == 1.1


def test_a_long_reply_is_drawn_once_a_frame_and_leaves_other_messages_alone(page: Page) -> None:
    text = "".join(f"Paragraph {n} has some *words*.\n\n" for n in range(300))
    scripted(page, *({"content": text[n : n + 8]} for n in range(0, len(text), 8)))
    send(page, "first")
    is_done(page, 2)
    page.evaluate(
        "() => { window.touched = 0; new MutationObserver(() => window.touched++)"
        ".observe(document.querySelector('.assistant .body'),"
        " { childList: true, subtree: true, characterData: true });"
        " window.frames = 0; const count = () => { window.frames++;"
        " requestAnimationFrame(count); }; requestAnimationFrame(count);"
        " window.drawn = 0; new MutationObserver(() => window.drawn++).observe("
        "document.querySelector('.thread'), { childList: true, subtree: true }); }"
    )
    send(page, "second")
    is_done(page, 4)
    assert page.evaluate("window.touched") == 0
    # Besides frames: one for the beginning, and one for the end.
    assert page.evaluate("window.drawn <= window.frames + 3")
    expect(page.locator(".assistant .block")).to_have_count(600)
    at_end = "() => { const s = document.querySelector('.scroller');"
    at_end += " return s.scrollHeight - s.scrollTop - s.clientHeight < 2; }"
    page.wait_for_function(at_end)


def test_a_key_is_asked_for_and_goes_along(browser: Browser) -> None:
    with serving(api_keys=("secret",)) as served:
        served.client.headers["X-Api-Key"] = "secret"
        served.wait("/v1/models")
        with opened(browser, served.address, wait=False) as page:
            page.get_by_role("textbox", name="API key").fill("wrong")
            page.keyboard.press("Enter")
            expect(page.get_by_text("That key was not taken")).to_be_visible()
            page.get_by_role("textbox", name="API key").fill("secret")
            page.keyboard.press("Enter")
            page.wait_for_selector("#state[data-state=ready]")
            assert page.evaluate("() => Object.values(localStorage).join().includes('secret')") is (
                False
            )


def test_a_message_waits_for_a_model_that_is_still_loading(browser: Browser) -> None:
    may_load = threading.Event()

    def load() -> LLM:
        assert may_load.wait(60)
        return LLM(None, EngineConfig(ctx_size=256))

    try:
        with serving(load) as served, opened(browser, served.address, wait=False) as page:
            page.evaluate("localStorage.setItem('vkmoe.settings', '{\"max_tokens\": 4}')")
            page.reload()
            page.wait_for_selector("#state[data-state=loading]")
            expect(page.locator("#banner")).to_contain_text("Loading model")
            send(page, "Hello")
            expect(page.locator(".trouble")).to_contain_text("still loading")
            may_load.set()
            is_done(page, 2)
            expect(page.locator("#banner")).not_to_be_visible()
    finally:
        may_load.set()


def test_errors_say_what_to_try(page: Page) -> None:
    send(page, "word " * 400)
    expect(page.locator(".trouble")).to_contain_text("too long for the model's context")
    expect(page.locator(".trouble")).to_contain_text("Begin a new conversation")
    scripted(page, {"content": "Half of"}, error="the device was lost")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".trouble")).to_have_count(0)
    send(page, "Hello")
    expect(page.locator(".trouble")).to_contain_text("The device was lost")
    expect(page.locator(".assistant .body .prose")).to_have_text("Half of")
    expect(page.locator(".assistant .figures")).to_contain_text("broken off")
    page.unroute("**/v1/chat/completions")
    scripted(page, {"content": "A whole one"})
    page.get_by_role("button", name="Try again").click()
    is_done(page, 2)
    expect(page.locator(".assistant .body .prose")).to_have_text("A whole one")
    expect(page.locator(".trouble")).to_have_count(0)


def test_a_server_that_is_gone_is_looked_for(browser: Browser) -> None:
    with serving() as served:
        served.wait()
        with opened(browser, served.address, faults=False) as page:
            page.evaluate("localStorage.setItem('vkmoe.settings', '{\"max_tokens\": 4}')")
            page.reload()
            page.wait_for_selector("#state[data-state=ready]")
            page.context.set_offline(True)
            send(page, "Hello")
            expect(page.locator(".trouble")).to_contain_text("connection to the server was lost")
            expect(page.locator("#banner")).to_contain_text("cannot be reached")
            page.context.set_offline(False)
            is_done(page, 2)  # the message is sent again, as nothing had come of its reply


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.sample(1)
def test_no_part_is_wider_than_the_window_and_keys_reach_all(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    scripted(page, {"content": f"```\n{'long ' * 100}\n```\n\n{'x' * 400}\n\n|a|b|\n|-|-|\n|c|d|"})
    send(page, "y" * 300)
    is_done(page, 2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('.thread').scrollWidth") <= width
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(document.activeElement.getAttribute('aria-label') ||"
                " document.activeElement.innerText).trim()"
            )
        )
    wanted = {"Settings", "Copy this text", "Write another reply", "Message", "Copy"}
    assert wanted <= reached
    assert "" not in reached - {page.evaluate("document.body.innerText.trim()")}
