"""Error and sensitivity of two-sided gains with their gradients, for the search only.

    C = diag(a)·T(c)·diag(g),   c(x) = C_BLT(x) / S(x^b),   k epochs of b steps in the same order

Every function returns a value and a function that pulls a derivative back to the arguments
(reverse mode by hand), as in `blt_gains`, where the symbols are explained.

Error. With d = η/g, H = tril(1)·diag(d)·T(N_BLT), Γ = HᵀH and S(y) = Σ_l s_l y^l, s_0 = 1,

    ‖tril(1)·diag(d)·T(1/c)·diag(1/a)‖² = Σ_q Σ_s ω_q(s) Γ(s, s+qb),
    ω_q(s) = (2 − [q=0]) Σ_{l: lb <= s} s_l s_{l+q} / a²_{s−lb}:

draw r enters the columns r, r + b, … of H. `gram_diagonals` gives the Γ(s, s+qb), from first-order
recursions in O(n) per diagonal, and `tap_weights` the ω_q.

Sensitivity. S_j² = Σ_m (2 − [m=0]) Σ_l g_{j+lb} g_{j+(l+m)b} |P_mb[j+(l+m)b]|, with the
correlations P_L[i] = Σ_s a²_{i+s} c_s c_{s+L} by Fourier transforms, O(k·n·log n).

State kept: none; the arrays live for one evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

from noshuffle.strategies.recipe import Array


def _forward(x: Array, decay: float) -> Array:
    return np.asarray(lfilter([1.0], [1.0, -decay], x), dtype=np.float64)


def _backward(x: Array, decay: float) -> Array:
    """y_s = x_s + decay·y_{s+1}."""
    return _forward(x[::-1], decay)[::-1]


def classes_squared(
    c: Array, g: Array, weights: Array, *, epochs: int, smoothing: float = 0.0
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """S_j² for every place j of an epoch, weights = a²; pulled back to (c, g, weights).

    Smoothing replaces |x| by √(x² + smoothing²) off the diagonal.
    """
    n = len(c)
    b = n // epochs
    size = next_fast_len(2 * n, real=True)
    products = np.zeros((epochs, n))
    for m in range(epochs):
        products[m, : n - m * b] = c[: n - m * b] * c[m * b :]
    f_weights, f_products = rfft(weights, size), rfft(products, size, axis=1)
    inner = irfft(f_weights * np.conj(f_products), size, axis=1)[:, :n]
    length = np.sqrt(inner**2 + smoothing**2) if smoothing else np.abs(inner)
    length[0] = inner[0]
    squared = np.zeros(b)
    for m in range(epochs):
        both = g[: n - m * b] * g[m * b :]
        squared += (2.0 if m else 1.0) * (both * length[m, m * b :]).reshape(-1, b).sum(axis=0)

    def pull(bar: Array) -> tuple[Array, Array, Array]:
        inner_bar, g_bar, c_bar = np.zeros((epochs, n)), np.zeros(n), np.zeros(n)
        for m in range(epochs):
            early, late = slice(0, n - m * b), slice(m * b, n)
            weight = np.tile(bar, epochs - m) * (2.0 if m else 1.0)
            g_bar[early] += weight * g[late] * length[m, late]
            g_bar[late] += weight * g[early] * length[m, late]
            x, y = inner[m, late], length[m, late]
            slope = np.divide(x, y, out=np.zeros_like(x), where=y > 0) if m else 1.0
            inner_bar[m, late] = weight * g[early] * g[late] * slope
        f_bar = rfft(inner_bar, size, axis=1)
        weights_bar = irfft((f_bar * f_products).sum(axis=0), size)[:n]
        products_bar = irfft(f_weights * np.conj(f_bar), size, axis=1)[:, :n]
        for m in range(epochs):
            part = products_bar[m, : n - m * b]
            c_bar[: n - m * b] += part * c[m * b :]
            c_bar[m * b :] += part * c[: n - m * b]
        return c_bar, g_bar, weights_bar

    return squared, pull


def tap_weights(
    inverse: Array, taps: Array, *, lag: int
) -> tuple[list[Array], Callable[[Sequence[Array]], tuple[Array, Array]]]:
    """ω_q(s) for s < n − q·lag, inverse = 1/a²; pulled back to (inverse, taps)."""
    n = len(inverse)
    sigma = np.concatenate([[1.0], taps])[: -(-n // lag)]
    found = []
    for q in range(len(sigma)):
        weight = np.zeros(n - q * lag)
        for first in range(len(sigma) - q):
            start = first * lag
            weight[start:] += (
                sigma[first] * sigma[first + q] * inverse[: max(len(weight) - start, 0)]
            )
        found.append(weight * (2.0 if q else 1.0))

    def pull(bars: Sequence[Array]) -> tuple[Array, Array]:
        inverse_bar, sigma_bar = np.zeros(n), np.zeros(len(taps) + 1)
        for q, bar in enumerate(bars):
            for first in range(len(sigma) - q):
                late = bar[first * lag :] * (2.0 if q else 1.0)
                inverse_bar[: len(late)] += sigma[first] * sigma[first + q] * late
                total = float(late @ inverse[: len(late)])
                sigma_bar[first] += sigma[first + q] * total
                sigma_bar[first + q] += sigma[first] * total
        return inverse_bar, sigma_bar[1:]

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
                source_bar = _forward(both, decays[j] * decays[i])
                slope = float(source_bar[:-1] @ omega[j, i, 1:])
                theta_bar[j] += slope * decays[i]
                theta_bar[i] += slope * decays[j]
                d_bar += source_bar * (V[j] + V[i] - wd)
                V_bar[j] += source_bar * d
                V_bar[i] += source_bar * d
                wd_bar -= source_bar * d
        for j in range(size):
            for bar, value, target in ((V_bar[j], V[j], wd_bar), (D_bar[j], D[j], d_bar)):
                x_bar = _forward(bar, decays[j])
                target += x_bar
                theta_bar[j] += float(x_bar[:-1] @ value[1:])
        return d_bar + left * wd_bar, theta_bar, nu_bar, kappa_bar

    return found, pull
