"""Why a run can, or cannot, have its step in CUDA graphs. No state."""

from __future__ import annotations

import torch

from noshuffle.clipping import Ghost, PerExample
from noshuffle.training.step import Parts

#: Models beyond this are bound by arithmetic, not by launches, and want their memory.
LARGEST = 2**25


def why_not(parts: Parts, *, wanted: bool | str) -> str:
    """Why a run cannot have a compiled step; empty if it can."""
    device = next(iter(parts.parameters.values())).device
    if wanted is False:
        return "compile=False"
    if device.type != "cuda":
        return f"graphs need a CUDA device, the parameters are on {device.type}"
    if parts.groups_users:
        return "a plan with unit='user' groups rows by who they belong to, which changes by step"
    if any(p.dtype == torch.float64 for p in parts.parameters.values()):
        return "the compiled step is written for float32, the parameters are float64"
    if parts.threshold.is_adaptive:
        return "the clip norm follows a quantile, which is read after every step"
    if not isinstance(parts.engine, Ghost | PerExample):
        return f"the engine {type(parts.engine).__name__} is not known to run without waiting"
    if parts.engine.microbatch is not None:
        return "the engine takes microbatches"
    if parts.noise._fused is None:
        return "the noise is not fused: install triton and use philox"
    count = sum(p.numel() for p in parts.parameters.values())
    if wanted == "auto" and count > LARGEST:
        return (
            f"{count:,} parameters are bound by arithmetic, not by launches; compile=True captures "
            "nevertheless"
        )
    return ""
