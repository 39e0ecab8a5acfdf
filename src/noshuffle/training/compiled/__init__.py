"""The private step as CUDA graphs that are replayed (docs/compiled-step.md)."""

from __future__ import annotations

from noshuffle.training.compiled.step import Compiled, compiled_step

__all__ = ["Compiled", "compiled_step"]
