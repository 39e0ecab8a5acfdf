"""The private step as CUDA graphs that are replayed (docs/compiled-step.md)."""

from __future__ import annotations

from noshuffle.training.compiled.step import Compiled, Pending, compiled_step

__all__ = ["Compiled", "Pending", "compiled_step"]
