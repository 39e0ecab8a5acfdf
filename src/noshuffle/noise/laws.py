"""Laws other than the normal, drawn from the same keyed source, and vectors released with them.

    words (AES-256, counter mode, key of `Source`)  →  uniforms  →  the law, by its inverse

    exponential   −ln u                      laplace   ± exponential
    gumbel        −ln(−ln(1 − u))            gamma(k)  upper quantile of u
    normal        √(−2 ln u)·cos 2πv         coins     64-bit word < rate·2⁶⁴

u = (a + (b + ½)/2⁶⁴)/2⁶⁴ of two 64-bit words, so that float64 keeps its 53 digits down to 2⁻¹²⁹:
where a law has a long tail, the tail is drawn as finely as the middle. The methods have the names
and the order of arguments of `numpy.random.Generator`, which tests may put in their place.

`release` publishes a vector: value + noise, rounded at random to the public grid of `grid`,

    released = g·round((value + noise)/g + U),     g = grid_step(scale),   U uniform on (−½, ½)

a function of the real sum and of coins that do not depend on the data. Noise of float64 has steps
of about 2⁻⁴³ of such a cell, so that its own rounding moves a likelihood ratio by 2⁻⁸⁶ or so.

State kept: the row of the stream that comes next, and the words of the newest that are unused.

>>> from noshuffle.noise.source import test_source
>>> a, b = (KeyedDraws(test_source(seed=1), name="noise") for _ in range(2))
>>> bool((a.laplace(0.0, 2.0, 3) == b.laplace(0.0, 2.0, 3)).all())
True
>>> out = a.release(np.array([0.3, 7.0]), np.array([0.1, -2.0]), scale=1.0)
>>> bool((out * 2**10 == np.rint(out * 2**10)).all())
True
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.errors import whole
from noshuffle.noise.gaussian import TILE
from noshuffle.noise.grid import grid_step
from noshuffle.noise.layout import Layout
from noshuffle.noise.source import Source
from noshuffle.noise.words import AesWords
from noshuffle.one_owner import OneOwner

Array = NDArray[np.float64]
Size = int | tuple[int, ...]
#: Tiles of one row: 16 × 1024 words of 32 bits, drawn together.
_TILES = 16


class KeyedDraws(OneOwner):
    """Random numbers under one key and one name, in the order in which they are asked for.

    Guarantees: no word is used twice; streams of different names, and the normals of a
    `NoiseStream` under the same key, share no generator input, provided that the names differ.
    It cannot be copied, and a forked process cannot use it.
    """

    def __init__(self, source: Source, *, name: str) -> None:
        fixed = source.on(torch.device("cpu"))
        self.is_test = source.is_test
        chunks = Layout.of({name: (_TILES * TILE,)}, chunk_tiles=_TILES).chunks
        self._words = AesWords(chunks, seeds={name: fixed.seed(name)})
        self._block = torch.empty(_TILES, TILE, dtype=torch.int32, device="cpu")
        self._row = 0
        self._left = np.zeros(0, dtype=np.uint64)

    def _integers(self, count: int) -> NDArray[np.uint64]:
        self.check_owner()
        parts, have = [self._left], len(self._left)
        while have < count:
            self._words.fill_(self._block, chunk=0, row=self._row)
            self._row += 1
            parts.append(self._block.numpy().reshape(-1).view(np.uint64).copy())
            have += len(parts[-1])
        together = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._left = together[count:]
        return together[:count]

    def random(self, size: Size) -> Array:
        """Uniform on (0, 1); never 0, never 1."""
        count = math.prod(size) if isinstance(size, tuple) else size
        high, low = self._integers(2 * count).reshape(2, count).astype(np.float64)
        found = np.ldexp(high + np.ldexp(low + 0.5, -64), -64)
        return np.asarray(np.minimum(found, 1 - 2.0**-53).reshape(size))

    def coins(self, rate: float, count: int) -> NDArray[np.bool_]:
        """True with probability `rate` (a multiple of 2⁻⁶⁴), each on its own."""
        if rate >= 1:
            return np.ones(count, dtype=np.bool_)
        return np.asarray(self._integers(count) < np.uint64(int(math.ldexp(rate, 64))))

    def integers(self, low: int, high: int) -> int:
        """A whole number from low to high − 1, all alike (to 2⁻⁶⁴ of the range)."""
        whole(at_least=low + 1, high=high)
        return low + int(self._integers(1)[0]) * (high - low) // 2**64

    def exponential(self, scale: float, size: Size) -> Array:
        """Density e^{−t/scale}/scale from 0 on."""
        return np.asarray(-scale * np.log(self.random(size)))

    def laplace(self, loc: float, scale: float, size: Size) -> Array:
        """Density e^{−|t − loc|/scale}/(2·scale)."""
        return loc + self._signs(size) * self.exponential(scale, size)

    def gumbel(self, loc: float, scale: float, size: Size) -> Array:
        """P[draw ≤ t] = exp(−e^{−(t − loc)/scale})."""
        return np.asarray(loc - scale * np.log(-np.log1p(-self.random(size))))

    def standard_normal(self, size: Size) -> Array:
        """N(0, 1), by Box and Muller."""
        radius = np.sqrt(-2 * np.log(self.random(size)))
        return np.asarray(radius * np.cos(2 * math.pi * self.random(size)))

    def standard_gamma(self, shape: float, size: Size) -> Array:
        """Density ∝ t^{shape−1}e^{−t}."""
        from scipy.special import gammainccinv

        if shape >= 1:
            return np.asarray(gammainccinv(shape, self.random(size)))
        # G(k) = G(k+1)·u^{1/k} (Marsaglia, Tsang 2000): quantiles of small shapes underflow.
        return self.standard_gamma(shape + 1, size) * self.random(size) ** (1 / shape)

    def gamma(self, shape: float, scale: float, size: Size = ()) -> Array:
        return scale * self.standard_gamma(shape, size)

    def _signs(self, size: Size) -> Array:
        count = math.prod(size) if isinstance(size, tuple) else size
        return np.where(self.coins(0.5, count), 1.0, -1.0).reshape(size)

    def release(self, value: Array, noise: Array, *, scale: float) -> Array:
        """value + noise on the grid of noise of this scale; without noise the value itself.

        Guarantees: the result is a function of value + noise and of coins drawn here only.
        """
        step = grid_step(scale)
        if not step:
            return np.asarray(value + noise)
        jitter = self.random(np.shape(value)) - 0.5
        return np.asarray(step * np.rint((value + noise) / step + jitter))
