"""Closed forms for BLT: sensitivity and error without ever summing over n steps.

A BLT is given by the gaps 1 − θ_j and 1 − θ̂_j of its interlaced poles, so that poles at
1 − 1e-8 keep all their digits. With G(z, n) = Σ_{i<n} z^i and W(z, n) = Σ_{i<n} (n−i) z^i,

    C(x) = κ + Σ_j r_j / (1 − θ_j x)            c_i c_l-sums become r_j r_l G(θ_j θ_l, ·)
    A(x)/C(x) = Σ_j β_j / (1 − p_j x)           n·rms² = Σ β_j β_l W(p_j p_l, n)

where p runs over 1, the momentum β if there is one, and θ̂. All cost O(k d²) whatever n is, and
O(k² d²) with taps (k participations, blocks of b steps; a block of c is again a sum of d
exponentials). Sums over blocks use the derivations above each function.

Derivatives: every array may carry a tiny imaginary part (complex step), with an extra leading axis
that holds one direction each; nothing here takes an absolute value or compares complex numbers.
numpy's complex log1p and expm1 lose digits near zero, hence the two functions of our own.

>>> gap, hat = np.array([0.1]), np.array([0.3])      # c = 1, 0.2, 0.18, …
>>> float(np.round(sensitivity_squared(gap, hat, steps=3), 6))
1.0724
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: float64, or complex128 while a derivative is taken.
Numbers = NDArray[Any]

_CHUNK = 2048
_ALMOST_MINUS_ONE = -1 + 2.0**-53


def log1p(x: Numbers) -> Numbers:
    """log(1 + x), exact in real part and first order in the imaginary one.

    1 + x stays at 1e-16 or more, so that a power that has died out is a tiny number and not a NaN.
    """
    real = np.maximum(x.real, _ALMOST_MINUS_ONE)
    if not np.iscomplexobj(x):
        return np.asarray(np.log1p(real))
    return np.asarray(np.log1p(real) + 1j * (x.imag / (1 + real)))


def expm1(x: Numbers) -> Numbers:
    """exp(x) − 1, exact in real part and first order in the imaginary one."""
    if not np.iscomplexobj(x):
        return np.asarray(np.expm1(x))
    return np.asarray(np.expm1(x.real) + 1j * (x.imag * np.exp(x.real)))


def geometric(gap: Numbers, n: Any) -> Numbers:
    """G(1 − gap, n) = Σ_{i<n} (1 − gap)^i."""
    safe = np.where(gap == 0, 1.0, gap)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = -expm1(n * log1p(-safe)) / safe
    return np.asarray(np.where(gap == 0, n, value))


def weighted(gap: Numbers, n: Any) -> Numbers:
    """W(1 − gap, n) = Σ_{i<n} (n − i)(1 − gap)^i = (n − zG(z, n)) / (1 − z).

    For small n·gap that difference cancels; there Σ_m (−gap)^m binom(n+1, m+2) takes over.
    """
    n = np.asarray(n, dtype=np.float64)
    is_small = np.abs(n * gap.real) < 0.02
    safe = np.where(is_small, 1.0 / np.maximum(n, 1.0), gap)
    value = (n - (1 - safe) * geometric(safe, n)) / safe
    term = n * (n + 1) / 2 + 0 * gap
    series = term
    for m in range(1, 9):
        term = term * (-gap) * (n - m) / (m + 2)
        series = series + term
    return np.asarray(np.where(is_small, series, value))


def pairs(gap: Numbers) -> Numbers:
    """1 − p_j p_l from the gaps of p."""
    one, other = gap[..., :, None], gap[..., None, :]
    return np.asarray(one + other - one * other)


def residues(poles: Numbers, zeros: Numbers) -> Numbers:
    """r_j of Π(1 − zero x) / Π(1 − pole x) = const + Σ r_j / (1 − pole_j x), all given as gaps."""
    above = np.prod(zeros[..., None, :] - poles[..., :, None], axis=-1)
    between = poles[..., None, :] - poles[..., :, None]
    between = between + np.eye(poles.shape[-1])
    power = poles.shape[-1] - 1 - zeros.shape[-1]
    out = above / np.prod(between, axis=-1)
    return np.asarray(out if power == 0 else out * (1 - poles) ** power)


def encoder_parts(gap: Numbers, hat: Numbers) -> tuple[Numbers, Numbers]:
    """(r, κ) with c_i = κ[i = 0] + Σ r_j θ_j^i."""
    return residues(gap, hat), np.prod((1 - hat) / (1 - gap), axis=-1)


def sensitivity_squared(
    gap: Numbers, hat: Numbers, *, steps: int, participations: int = 1, separation: int = 0
) -> Numbers:
    """‖Σ_{s<k} C_{:, s b}‖²: exact for Epochs and MinSeparation when c is non-increasing, >= 0.

    After the s-th participation, and until the next, the sum of columns at offset i is
    κ[i = 0] + Σ_j w_j θ_j^i with w_j = r_j G(θ_j^b, s+1). The last stretch has n − (k−1)b steps.
    """
    r, constant = encoder_parts(gap, hat)
    pair = pairs(gap)
    k, b = participations, separation
    last = steps - (k - 1) * b
    block_gap = -expm1(b * log1p(-gap))

    def stretch(first: int, end: int, length: int) -> Numbers:
        s = np.arange(first, end, dtype=np.float64)[:, None]
        w = r[..., None, :] * geometric(block_gap[..., None, :], s + 1)
        square = np.sum((w @ geometric(pair, length)) * w, axis=(-1, -2))
        return np.asarray(
            square + 2 * constant * np.sum(w, axis=(-1, -2)) + (end - first) * constant**2
        )

    total = stretch(k - 1, k, last)
    for first in range(0, k - 1, _CHUNK):
        total = total + stretch(first, min(first + _CHUNK, k - 1), b)
    return total


def block_gram(
    gap: Numbers, hat: Numbers, taps: Numbers, *, blocks: int, length: int, offset: int = 0
) -> Numbers:
    """Inner products of the columns that a unit at position `offset` of each epoch touches.

    c in block a at place i is u_a κ[i = 0] + Σ_j v_{a,j} θ_j^i with u = 1/S and v_{a,j} =
    r_j Σ_{l<=a} u_l θ_j^{(a−l) b}. Two columns D blocks apart share Σ_a E[a, a+D], the sum over
    the blocks that are left of both; only the last of them is cut short by the offset. The result
    F[a, a'] is the inner product of the columns that see a+1 and a'+1 blocks.
    """
    r, constant = encoder_parts(gap, hat)
    lead = gap.shape[:-1]
    kind = np.result_type(gap, hat, taps)
    u = np.zeros((*lead, blocks), dtype=kind)
    v = np.zeros((*lead, blocks, gap.shape[-1]), dtype=kind)
    decay = 1 + expm1(length * log1p(-gap))
    u[..., 0] = 1.0
    v[..., 0, :] = 1.0
    for a in range(1, blocks):
        m = min(a, taps.shape[-1])
        u[..., a] = -np.sum(taps[..., :m] * u[..., a - m : a][..., ::-1], axis=-1)
        v[..., a, :] = decay * v[..., a - 1, :] + u[..., a, None]
    v = v * r[..., None, :]
    point = u * constant[..., None]
    total = np.sum(v, axis=-1)

    def shared(size: int) -> Numbers:
        out = v @ geometric(pairs(gap), size) @ np.swapaxes(v, -1, -2)
        out = out + point[..., :, None] * total[..., None, :]
        out = out + total[..., :, None] * point[..., None, :]
        return np.asarray(out + point[..., :, None] * point[..., None, :])

    whole_blocks = shared(length)
    gram = whole_blocks.copy()
    for a in range(1, blocks):
        gram[..., a, 1:] += gram[..., a - 1, :-1]
    if not offset:
        return gram
    cut = shared(length - offset)
    cut[..., 1:, 1:] += gram[..., :-1, :-1]
    return cut


def squared_error(
    gap: Numbers,
    hat: Numbers,
    *,
    steps: int,
    momentum: float = 0.0,
    taps: Numbers | None = None,
    lag: int = 0,
) -> Numbers:
    """rms² of A·C⁻¹ for prefix sums or momentum at a constant learning rate.

    With taps the coefficients are Σ_m s_m b_{i − m lag}; their weighted squares are quadratic in
    s, with b_i b_{i+D} = Σ β_j β_l p_l^D (p_j p_l)^i inside a shorter horizon.
    """
    options: dict[str, Any] = {"steps": steps, "taps": taps, "lag": lag}
    one = np.zeros((*hat.shape[:-1], 1))
    if not momentum:
        return _error_from_poles(np.concatenate([one, hat], axis=-1), gap, **options)
    # A double pole has no partial fractions. Near one, β moves a little to both sides and the mean
    # is taken: 1e-8 of relative error, from the shift squared and from the cancellation alike.
    own = 1.0 - momentum
    nearest = np.min(np.abs(hat.real - own), axis=-1)
    shift = np.where(nearest < 1e-4 * own, 2e-4 * own, 0.0)[..., None]
    if not shift.any():
        return _error_from_poles(np.concatenate([one, own + shift, hat], axis=-1), gap, **options)
    sides = [np.concatenate([one, own + side * shift, hat], axis=-1) for side in (-1, 1)]
    low, high = (_error_from_poles(poles, gap, **options) for poles in sides)
    return np.asarray((low + high) / 2)


def _error_from_poles(poles: Numbers, gap: Numbers, *, steps: int, taps: Any, lag: int) -> Numbers:
    lead = poles.shape[:-1]
    beta = residues(poles, gap)
    outer = beta[..., :, None] * beta[..., None, :]
    if taps is None or not lag:
        return np.asarray(np.sum(outer * weighted(pairs(poles), steps), axis=(-1, -2)) / steps)
    s = np.concatenate([np.ones((*lead, 1)), taps], axis=-1)[..., : -(-steps // lag)]
    m = np.arange(s.shape[-1])
    horizon = (steps - m * lag).reshape(-1, 1, 1).astype(np.float64)
    forms = outer[..., None, :, :] * weighted(pairs(poles)[..., None, :, :], horizon)
    power = 1 + expm1(m[:, None] * lag * log1p(-poles)[..., None, :])
    table = np.sum(forms, axis=-2) @ np.swapaxes(power, -1, -2)  # [m, D]
    later, earlier = np.tril_indices(len(m))
    weight = np.where(later == earlier, 1.0, 2.0)
    total = weight * s[..., later] * s[..., earlier] * table[..., later, later - earlier]
    return np.asarray(np.sum(total, axis=-1) / steps)


def step_errors(gap: Numbers, hat: Numbers, rates: Numbers, *, momentum: float) -> Numbers:
    """Squared error of every step under learning rates η and momentum β > 0, in O(n d).

    With f = C⁻¹(x) / (1 − βx) = Σ φ_j / (1 − p_j x), row t of the error matrix grows by
    B[t, s] = B[t−1, s] + η_t f_{t−s}. So its square grows by 2 η_t Σ_j φ_j p_j h_j(t−1) +
    η_t² Σ_{i<=t} f_i², where h_j(t) = Σ_s B[t, s] p_j^{t−s} is a first-order recursion.
    """
    from scipy.signal import lfilter  # a second to import, and complex numbers need it

    n = rates.shape[-1]
    own = 1.0 - momentum
    nearest = np.min(np.abs(hat.real - own), axis=-1)
    own_gap = np.where(nearest < 1e-8, own + 1e-7, own)[..., None]
    poles = np.concatenate([own_gap, hat], axis=-1)
    phi = residues(poles, gap)
    power = 1 + expm1(np.arange(n) * log1p(-poles)[..., None])
    f = np.sum(phi[..., None] * power, axis=-2)
    source = rates[..., None, :] * np.cumsum(f[..., None, :] * power, axis=-1)
    cross = np.zeros(np.broadcast_shapes(f.shape, rates.shape), dtype=np.result_type(f, rates))
    for index in np.ndindex(*poles.shape):
        p = 1 - poles[index]
        state = lfilter([1.0], [1.0, -p], source[index])
        cross[index[:-1]][1:] += phi[index] * p * state[:-1]
    growth = 2 * rates * cross + rates**2 * np.cumsum(f * f, axis=-1)
    return np.asarray(np.cumsum(growth, axis=-1))
