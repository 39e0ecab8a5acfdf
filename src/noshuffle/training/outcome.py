"""What a step saw of its batch: raw, for whoever trains, and never shown when it is printed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, repr=False)
class Outcome:
    """What a step saw: raw figures, for whoever holds the data anyway; logs do not show them."""

    losses: Tensor
    norms: Tensor
    bad: Tensor
    dropped: int
    #: A released step that could not be repeated, and was passed over: nothing was updated.
    is_skipped: bool = field(default=False, kw_only=True)
    #: The losses in ordinary memory, where they are there already.
    shown: Tensor | None = None

    def __repr__(self) -> str:
        return f"Outcome({len(self.losses)} examples; raw figures in .losses, .norms)"

    @property
    def nonfinite(self) -> int:
        """How many units had a NaN or infinite gradient and contributed zero."""
        return int(self.bad.sum())

    @property
    def loss(self) -> float:
        """Mean loss of the finite examples (NaN if there are none)."""
        own = self.losses if self.shown is None else self.shown
        if own.device.type == "cpu" and own.dtype is torch.float32 and len(own):
            with np.errstate(all="ignore"):  # ∞ − ∞ is no news here
                mean = float(own.numpy().mean(dtype=np.float64))  # in a fraction of torch's time
        else:
            mean = float(own.double().mean())
        if math.isfinite(mean):  # so are all of them, and the selection below need not be made
            return mean
        finite = own[torch.isfinite(own)]
        return float(finite.double().mean()) if finite.numel() else float("nan")
