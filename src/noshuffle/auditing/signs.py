"""The worst directions of one pattern: max Σ_ij X_ij ⟨u_i, u_j⟩ over vectors of norm at most one.

Where X ≥ 0 all u_i are equal, and the answer is the sum of the entries. Where entries differ in
sign it is a semidefinite program (that of a maximum cut), solved here from both sides:

    below   any unit vectors are an attack; coordinate ascent u_i ← Σ_{j≠i} X_ij u_j, normalised
            (Wang, Chang & Kolter, arXiv 1706.00476)
    above   X ⪯ diag(y) ⇒ the answer is at most Σ y_i; from the ascent
            y_i = X_ii + ‖Σ_{j≠i} X_ij u_j‖, raised by the largest eigenvalue that is left

so both ends are proved, and they meet to about 10⁻⁶.

>>> X = np.array([[1.0, -0.5, 0.2], [-0.5, 1.0, 0.1], [0.2, 0.1, 1.0]])
>>> low, high = directions(X)
>>> bool(high - low < 1e-5), round(low, 3), round(float(abs(X).sum()), 3)
(True, 4.2, 4.6)
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.auditing.emitted import Array

#: Rounds over all directions, at most.
_SWEEPS = 200


def directions(X: Array) -> tuple[float, float]:
    """(an attack's value, a proved upper bound); equal where no entry is negative."""
    total, most = float(X.sum()), float(np.abs(X).sum())
    if total >= most * (1 - 1e-12):
        return total, most
    k = len(X)
    rank = math.isqrt(2 * k) + 1
    u = np.random.default_rng(k).standard_normal((k, rank))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    off = X - np.diag(np.diag(X))
    for _ in range(_SWEEPS):
        before = u.copy()
        for i in range(k):
            pull = off[i] @ u
            size = float(np.linalg.norm(pull))
            if size > 0:
                u[i] = pull / size
        if np.abs(u - before).max() < 1e-9:
            break
    low = float(np.einsum("ij,ir,jr->", X, u, u))
    y = np.diag(X) + np.linalg.norm(off @ u, axis=1)
    excess = float(np.linalg.eigvalsh(X - np.diag(y))[-1])
    high = float(y.sum()) + k * max(excess, 0.0)
    return max(low, total), max(min(high, most), low, total)
