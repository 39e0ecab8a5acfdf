"""Accounting: from a Gaussian mechanism and its sampling to epsilon and delta. No torch.

    gaussian      one Gaussian mechanism, exact, both directions
    gdp           every mechanism as a Gaussian one that may fail; adds up under adaptive choice
    renyi         Rényi and zCDP curves, subsampled Gaussians, conversions
    fourier       privacy-loss distributions composed by FFT, upper and lower bounds
    bins          one secret position for every unit, under any Gaussian noise
    fresh_positions  a fresh secret position in every epoch
    monte_carlo   the same by rigorous Monte Carlo, beside that bound
    composition   basic, advanced and optimal composition, groups, amplification
    atoms         losses of any mechanism: Laplace, randomized response, discrete, given profiles
    shuffling     local reports in a secret order
    tradeoff      type II against type I errors of whoever tells neighbours apart
    selection     the best of a random number of runs
    mechanisms    Gaussian, Laplace, report-noisy-max
    calibrate     searches for noise, steps and rate that end on the safe side

>>> from noshuffle import accounting
>>> round(accounting.gaussian.epsilon(mu=1.0, delta=1e-5), 3)
4.377
"""

from noshuffle.accounting import (
    atoms,
    bins,
    calibrate,
    composition,
    fourier,
    fresh_positions,
    gaussian,
    gdp,
    mechanisms,
    monte_carlo,
    renyi,
    selection,
    shuffling,
    tradeoff,
)

__all__ = [
    "atoms",
    "bins",
    "calibrate",
    "composition",
    "fourier",
    "fresh_positions",
    "gaussian",
    "gdp",
    "mechanisms",
    "monte_carlo",
    "renyi",
    "selection",
    "shuffling",
    "tradeoff",
]
