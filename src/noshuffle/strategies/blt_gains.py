"""Error and sensitivity of a tapped BLT with per-step gains, in O(n), with their gradients.

    C = T(c)·diag(g),   c(x) = C_BLT(x) / S(x^b),   noise of step t = row t of T(1/c)·Z / g_t

for k epochs of b steps in the same order and (scheduled) prefix sums. Every function returns a
value and a function that pulls a derivative back to its arguments (reverse mode by hand).

Error. With d = η/g, H = tril(1)·diag(d)·T(N_BLT), Γ = HᵀH and S(y) = Σ_l s_l y^l, s_0 = 1, where
draw r is divided by a_r (one, or its own gain where gains are two-sided),

    ‖H·T(S)·diag(1/a)‖² = Σ_q Σ_s ω_q(s) Γ(s, s+qb),
    ω_q(s) = (2 − [q=0]) Σ_{l: lb <= s} s_l s_{l+q} / a²_{s−lb}:

draw r enters the columns r, r + b, … of H. `tap_weights` gives the ω_q and `gram_diagonals` the
Γ(s, s+qb). Write N_BLT = κ + Σ_j ν_j/(1 − θ_j x) (here θ are the decays of the noise). Columns of
H are sums of exponentials times d, so with backward sums
    D_j(s) = Σ_{t>=s} d_t θ_j^{t−s},    V_j(s) = Σ_{t>=s} (n−t) d_t θ_j^{t−s},
    Ω_jl(s) = Σ_{t,t'>=s} θ_j^{t−s} θ_l^{t'−s} d_t d_t' (n − max(t,t')),
each a first-order recursion, one gets for s' = s + qb > s
    Γ(s,s') = χ(s')·(h(s) − Σ_j ν_j θ_j^{qb} D_j(s')) + Σ_j ν_j θ_j^{qb} Ψ_j(s'),
    χ = κ(n−t)d + Σ ν_j V_j,   h = κd + Σ ν_j D_j,   Ψ_j = κ d V_j + Σ_l ν_l Ω_jl:
the first term is what column s gathered before step s', the second what both do afterwards.

Sensitivity. A unit at place j touches the columns j + lb; their inner products are partial sums
of a² c_i c_{i+mb} (`classes_squared`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noshuffle.strategies.recipe import Array
from noshuffle.strategies.recursions import decaying

#: Lags are transformed in about so many groups: the later ones are shorter.
_GROUPS = 5
#: … above so many steps; short runs transform all of them at once.
_SHORT = 512


def _backward(x: Array, decay: float) -> Array:
    """y_s = x_s + decay·y_{s+1}."""
    return decaying(x[::-1], decay)[::-1]


def classes_squared(
    c: Array, g: Array, weights: Array, *, epochs: int, smoothing: float = 0.0
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """S_j² of every place j for C = diag(a)·T(c)·diag(g), weights = a²; pulled back to all three.

    S_j² = Σ_m (2 − [m=0]) Σ_l g_{j+lb} g_{j+(l+m)b} |P_mb[j+(l+m)b]|, for the search only, with the
    correlations P_L[i] = Σ_s a²_{i+s} c_s c_{s+L} by Fourier transforms, O(k·n·log n). Smoothing
    replaces |x| by √(x² + smoothing²) > |x|.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    n = len(c)
    b = n // epochs
    C, G = c.reshape(epochs, b), g.reshape(epochs, b)
    squared = np.zeros(b)
    together = epochs if n <= _SHORT else -(-epochs // _GROUPS)
    groups = [range(m, min(m + together, epochs)) for m in range(0, epochs, together)]
    kept = []
    for lags in groups:
        # P_mb[i] is needed for i >= mb alone, so a group forgets the steps before its first lag.
        shape = (len(lags), epochs - lags[0], b)
        begin, width = lags[0] * b, n - lags[0] * b
        size = next_fast_len(2 * width, real=True)
        after, both = np.zeros(shape), np.zeros(shape)
        for i, m in enumerate(lags):
            after[i, : epochs - m] = C[m:]
            np.multiply(G[: epochs - m], G[m:], out=both[i, m - lags[0] :])
        both[1 - bool(begin) :] *= 2.0
        products = (after * C[: shape[1]]).reshape(len(lags), width)
        f_weights, f_products = rfft(weights[begin:], size), rfft(products, size)
        inner = irfft(f_weights * np.conj(f_products), size)[:, :width].reshape(shape)
        length = np.sqrt(inner**2 + smoothing**2)
        if begin == 0:
            length[0] = inner[0]
        squared += np.einsum("meb,meb->b", both, length)
        kept.append((size, f_weights, f_products, inner, length, after, both))

    def pull(bar: Array) -> tuple[Array, Array, Array]:
        c_bar, g_bar, weights_bar = np.zeros((epochs, b)), np.zeros((epochs, b)), np.zeros(n)
        for lags, (size, f_weights, f_products, inner, length, after, both) in zip(groups, kept):
            begin, shape = lags[0] * b, inner.shape
            inner_bar = both * bar  # by |·|
            terms = inner_bar * length  # by log g
            g_bar[lags[0] :] += terms.sum(axis=0)
            slope = np.divide(inner, length, out=np.zeros(shape), where=length > 0)
            if begin == 0:
                slope[0] = 1.0
            inner_bar *= slope
            f_bar = rfft(inner_bar.reshape(len(lags), -1), size)
            weights_bar[begin:] += irfft((f_bar * f_products).sum(axis=0), size)[: n - begin]
            rows = irfft(f_weights * np.conj(f_bar), size)[:, : n - begin].reshape(shape)
            c_bar[: shape[1]] += np.einsum("meb,meb->eb", rows, after)
            rows *= C[: shape[1]]
            for m, row, term in zip(lags, rows, terms):
                g_bar[: epochs - m] += term[m - lags[0] :]
                c_bar[m:] += row[: epochs - m]
        return c_bar.ravel(), (g_bar / G).ravel(), weights_bar

    return squared, pull


class _TapPlaces(NamedTuple):
    """Entries of the matrix from blocks of 1/a² to those of ω: row (q, e), column e − l."""

    row: NDArray[np.intp]
    column: NDArray[np.intp]
    q: NDArray[np.intp]
    first: NDArray[np.intp]
    cuts: NDArray[np.intp]


@lru_cache(maxsize=64)
def _tap_places(blocks: int, count: int) -> _TapPlaces:
    heights = blocks - np.arange(count)
    cuts = np.cumsum(heights)
    entries = [
        (cuts[q] - heights[q] + e, e - first, q, first)
        for q in range(count)
        for e in range(blocks - q)
        for first in range(min(e + 1, count - q))
    ]
    row, column, lag, first = np.array(entries).T
    return _TapPlaces(row, column, lag, first, cuts)


def _in_blocks(values: Array, lag: int) -> Array:
    """Rows of `lag` values, zeros after the last."""
    count = -(-len(values) // lag)
    out = np.zeros(count * lag)
    out[: len(values)] = values
    return out.reshape(count, lag)


def tap_weights(
    inverse: Array, taps: Array, *, lag: int
) -> tuple[list[Array], Callable[[Sequence[Array]], tuple[Array, Array]]]:
    """ω_q(s) for s < n − q·lag, inverse = 1/a²; pulled back to (inverse, taps).

    In blocks of `lag` steps this is one small matrix of products of taps.
    """
    n, before = len(inverse), _in_blocks(inverse, lag)
    sigma = np.concatenate([[1.0], taps])[: len(before)]
    row, column, q, first, cuts = _tap_places(len(before), len(sigma))
    twice = np.where(q > 0, 2.0, 1.0)
    matrix = np.zeros((int(cuts[-1]), len(before)))
    matrix[row, column] = twice * sigma[first] * sigma[first + q]
    parts = np.split(matrix @ before, cuts[:-1])
    found = [part.ravel()[: n - i * lag] for i, part in enumerate(parts)]

    def pull(bars: Sequence[Array]) -> tuple[Array, Array]:
        stacked = np.concatenate([_in_blocks(bar, lag) for bar in bars])
        slope = twice * (stacked @ before.T)[row, column]
        sigma_bar = np.zeros(len(taps) + 1)
        sigma_bar += np.bincount(first, slope * sigma[first + q], minlength=len(sigma_bar))
        sigma_bar += np.bincount(first + q, slope * sigma[first], minlength=len(sigma_bar))
        return (matrix.T @ stacked).ravel()[:n], sigma_bar[1:]

    return found, pull


def gram_diagonals(
    d: Array, decays: Array, nu: Array, kappa: float, *, lag: int, count: int
) -> tuple[list[Array], Callable[[Sequence[Array]], tuple[Array, Array, Array, float]]]:
    """Γ(s, s + q·lag) for q < count; pulled back to (d, decays, nu, kappa)."""
    n, size = len(d), len(decays)
    left = n - np.arange(n, dtype=np.float64)
    wd = left * d
    D = np.stack([_backward(d, t) for t in decays])
    V = np.stack([_backward(wd, t) for t in decays])
    omega = np.zeros((size, size, n))
    for j in range(size):
        for i in range(j, size):
            source = d * (V[j] + V[i] - wd)
            omega[j, i] = omega[i, j] = _backward(source, decays[j] * decays[i])
    chi, h = kappa * wd + nu @ V, kappa * d + nu @ D
    mixed = nu @ V
    after = np.tensordot(nu, omega, axes=(0, 0))
    psi = kappa * d * V + after
    found = [kappa**2 * d * wd + 2 * kappa * d * mixed + nu @ after]
    for q in range(1, count):
        power = nu * decays ** (q * lag)
        before = h[: n - q * lag] - power @ D[:, q * lag :]
        found.append(chi[q * lag :] * before + power @ psi[:, q * lag :])

    def pull(bars: Sequence[Array]) -> tuple[Array, Array, Array, float]:
        first = bars[0]
        d_bar = first * (kappa**2 * wd + 2 * kappa * mixed)
        wd_bar = first * kappa**2 * d
        kappa_bar = float(first @ (2 * kappa * d * wd + 2 * d * mixed))
        V_bar = 2 * kappa * nu[:, None] * (first * d)
        nu_bar = 2 * (V @ (first * d)) * kappa + 2 * ((omega @ first) @ nu)
        omega_bar = (nu[:, None] * nu)[:, :, None] * first
        chi_bar, h_bar = np.zeros(n), np.zeros(n)
        D_bar, psi_bar = np.zeros((size, n)), np.zeros((size, n))
        theta_bar = np.zeros(size)
        for q in range(1, count):
            bar, shift = bars[q], q * lag
            power = decays**shift
            chi_late = bar * chi[shift:]
            chi_bar[shift:] += bar * (h[: n - shift] - (nu * power) @ D[:, shift:])
            h_bar[: n - shift] += chi_late
            D_bar[:, shift:] -= (nu * power)[:, None] * chi_late
            psi_bar[:, shift:] += (nu * power)[:, None] * bar
            both = psi[:, shift:] @ bar - D[:, shift:] @ chi_late
            nu_bar += power * both
            theta_bar += nu * both * shift * decays ** (shift - 1)
        kappa_bar += float(np.sum(psi_bar * V * d) + chi_bar @ wd + h_bar @ d)
        d_bar += kappa * (np.sum(psi_bar * V, axis=0) + h_bar)
        V_bar += kappa * d * psi_bar + nu[:, None] * chi_bar
        nu_bar += np.einsum("jn,jln->l", psi_bar, omega) + V @ chi_bar + D @ h_bar
        omega_bar += nu[None, :, None] * psi_bar[:, None, :]
        wd_bar += kappa * chi_bar
        D_bar += nu[:, None] * h_bar
        for j in range(size):
            for i in range(j, size):
                both = omega_bar[j, i] + (omega_bar[i, j] if i > j else 0.0)
                source_bar = decaying(both, decays[j] * decays[i])
                slope = float(source_bar[:-1] @ omega[j, i, 1:])
                theta_bar[j] += slope * decays[i]
                theta_bar[i] += slope * decays[j]
                d_bar += source_bar * (V[j] + V[i] - wd)
                V_bar[j] += source_bar * d
                V_bar[i] += source_bar * d
                wd_bar -= source_bar * d
        for j in range(size):
            for bar, value, target in ((V_bar[j], V[j], wd_bar), (D_bar[j], D[j], d_bar)):
                x_bar = decaying(bar, decays[j])
                target += x_bar
                theta_bar[j] += float(x_bar[:-1] @ value[1:])
        return d_bar + left * wd_bar, theta_bar, nu_bar, kappa_bar

    return found, pull


def total_squared_error(
    d: Array, decays: Array, nu: Array, kappa: float, taps: Array, inverse: Array, *, lag: int
) -> tuple[float, Callable[[], tuple[Array, Array, Array, float, Array, Array]]]:
    """‖tril(1)·diag(d)·T(N)·diag(1/a)‖²; pulled back to (d, decays, nu, kappa, 1/a², taps)."""
    omega, pull_omega = tap_weights(inverse, taps, lag=lag)
    sums, pull_sums = gram_diagonals(d, decays, nu, kappa, lag=lag, count=len(omega))

    def pull() -> tuple[Array, Array, Array, float, Array, Array]:
        return *pull_sums(omega), *pull_omega(sums)

    return sum(float(w @ x) for w, x in zip(omega, sums)), pull


def encoder_series(
    decays: Array, r: Array, kappa: float, taps: Array, *, steps: int, lag: int
) -> tuple[Array, Callable[[Array], tuple[Array, Array, float, Array]]]:
    """c = (κ + Σ r_j/(1−θ_j x)) / S(x^lag), lag | steps; pulled back to (θ, r, κ, taps)."""
    i = np.arange(steps, dtype=np.float64)
    power = np.exp(i * np.log(decays)[:, None])
    c = (r @ power).reshape(-1, lag)
    c[0, 0] += kappa
    blocks = len(c)
    for a in range(1, blocks):
        m = min(a, len(taps))
        c[a] -= taps[:m] @ c[a - m : a][::-1]

    def pull(bar: Array) -> tuple[Array, Array, float, Array]:
        bar = bar.reshape(-1, lag).copy()  # becomes the derivative by the series before division
        for a in range(blocks - 1, 0, -1):
            m = min(a, len(taps))
            bar[a - m : a] -= taps[:m][::-1, None] * bar[a]
        taps_bar = np.array([-np.sum(bar[m:] * c[:-m]) for m in range(1, len(taps) + 1)])
        flat = bar.ravel()
        r_bar = power @ flat
        theta_bar = r * (power @ (flat * i)) / decays
        return theta_bar, r_bar, float(flat[0]), taps_bar

    return c.ravel(), pull
