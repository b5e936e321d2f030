"""How a conversation becomes a prompt, where a request or the server does not say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Served, serving
from vkmoe.config import EngineConfig
from vkmoe.llm import LLM

THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}{# until </think> #}"
)
SILENT = THINKS.replace("<think>", "")
HI = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "Well,"}


def served(template: str, **settings: Any) -> Any:
    config = EngineConfig(ctx_size=256)
    return serving(lambda: LLM(None, config, chat_template=template), settings=settings)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(SILENT) as found:
        found.wait()
        yield found


def prompt(server: Served, messages: list[dict[str, Any]], **more: Any) -> str:
    answer = server.post("/apply-template", {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt"])


def test_a_reply_goes_on_with_a_last_message_of_the_assistant(server: Served) -> None:
    assert prompt(server, [HI, BEGUN]) == "[user]Hi[assistant]Well,"
    assert prompt(server, [HI, BEGUN], add_generation_prompt=True).endswith("Well,[assistant]")
    parts = [{"type": "text", "text": "We"}, {"type": "text", "text": "ll"}]
    assert prompt(server, [HI, {**BEGUN, "content": parts}]).endswith("[assistant]We\nll")
    twice = server.post("/apply-template", {"messages": [HI, BEGUN, BEGUN]})
    assert twice.status_code == 400 and "last two messages" in twice.text
    with served(SILENT, prefill_assistant=False) as other:
        other.wait()
        assert prompt(other, [HI, BEGUN]).endswith("Well,[assistant]")


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [(THINKS, "<think>", "<think></think>"), (SILENT, "", "<think></think>")],
    ids=["opened", "not opened"],
)
def test_a_model_that_is_not_to_think_gets_an_empty_thought(
    template: str, on: str, off: str
) -> None:
    """Where its template has no way to say so; a request comes before the server."""
    with served(template, reasoning="off") as found:
        found.wait()
        assert prompt(found, [HI]) == f"[user]Hi[assistant]{off}"
        think = {"chat_template_kwargs": {"enable_thinking": True}}
        assert prompt(found, [HI], **think) == f"[user]Hi[assistant]{on}"
        assert prompt(found, [HI], reasoning_effort="high") == f"[user]Hi[assistant]{on}"


def test_a_template_that_turns_thoughts_off_itself_is_left_alone() -> None:
    template = SILENT + "{% if not enable_thinking %}<think>\n</think>{% endif %}"
    with served(template, reasoning="off") as found:
        found.wait()
        assert prompt(found, [HI]) == "[user]Hi[assistant]<think>\n</think>"


def test_prompts_are_shown_if_that_is_asked_for(server: Served) -> None:
    body = {"messages": [HI], "max_tokens": 2}
    whole = server.post("/v1/chat/completions", {**body, "verbose": True}).json()
    assert whole["__verbose"]["prompt"] == "[user]Hi[assistant]"
    assert "__verbose" not in server.post("/v1/chat/completions", body).json()


def test_thoughts_may_stay_in_the_text() -> None:
    body = {"messages": [HI], "max_tokens": 6, "temperature": 0}
    found = []
    for kind in ("auto", "none"):
        with served(THINKS, reasoning_format=kind) as server:
            server.wait()
            found.append(server.post("/v1/chat/completions", body).json()["choices"][0]["message"])
    apart, within = found
    assert apart["reasoning_content"] and not apart["content"]
    assert "reasoning_content" not in within
    assert within["content"].strip() == apart["reasoning_content"].strip()
