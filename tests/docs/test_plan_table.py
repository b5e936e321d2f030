"""The tables of plans in README.md and docs/expert-cache.md are what is planned."""

from __future__ import annotations

import pytest

from tests.needs import need_cpu
from tools.make_plan_table import pages


@pytest.mark.full
def test_the_tables_are_current() -> None:
    """After a change of what is planned or predicted, run tools/make_plan_table.py."""
    need_cpu()
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, path.name
