"""What `vkmoe simulate` found out about guessed experts, as lines of a table and as values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vkmoe.experts.study.accuracy import Accuracies
from vkmoe.experts.study.replay import GUESSES, Rung, SimulationResult

__all__ = ["guess_cells", "guess_values", "right_lines"]


def guess_cells(rung: Rung) -> list[str]:
    """Hit rate in % and copies per 100 uses: without admission, then with each predictor."""
    return [_cell(rung.unweighed), *(_cell(rung.guessing[name]) for name in GUESSES)]


def right_lines(right: Accuracies) -> Iterator[str]:
    """How often each predictor is right, by meaning."""
    of_what = {"fused": "of the next token", "stepped": "of the next layer"}
    for meaning, found in right.items():
        shares = [f"{n} {100 * share:.0f} %" for n, share in found.items() if share is not None]
        if shares:
            yield f"{of_what[meaning]} (--executor {meaning}): {', '.join(shares)}"


def guess_values(rung: Rung) -> dict[str, Any]:
    """The same for JSON; bytes per token."""
    return {
        "no_admission": _values(rung.unweighed),
        **{name: _values(rung.guessing[name]) for name in GUESSES},
    }


def _cell(result: SimulationResult) -> str:
    return f"{100 * result.hit_rate:.1f} ({_copied(result):.1f})"


def _copied(result: SimulationResult) -> float:
    return 100 * float(result.n_promoted.sum()) / result.trace.routing.size


def _values(result: SimulationResult) -> dict[str, Any]:
    guesses, n_tokens = result.guesses, result.trace.n_tokens
    return {
        "hit_rate": result.hit_rate,
        "read_bytes_per_token": result.read_bytes,
        "copied_bytes_per_token": result.copied_bytes,
        "n_landed": result.n_landed,
        "n_hinted": guesses.n_hinted,
        "hinted_bytes_per_token": guesses.hinted_bytes / n_tokens,
        "right_share": guesses.n_right / guesses.n_hinted if guesses.n_hinted else None,
    }
