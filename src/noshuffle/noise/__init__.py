"""Noise: where it comes from (`source`), how steps correlate it (`stream`), and rows on demand."""

from noshuffle.noise.lazy import LazyNoise
from noshuffle.noise.lazy_fused import lazy_noise
from noshuffle.noise.source import Source, new_key, test_source
from noshuffle.noise.sparse_sgd import SparseSGD
from noshuffle.noise.stream import NoiseStream

__all__ = [
    "LazyNoise",
    "NoiseStream",
    "Source",
    "SparseSGD",
    "lazy_noise",
    "new_key",
    "test_source",
]
