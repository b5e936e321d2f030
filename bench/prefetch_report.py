"""What bench/prefetch.py says: the row of each arm, what it is beside its rival, and the verdict.

A name of an arm is a predictor, and after a comma how copies go; its rival goes the same way and
guesses nobody. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.arms import Arms
from bench.cached_arm import CachedArm
from vkmoe.bench.measure import MIN_REPEATS, Row, Summary, resamples
from vkmoe.config import EngineConfig

__all__ = ["BASE", "compare", "found_of", "ratio_of_sums", "rival_of", "row", "verdict"]

BASE = "none"  # nobody guesses, copies overlap tokens
MODES = ("overlapping", "promoting", "waiting")  # the first is not named in an arm
MIB = 1 << 20
ENOUGH_TEXTS = 2  # of three, on which a predictor must read less in place to be the default


def rival_of(arm: str) -> str | None:
    """Of a predictor: no predictor, copies as there. Without one: `BASE`, whose rival is None."""
    predictor, mode = _parts(arm)
    if predictor == BASE:
        return None if arm == BASE else BASE
    return BASE if mode == MODES[0] else f"{BASE}, {mode}"


def _parts(arm: str) -> tuple[str, str]:
    predictor, _, mode = arm.partition(", ")
    return predictor, mode or MODES[0]


def found_of(arm: CachedArm, speeds: Arms) -> dict[str, Any]:
    """What one arm did on one text."""
    counts = arm.counts
    return {
        "hit_rate": counts.hits / counts.uses,
        "read_bytes_per_token": counts.read_bytes / counts.tokens,
        "copied_bytes_per_token": counts.copied_bytes / counts.tokens,
        "moved_bytes_per_token": (counts.read_bytes + counts.copied_bytes) / counts.tokens,
        "copied_per_token": counts.copied / counts.tokens,
        "landed_per_token": counts.landed / counts.tokens,
        "hinted_per_token": counts.hinted / counts.tokens,
        "hints_right": counts.right / counts.hinted if counts.hinted else None,
        "stall_ms_per_token": counts.stall_ns / 1e6 / counts.tokens,
        "values": speeds.values(arm.name),
        "read_bytes_values": [turn.read_bytes for turn in arm.turns],
        "moved_bytes_values": [turn.read_bytes + turn.copied_bytes for turn in arm.turns],
    }


def compare(arms: Mapping[str, dict[str, Any]], speeds: Arms, card: Mapping[str, Any]) -> None:
    """Adds what each arm is beside its rival: bytes read in place, bytes in all, and speed."""
    for name, found in arms.items():
        rival = rival_of(name)
        if rival is not None and rival in arms and len(found["values"]) >= MIN_REPEATS:
            found["rival"] = rival
            found["relative"] = speeds.ratio(name, rival, card)
            for which in ("read_bytes", "moved_bytes"):
                ours, theirs = (arms[one][f"{which}_values"] for one in (name, rival))
                found[f"relative_{which}"] = ratio_of_sums(ours, theirs)


def ratio_of_sums(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Of what was counted in the same turns; the 95 % interval resamples whole turns."""
    above, below = np.array(ours, np.float64), np.array(theirs, np.float64)
    draws = resamples(above.size)
    low, high = np.percentile(above[draws].sum(axis=1) / below[draws].sum(axis=1), (2.5, 97.5))
    return Summary(float(above.sum() / below.sum()), float(low), float(high), above.size)


def row(text: str, arm: str, found: Mapping[str, Any], speeds: Arms) -> Row:
    """The line of one arm on one text."""
    right = f", {100 * found['hints_right']:.0f} % of hints right" if found["hints_right"] else ""
    relative = ""
    if "relative" in found:
        relative = (
            f"; beside {found['rival']}: {found['relative_read_bytes']} x read, "
            f"{found['relative_moved_bytes']} x in all, {found['relative']} x tok/s"
        )
    note = (
        f"{100 * found['hit_rate']:.1f} % hits; per token "
        f"{found['read_bytes_per_token'] / MIB:.2f} MiB read in place, "
        f"{found['copied_bytes_per_token'] / MIB:.2f} copied, "
        f"{found['moved_bytes_per_token'] / MIB:.2f} in all; {found['landed_per_token']:.1f} "
        f"landed, {found['hinted_per_token']:.1f} hinted{right}{relative}"
    )
    return Row(f"{text}: {arm}", speeds.summary(arm), speeds.unit, "host_wall", note)


def verdict(shares: Mapping[str, Any]) -> dict[str, Any]:
    """Of each share and arm, the texts on which it reads, or moves in all, less than its rival.

    Less: the whole interval of the ratio is below 1; of too few turns nothing is said. Prints that
    of the predictors, and for each way of copying whether the default agrees.
    """
    said: dict[str, Any] = {"fewer_bytes_read": {}, "fewer_bytes_in_all": {}, "default_agrees": {}}
    for share, measured in shares.items():
        texts = measured["texts"]
        read, moved = _fewer(texts, "read_bytes"), _fewer(texts, "moved_bytes")
        for arm in read:
            print(
                f"{share}: {arm} reads {_ratios(texts, arm, 'read_bytes')} of the bytes of "
                f"{rival_of(arm)}, surely less on {len(read[arm])} of {len(texts)} texts; moves "
                f"{_ratios(texts, arm, 'moved_bytes')} in all, surely less on {len(moved[arm])}"
            )
        said["fewer_bytes_read"][share], said["fewer_bytes_in_all"][share] = read, moved
        said["default_agrees"][share] = dict(_agreeing(share, read))
    return said


def _ratios(texts: Mapping[str, Any], arm: str, which: str) -> str:
    return " / ".join(f"{arms[arm][f'relative_{which}'].median:.3f}" for arms in texts.values())


def _agreeing(share: str, fewer: Mapping[str, list[str]]) -> Iterator[tuple[str, bool]]:
    """Each way of copying whose predictors were measured, and whether its default is right."""
    for mode in MODES:
        default = EngineConfig().predictor
        names = {arm: _parts(arm) for arm in fewer}
        pays = {
            names[arm][0]: len(texts) >= ENOUGH_TEXTS
            for arm, texts in fewer.items()
            if names[arm][0] != BASE and names[arm][1] == mode
        }
        if pays and default in (BASE, *pays):
            agrees = not any(pays.values()) if default == BASE else pays[default]
            outcome = "is borne out" if agrees else "is NOT borne out"
            print(f"{share}, {mode}: the default, {default}, {outcome}")
            yield mode, agrees


def _fewer(texts: Mapping[str, Any], which: str) -> dict[str, list[str]]:
    """By arm, the texts on which its ratio to its rival is below 1."""
    fewer: dict[str, list[str]] = {}
    for text, arms in texts.items():
        for name, found in arms.items():
            if f"relative_{which}" in found:
                fewer.setdefault(name, [])
                if found[f"relative_{which}"].high < 1:
                    fewer[name].append(text)
    return fewer
