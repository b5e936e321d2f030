"""How many bytes may be copied in the background while a token runs.

Misses are read over the same link, and a token waits for them but not for copies. The rule: at most
a quarter of what the link can copy in the time of a token, and at most what the expected misses
leave of it; but at least one expert, or a slow link would never let anything in. Source: the
project's collection of figures from real GPUs, part C ("Prefetch/promotion budget"). It adds that
reads in place must not become more than 15 % slower while copies run.
"""

from __future__ import annotations

from math import inf

from vkmoe.gpu.link_speed import LinkSpeed

__all__ = ["CopyBudget", "background_bytes"]

COPY_SHARE = 0.25
NEW_WEIGHT = 1 / 8  # of the last token in the running means


def background_bytes(
    link: LinkSpeed | None, token_s: float, missed_bytes: float, largest_bytes: int
) -> float:
    """Bytes that may be copied during a token of `token_s` seconds that misses `missed_bytes`.

    `largest_bytes` is the largest expert's size. Infinite without a link.
    """
    if link is None:
        return inf
    left_s = token_s - missed_bytes / link.read_bytes_per_second
    return max(min(COPY_SHARE * token_s, left_s) * link.copy_bytes_per_second, largest_bytes)


class CopyBudget:
    """The budget by the tokens so far: running means of their time and of what they missed."""

    def __init__(self, link: LinkSpeed | None, largest_bytes: int) -> None:
        self._link, self._largest_bytes = link, largest_bytes
        self._token_s = self._missed_bytes = 0.0
        self._weight = 1.0  # of the next token; the first counts whole

    def token(self, seconds: float, missed_bytes: int) -> None:
        """A token took so long, from its submit to its end, and missed so much."""
        self._token_s += self._weight * (seconds - self._token_s)
        self._missed_bytes += self._weight * (missed_bytes - self._missed_bytes)
        self._weight = NEW_WEIGHT

    @property
    def n_bytes(self) -> float:
        """Bytes that may be copied during the next token; one expert before the first."""
        return background_bytes(self._link, self._token_s, self._missed_bytes, self._largest_bytes)
