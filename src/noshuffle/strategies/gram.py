"""How large Σ_{i,j∈π} |X_ij| can get over participation patterns π, from X = CᵀC alone.

One unit that takes part at the steps π with contributions u_i, ‖u_i‖ ≤ 1, moves C·G by

    ‖C u‖² = Σ_{i,j∈π} ⟨u_i, u_j⟩ X_ij  ≤  Σ_{i,j∈π} |X_ij|,

so the largest right-hand side over the patterns bounds S². It is attained, and S² then equals it,
when one sign per step makes all the products positive; `attained` looks for those signs, which
exist whenever the entries are ≥ 0. The worst min-separation pattern is searched for, with a bound
on whatever a partial pattern can still collect (see Choquette-Choo et al., arXiv 2306.08153).

>>> X = np.array([[2.0, -1.0], [-1.0, 2.0]])
>>> attained(X)                                  # contributions (1, −1)
6.0
>>> best_sum(np.array([1.0, 5.0, 4.0, 4.0]), separation=2, most=2)
9.0
"""

from __future__ import annotations

import heapq

import numpy as np

from noshuffle.strategies.recipe import Array

#: Two squared sensitivities closer than this, relatively, are the same number.
ROUNDING = 1e-12
#: Rows of X that are worked on together.
_BLOCK = 128


def attained(gram: Array) -> float:
    """sᵀXs for well-chosen signs s: what some unit does reach, so never above S².

    Signs follow the largest entries (a maximum spanning tree of |X|): if any choice makes every
    term positive, this one does, and the value is Σ|X_ij|.
    """
    k = len(gram)
    if np.all(gram >= 0):
        return float(gram.sum())
    size = np.abs(gram)
    signs = np.zeros(k)
    signs[0] = 1.0
    link, parent = size[0].copy(), np.zeros(k, dtype=int)
    link[0] = -1.0
    for _ in range(k - 1):
        i = int(np.argmax(link))
        signs[i] = signs[parent[i]] * (1.0 if gram[i, parent[i]] >= 0 else -1.0)
        link[i] = -1.0
        closer = (signs == 0) & (size[i] > link)
        link[closer], parent[closer] = size[i][closer], i
    return float(signs @ gram @ signs)


