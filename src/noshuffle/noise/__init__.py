"""Noise: where it comes from (`source`), and how steps correlate it (`stream`)."""

from noshuffle.noise.source import Source, new_key, test_source
from noshuffle.noise.stream import NoiseStream

__all__ = ["NoiseStream", "Source", "new_key", "test_source"]
