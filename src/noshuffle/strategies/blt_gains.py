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
of c_i c_{i+Db}, hence S_j² = Σ_D (2 − [D=0]) Σ_l g_{j+lb} g_{j+(l+D)b} |Σ_i c_i c_{i+Db}|.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter

from noshuffle.strategies.recipe import Array

#: Lags are transformed in about so many groups: the later ones are shorter.
_GROUPS = 5


def _forward(x: Array, decay: float) -> Array:
    return np.asarray(lfilter([1.0], [1.0, -decay], x), dtype=np.float64)


def _backward(x: Array, decay: float) -> Array:
    """y_s = x_s + decay·y_{s+1}."""
    return _forward(x[::-1], decay)[::-1]


def sensitivity_classes(
    c: Array, g: Array, *, epochs: int, smoothing: float = 0.0
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """S_j² for every place j of an epoch; pulled back to (c, g).

    Guarantees: with smoothing 0, sens² <= max_j S_j², with equality when all inner products of
    co-participating columns are >= 0. Smoothing replaces |x| by √(x² + smoothing²) > |x|, for the
    search only.
    """
    n = len(c)
    b = n // epochs
    late = g[::-1]  # column t has n − t entries: count steps from the end
    squared = np.zeros(b)
    kept: list[tuple[Array, Array, Array]] = []
    for lag in range(epochs):
        m = n - lag * b
        inner = np.cumsum(c[:m] * c[lag * b :])
        size = np.sqrt(inner**2 + smoothing**2) if lag else np.abs(inner)
        both = late[:m] * late[lag * b :]
        squared += (2.0 if lag else 1.0) * (both * size).reshape(-1, b).sum(axis=0)
        kept.append((inner, size, both))

    def pull(bar: Array) -> tuple[Array, Array]:
        c_bar, late_bar = np.zeros(n), np.zeros(n)
        for lag, (inner, size, both) in enumerate(kept):
            m = n - lag * b
            weight = np.tile(bar[::-1], epochs - lag) * (2.0 if lag else 1.0)
            late_bar[:m] += weight * size * late[lag * b :]
            late_bar[lag * b :] += weight * size * late[:m]
            slope = np.divide(inner, size, out=np.zeros(m), where=size > 0)
            terms = np.cumsum((weight * both * slope)[::-1])[::-1]
            c_bar[:m] += terms * c[lag * b :]
            c_bar[lag * b :] += terms * c[:m]
        return c_bar, late_bar[::-1]

    return squared[::-1], pull


def classes_squared(
    c: Array, g: Array, weights: Array, *, epochs: int, smoothing: float = 0.0
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """The same for C = diag(a)·T(c)·diag(g), weights = a²; pulled back to (c, g, weights).

    S_j² = Σ_m (2 − [m=0]) Σ_l g_{j+lb} g_{j+(l+m)b} |P_mb[j+(l+m)b]|, for the search only, with the
    correlations P_L[i] = Σ_s a²_{i+s} c_s c_{s+L} by Fourier transforms, O(k·n·log n).
    """
    n = len(c)
    b = n // epochs
    squared = np.zeros(b)
    together = -(-epochs // _GROUPS)
    groups = [range(m, min(m + together, epochs)) for m in range(0, epochs, together)]
    kept = []
    for lags in groups:
        # P_mb[i] is needed for i >= mb alone, so a group forgets the steps before its first lag.
        begin = lags[0] * b
        size = next_fast_len(2 * (n - begin), real=True)
        products = np.zeros((len(lags), n - begin))
        for row, m in zip(products, lags):
            row[: n - m * b] = c[: n - m * b] * c[m * b :]
        f_weights, f_products = rfft(weights[begin:], size), rfft(products, size)
        inner = irfft(f_weights * np.conj(f_products), size)[:, : n - begin]
        length = np.sqrt(inner**2 + smoothing**2)
        if begin == 0:
            length[0] = inner[0]
        for m, row in zip(lags, length):
            both = g[: n - m * b] * g[m * b :] * row[m * b - begin :]
            squared += (2.0 if m else 1.0) * both.reshape(-1, b).sum(axis=0)
        kept.append((size, f_weights, f_products, inner, length))

    def pull(bar: Array) -> tuple[Array, Array, Array]:
        c_bar, g_bar, weights_bar = np.zeros(n), np.zeros(n), np.zeros(n)
        for lags, (size, f_weights, f_products, inner, length) in zip(groups, kept):
            begin = lags[0] * b
            inner_bar = np.zeros_like(inner)
            for m, x, y, x_bar in zip(lags, inner, length, inner_bar):
                early, late, own = slice(0, n - m * b), slice(m * b, n), slice(m * b - begin, None)
                weight = np.tile((2.0 if m else 1.0) * bar, epochs - m)
                by_length = weight * y[own]
                g_bar[early] += by_length * g[late]
                g_bar[late] += by_length * g[early]
                x_bar[own] = weight * g[early] * g[late]
                if m:  # the slope of |·|
                    x_bar[own] *= np.divide(
                        x[own], y[own], out=np.zeros(n - m * b), where=y[own] > 0
                    )
            f_bar = rfft(inner_bar, size)
            weights_bar[begin:] += irfft((f_bar * f_products).sum(axis=0), size)[: n - begin]
            products_bar = irfft(f_weights * np.conj(f_bar), size)
            for m, row in zip(lags, products_bar):
                c_bar[: n - m * b] += row[: n - m * b] * c[m * b :]
                c_bar[m * b :] += row[: n - m * b] * c[: n - m * b]
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