def best_sum(values: Array, *, separation: int, most: int) -> float:
    """max Σ_{i∈π} values_i, values ≥ 0, over at most `most` indices at least `separation` apart."""
    n, b = len(values), min(separation, len(values))
    if most < -(-n // b):
        return float(_best_table(values, separation=b, most=most)[-1])
    best = [0.0] * (n + b)  # the budget never binds: one pass from the end
    for t, value in zip(range(n - 1, -1, -1), values[::-1].tolist()):
        best[t] = max(best[t + 1], value + best[t + b])
    return best[0]


def _best_table(values: Array, *, separation: int, most: int) -> Array:
    """best_sum along the last axis for every budget 0 … most (first axis of the result)."""
    n = values.shape[-1]
    b = min(separation, n)
    best = np.zeros((*values.shape[:-1], b + n))  # best[b + t]: from the indices up to t
    table = [best[..., -1].copy()]
    for _ in range(most):
        np.maximum.accumulate(values + best[..., :n], axis=-1, out=best[..., b:])
        table.append(best[..., -1].copy())
    return np.array(table)


def worst_epoch(gram: Array, *, steps_per_epoch: int) -> tuple[float, Array]:
    """max_j Σ_{l,m} |X_{j+lb, j+mb}| and the Gram matrix of the pattern that attains it."""
    b = steps_per_epoch
    totals = [np.abs(gram[j::b, j::b]).sum() for j in range(min(b, len(gram)))]
    j = int(np.argmax(totals))
    return float(totals[j]), gram[j::b, j::b]


def lag_bound(diagonal: Array, lag_sizes: Array, *, separation: int, most: int) -> float:
    """An upper bound on Σ_{i,j∈π} |X_ij| from the largest entry at every lag.

    Guarantees. lag_sizes[L] ≥ |X_{i,i+L}| for every i. Order a pattern i_1 < … < i_k. Its l-th and
    (l+m)-th steps are at least m·b apart, so their entry is at most the largest of lag_sizes from
    lag mb on, R_m, and there are at most k−m such pairs. The diagonal is a plain sum. Hence

        Σ_{i,j∈π} |X_ij|  ≤  max_π Σ_{i∈π} X_ii + 2 Σ_{m=1}^{k−1} (k−m) R_m.
    """
    beyond = np.maximum.accumulate(lag_sizes[::-1])[::-1]
    total = best_sum(diagonal, separation=separation, most=most)
    for m in range(1, most):
        if m * separation >= len(beyond):
            break
        total += 2.0 * (most - m) * float(beyond[m * separation])
    return total


def lag_sizes(gram: Array) -> Array:
    """max_i |X_{i,i+L}| for every lag L."""
    size = np.abs(gram)
    return np.array([np.diagonal(size, offset=lag).max() for lag in range(len(gram))])


def _ahead(size: Array, *, separation: int, most: int) -> Array:
    """ahead[a, i]: the most that at most a later steps of a pattern can add to row i."""
    n = len(size)
    out = np.zeros((most, n))
    steps = np.arange(n)
    for start in range(0, n, _BLOCK):
        rows = steps[start : start + _BLOCK]
        reach = steps[start + separation :]
        if not len(reach):
            break
        later = np.where(
            reach >= rows[:, None] + separation, size[start : rows[-1] + 1, reach[0] :], 0.0
        )
        out[:, rows] = _best_table(later, separation=separation, most=most - 1)
    return out


def search(
    gram: Array, *, separation: int, most: int, limit: int = 60_000
) -> tuple[float, list[int], bool]:
    """The largest Σ_{i,j∈π} |X_ij| under min-separation: (value, pattern, whether proved).

    Best-first branch and bound. A partial pattern p that may take r more steps collects, from any
    continuation q, f(p) + Σ_{i∈q} (X_ii + 2 Σ_{j∈p} |X_ij| + 2 Σ_{j∈q, j>i} |X_ij|). The last sum
    has at most as many terms as q has later steps, so it is at most `ahead` of row i with that
    budget; what is left is linear in q and solved exactly by a dynamic program.

    Guarantees. The value is never below the maximum. If proved, it is within 1e-12 of the value
    of the pattern that is returned; otherwise the search stopped after `limit` partial patterns
    and the value is the best bound known by then.
    """
    size = np.abs(gram)
    n = len(size)
    b = min(separation, n)
    ahead = _ahead(size, separation=b, most=most)
    best, winner = 0.0, [0]
    heap: list[tuple[int, float, float, list[int]]] = [(0, 0.0, np.inf, [])]
    unit, pushed = 0.0, 0
    while heap:
        _, minus_f, bound, pattern = heapq.heappop(heap)
        if bound <= best * (1 + ROUNDING):
            return max(bound, best), winner, True
        if pushed > limit:
            return max(bound * (1 + ROUNDING), best), winner, False
        r = most - len(pattern)
        first = pattern[-1] + b if pattern else 0
        gained = np.diagonal(size) + 2.0 * size[pattern].sum(axis=0)
        reach = np.zeros(n + b)
        for a in range(r - 1):
            take = gained + 2.0 * ahead[a] + reach[b:]
            reach[:n] = np.maximum.accumulate(take[::-1])[::-1]
        values = gained - minus_f
        bounds = values + 2.0 * ahead[r - 1] + reach[b:]
        if not unit:  # bounds this close are ties, and ties are explored in depth
            unit = float(bounds.max()) * ROUNDING / 4
        for t in range(first, n):
            if values[t] > best:
                best, winner = float(values[t]), [*pattern, t]
            if bounds[t] > best * (1 + ROUNDING):
                rank = -int(bounds[t] / unit)
                heapq.heappush(heap, (rank, -float(values[t]), float(bounds[t]), [*pattern, t]))
                pushed += 1
    return best, winner, True
