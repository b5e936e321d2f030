"""docs/python.md says what the docstrings of the public classes say."""

from __future__ import annotations

import vkmoe
from tools.make_python_page import NOT_SHOWN, PAGE, page
from vkmoe.llm import LLM


def test_python_page_is_current() -> None:
    """After a change of a signature or docstring, run tools.make_python_page."""
    assert PAGE.read_text() == page()


def test_every_public_name_and_method_is_on_the_page() -> None:
    text = page()
    for name in vkmoe.__all__:
        assert f"`{name}" in text or f"## {name}\n" in text or f"\n{name} = " in text, name
    for name in {*dir(LLM)} - {*NOT_SHOWN}:
        assert name.startswith("_") or f"### `LLM.{name}`" in text, name
    assert "### `Constraints.regex`" in text
    assert "await generate(" in text and "list[GenerationResult]" in text
