"""The scattering transform: fixed features of images, wavelets for which nothing is learned.

    S₀ = x ∗ φ        S₁[λ] = |x ∗ ψ_λ| ∗ φ        S₂[λ, λ'] = ||x ∗ ψ_λ| ∗ ψ_λ'| ∗ φ,   j' > j

with Morlet wavelets ψ at two scales and eight angles and a Gaussian φ, read at every fourth pixel
(Bruna and Mallat 2013, arXiv 1203.1513): 81 channels for each one of the image. A linear model or a
small network on them learns with less noise than one that must find such filters by itself (Tramèr
and Boneh 2021, arXiv 2011.11660). `normalised` then divides groups of nine channels by their own
mean square in each image. Every image is transformed by itself and no number comes from data, so
privacy is not touched. No state but the filters.

>>> scattering(torch.zeros(2, 3, 8, 8)).shape
torch.Size([2, 243, 2, 2])
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as f

from noshuffle.errors import InvalidInput

SCALES, ANGLES = 2, 8
STEP = 2**SCALES
#: Channels for one channel of the image, and channels that are normalised together.
CHANNELS, TOGETHER = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2, 9


def _gaussian(size: tuple[int, int], sigma: float, *, angle: float, slant: float) -> Tensor:
    """exp(−|u|²/2σ²) around the origin of a torus, narrower along `angle` by `slant`."""
    rows, columns = (torch.arange(-2 * n, 3 * n, dtype=torch.float64, device="cpu") for n in size)
    along = rows[:, None] * math.sin(angle) + columns * math.cos(angle)
    across = rows[:, None] * math.cos(angle) - columns * math.sin(angle)
    return torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))


def _folded(values: Tensor, size: tuple[int, int]) -> Tensor:
    return values.reshape(5, size[0], 5, size[1]).sum((0, 2))


def _morlet(size: tuple[int, int], scale: int, angle: float) -> Tensor:
    """The Fourier transform of a wavelet of mean zero, real."""
    sigma, slant, frequency = 0.8 * 2**scale, 4.0 / ANGLES, 0.75 * math.pi / 2**scale
    bell = _gaussian(size, sigma, angle=angle, slant=slant)
    rows, columns = (torch.arange(-2 * n, 3 * n, dtype=torch.float64, device="cpu") for n in size)
    phase = frequency * (rows[:, None] * math.sin(angle) + columns * math.cos(angle))
    wave, bell = _folded(bell * torch.exp(1j * phase), size), _folded(bell, size)
    wave = (wave - wave.sum() / bell.sum() * bell) * slant / (2 * math.pi * sigma**2)
    found: Tensor = torch.fft.fft2(wave).real.float()
    return found


@lru_cache(maxsize=8)
def _filters(size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """φ, and ψ as (scales, angles, *size)."""
    low = _folded(_gaussian(size, 0.8 * 2 ** (SCALES - 1), angle=0.0, slant=1.0), size)
    waves = [
        torch.stack([_morlet(size, scale, math.pi * turn / ANGLES) for turn in range(ANGLES)])
        for scale in range(SCALES)
    ]
    smooth = torch.fft.fft2(low / low.sum()).real.float()
    return smooth.to(device), torch.stack(waves).to(device)


@torch.no_grad()
def scattering(images: Tensor, *, chunk: int = 250) -> Tensor:
    """Coefficients (batch, channels · 81, height/4, width/4) of images (batch, channels, …)."""
    if images.dim() != 4 or any(n < 2 * STEP or n % STEP for n in images.shape[2:]):
        raise InvalidInput(
            f"images must be (batch, channels, height, width) with sides of a multiple of {STEP}, "
            f"at least {2 * STEP}, got {tuple(images.shape)}"
        )
    starts = range(0, max(1, len(images)), chunk)
    return torch.cat([_scattered(images[at : at + chunk].float()) for at in starts])


def _scattered(x: Tensor) -> Tensor:
    x = f.pad(x, (STEP,) * 4, mode="reflect")
    low, waves = _filters((x.shape[2], x.shape[3]), x.device)

    def smooth(spectrum: Tensor) -> Tensor:
        values: Tensor = torch.fft.ifft2(spectrum * low).real
        return values[..., STEP:-STEP:STEP, STEP:-STEP:STEP]

    def lengths(spectrum: Tensor, scale: int) -> Tensor:
        """The spectra of |x ∗ ψ| for all angles of a scale, in a new axis."""
        found: Tensor = torch.fft.fft2(torch.fft.ifft2(spectrum.unsqueeze(2) * waves[scale]).abs())
        return found

    spectrum = torch.fft.fft2(x)
    first = [lengths(spectrum, scale) for scale in range(SCALES)]
    found = [smooth(spectrum).unsqueeze(2), *map(smooth, first)]
    for scale in range(SCALES):
        for later in range(scale + 1, SCALES):
            found += [smooth(lengths(own, later)) for own in first[scale].unbind(2)]
    return torch.cat(found, 2).flatten(1, 2)


def mirrored(images: Tensor) -> Tensor:
    """Normalised features, the mean of an image's and its mirror image's.

    A linear model on them is one with symmetric weights: where classes do not know left from right
    nothing is lost, and noise in half of the directions is not seen.
    """
    return (normalised(scattering(images)) + normalised(scattering(images.flip(3)))) / 2


def normalised(features: Tensor) -> Tensor:
    """Groups of nine channels with mean zero and mean square one in each image."""
    return f.group_norm(features, features.shape[1] // TOGETHER)
