"""docs/help.md says what the command line says."""

from __future__ import annotations

from pathlib import Path

from tools.make_help import page

ROOT = Path(__file__).resolve().parent.parent.parent


def test_help_page_is_current() -> None:
    """After a change of options, run tools/make_help.py."""
    assert (ROOT / "docs" / "help.md").read_text() == page()


def test_every_command_and_option_is_on_the_page() -> None:
    """The page would be current and useless if it were empty."""
    text = page()
    for part in ("## vkmoe generate", "## vkmoe chat", "`--temp NUMBER`", "`VKMOE_CTX_SIZE`"):
        assert part in text
