"""Participation patterns, all of them: what a worst case is searched in."""

from __future__ import annotations

from collections.abc import Iterator


def patterns(n: int, b: int, k: int) -> Iterator[tuple[int, ...]]:
    """Every non-empty set of at most k of n steps that are at least b apart."""
    stack: list[tuple[int, ...]] = [(t,) for t in range(n)]
    while stack:
        p = stack.pop()
        yield p
        if len(p) < k:
            stack.extend((*p, t) for t in range(p[-1] + b, n))
