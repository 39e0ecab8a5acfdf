"""Accounting: from a Gaussian mechanism and its sampling to epsilon and delta. No torch.

    gaussian      one Gaussian mechanism, exact, both directions
    gdp           every mechanism as a Gaussian one that may fail; adds up under adaptive choice
    renyi         Rényi and zCDP curves, subsampled Gaussians, conversions
    fourier       privacy-loss distributions composed by FFT, upper and lower bounds
    bins          one secret position for every unit, under any Gaussian noise
    composition   basic, advanced and optimal composition, groups, amplification
    atoms         losses of any mechanism: Laplace, randomized response, discrete, given profiles
    tradeoff      type II against type I errors of whoever tells neighbours apart
    selection     the best of a random number of runs
    mechanisms    Gaussian, Laplace, report-noisy-max
    calibrate     searches for noise and steps that end on the safe side

Modules are imported when they are first used: SciPy, on which they stand, takes 0.4 s of a process,
and training with a given noise multiplier asks for no ε before its first step.

>>> from noshuffle import accounting
>>> round(accounting.gaussian.epsilon(mu=1.0, delta=1e-5), 3)
4.377
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from noshuffle.lazy_names import lazily

if TYPE_CHECKING:
    from noshuffle.accounting import atoms as atoms
    from noshuffle.accounting import bins as bins
    from noshuffle.accounting import calibrate as calibrate
    from noshuffle.accounting import composition as composition
    from noshuffle.accounting import fourier as fourier
    from noshuffle.accounting import gaussian as gaussian
    from noshuffle.accounting import gdp as gdp
    from noshuffle.accounting import mechanisms as mechanisms
    from noshuffle.accounting import renyi as renyi
    from noshuffle.accounting import selection as selection
    from noshuffle.accounting import tradeoff as tradeoff

__all__ = [
    "atoms",
    "bins",
    "calibrate",
    "composition",
    "fourier",
    "gaussian",
    "gdp",
    "mechanisms",
    "renyi",
    "selection",
    "tradeoff",
]


__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, ""))
