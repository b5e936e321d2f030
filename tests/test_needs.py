"""Tests that miss something are skipped on a user's machine and fail in CI."""

from __future__ import annotations

import pytest
from _pytest.outcomes import Failed, Skipped

from tests.needs import missing


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_ci_must_have_everything(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    with pytest.raises(Failed, match="CI is set, but there is no folder"):
        missing("there is no folder")


@pytest.mark.parametrize("value", [None, ""])
def test_other_machines_may_go_without(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    with pytest.raises(Skipped, match="there is no folder"):
        missing("there is no folder")
