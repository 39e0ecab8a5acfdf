"""Independent noise: C = I, and the two simple mechanisms of continual counting.

    identity       (Simple II)  C = I   every gradient is released with its own noise: DP-SGD
    release_sums   (Simple I)   C = A   every running sum is released with its own noise

Chan, Shi, Song, "Private and continual release of statistics" (2011), seen as factorizations.

>>> release_sums().noising(3)
array([[ 1.,  0.,  0.],
       [-1.,  1.,  0.],
       [ 0., -1.,  1.]])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from noshuffle.strategies.base import ToeplitzStrategy, padded
from noshuffle.strategies.recipe import Array, FeedForward, Recipe


@dataclass(frozen=True)
class Identity(ToeplitzStrategy):
    """C = I: independent noise at every step."""

    name: ClassVar[str] = "identity"

    def coefficients(self, n: int) -> Array:
        return padded(np.ones(1), n)

    def noising_coefficients(self, n: int) -> Array:
        return self.coefficients(n)

    def recipe(self, n: int) -> Recipe:
        return FeedForward(weights=(1.0,), scale=self.step_scale(n))

    def buffers(self, n: int) -> int:
        return 0

    def words(self) -> str:
        return "independent Gaussian noise at every step (DP-SGD)"


@dataclass(frozen=True)
class ReleaseSums(ToeplitzStrategy):
    """C = A: independent noise on every running sum."""

    name: ClassVar[str] = "release_sums"

    def coefficients(self, n: int) -> Array:
        return np.ones(n)

    def noising_coefficients(self, n: int) -> Array:
        return padded(np.array([1.0, -1.0]), n)

    def recipe(self, n: int) -> Recipe:
        return FeedForward(weights=(1.0, -1.0), scale=self.step_scale(n))

    def buffers(self, n: int) -> int:
        return 0

    def words(self) -> str:
        return "independent Gaussian noise on every running sum"


#: Independent noise: DP-SGD and DP-GD.
identity = Identity
#: Simple I of Chan–Shi–Song.
release_sums = ReleaseSums
