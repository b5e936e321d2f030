"""A reply may hold anything: nothing of it runs, and the browser asks no other server for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.conftest import Served
from tests.server.page.conftest import is_done, opened, scripted, send

HOSTILE = """\
<script>window.hit = 1</script>
<img src=x onerror="window.hit = 2">

<svg onload="window.hit = 3"></svg><iframe srcdoc="<script>parent.hit = 4</script>"></iframe>

<style>body { background: url(http://evil.example/style) }</style>

![picture](http://evil.example/picture.png)
[run](javascript:window.hit=5) [data](data:text/html,<script>parent.hit=6</script>)
[aside](/page/icon.svg) [safe](https://elsewhere.example/)
[ref]: javascript:window.hit=7

[ref] <a href="javascript:window.hit=8" onmouseover="window.hit=9">over</a>

<form action="http://evil.example/"><button>send</button></form>
<details open ontoggle="window.hit = 10">x</details>
<math><mtext><table><mglyph><style><img src=x onerror="window.hit=11">
"""


@pytest.fixture
def watched(browser: Browser, server: Served) -> Iterator[Page]:
    """A page in which the policy may object: that is what these tests provoke."""
    with opened(browser, server.address, faults=False) as found:
        yield found


def test_a_hostile_reply_does_nothing(page: Page) -> None:
    scripted(page, {"reasoning_content": HOSTILE}, {"content": HOSTILE})
    send(page, HOSTILE)
    is_done(page, 2)
    prose = page.locator(".assistant .body .prose")
    expect(prose.get_by_role("link", name="safe")).to_have_attribute(
        "href", "https://elsewhere.example/"
    )
    safe = prose.locator("a")
    assert {link.get_attribute("href") for link in safe.all()} <= {
        "https://elsewhere.example/",
        "http://evil.example/picture.png",  # as a link, which the user may open or not
    }
    assert all("noopener" in str(link.get_attribute("rel")) for link in safe.all())
    harmful = "script, img, svg:not(.icon), iframe, style, form, object, [onerror], [onload]"
    assert page.locator(".thread").locator(harmful).count() == 0
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None


def test_a_text_nested_too_deeply_is_shown_as_it_is(page: Page) -> None:
    scripted(page, {"content": ">" * 20_000 + " deep"})
    send(page, "Quote")
    is_done(page, 2)
    expect(page.locator(".assistant .body .prose")).to_contain_text("deep")


@pytest.mark.parametrize(
    "html",
    [
        "<img src=x onerror='window.hit=1'>",
        "<svg><script>window.hit=1</script></svg>",
        "<a href='javascript:window.hit=1'>x</a>",
        "<a href='java\nscript:window.hit=1'>x</a>",
        "<p style='background:url(http://evil.example/)' onclick='window.hit=1'>x</p>",
        "<form id=body><input name=attributes></form>",
        "<input type=image src=http://evil.example/ formaction=javascript:x>",
        "<table background=http://evil.example/><tr><td>x</table>",
    ],
)
@pytest.mark.sample(3)
def test_what_markdown_would_let_through_is_taken_away(watched: Page, html: str) -> None:
    """The second line of defence alone, as if marked had passed HTML on."""
    found = watched.evaluate(
        """async (html) => {
            const { sanitised } = await import("/page/js/markdown.js");
            const box = document.createElement("div");
            box.append(sanitised(html));
            document.body.append(box);
            const all = [...box.querySelectorAll("*")];
            return all.flatMap((e) => [e.tagName, ...e.getAttributeNames()]);
        }""",
        html,
    )
    assert not {"IMG", "SVG", "SCRIPT", "FORM", "INPUT"} & set(found)
    assert not {name for name in found if name.startswith("on")} | ({"style", "src"} & set(found))
    assert "background" not in found and "href" not in found
    assert watched.evaluate("window.hit") is None


def test_the_policy_stops_what_might_still_get_in(watched: Page) -> None:
    """The third line: scripts, pictures and requests put into the page from within."""
    blocked = watched.evaluate(
        """async () => {
            const found = [];
            document.addEventListener("securitypolicyviolation", (e) =>
                found.push(e.effectiveDirective));
            const box = document.createElement("div");
            document.body.append(box);
            box.innerHTML = "<img src='data:,' onerror='window.hit = 1'>";
            await new Promise((done) => setTimeout(done, 200));
            return found;
        }"""
    )
    assert any(each.startswith("script-src") for each in blocked)
    assert watched.evaluate("window.hit") is None
