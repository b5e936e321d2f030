"""Merges characters into tokens by score: the plain twin of what the `tokenizers` package does.

Owns the algorithm of Kudo and Richardson's BPE model (arXiv:1808.06226): the best-scored pair of
neighbours first, of equal ones the leftmost. The package takes equal ones in the order of a list,
so vocabularies with equal scores need this one, six times slower. Does not own what ids stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

__all__ = ["merge_by_score"]


def merge_by_score(text: str, ids: Mapping[str, int], costs: Sequence[float]) -> list[str]:
    """`text` cut into tokens and single characters; `costs` [tokens] are the scores, negated."""
    n = len(text)
    ends = list(range(1, n + 1))  # where the symbol that starts here ends, 0 if none starts here
    before = list(range(-1, n - 1))  # where the symbol before it starts
    queue = [
        (costs[token], start, start + 2)
        for start in range(n - 1)
        if (token := ids.get(text[start : start + 2])) is not None
    ]
    heapify(queue)
    while queue:
        _, start, end = heappop(queue)
        middle = ends[start]
        if not 0 < middle < n or ends[middle] != end:
            continue  # one of the two has been merged since
        ends[start], ends[middle] = end, 0
        neighbours = []
        if end < n:
            before[end] = start
            neighbours.append((start, ends[end]))
        if before[start] >= 0:
            neighbours.append((before[start], end))
        for first, last in neighbours:
            token = ids.get(text[first:last])
            if token is not None:
                heappush(queue, (costs[token], first, last))
    symbols, start = [], 0
    while start < n:
        symbols.append(text[start : ends[start]])
        start = ends[start]
    return symbols
