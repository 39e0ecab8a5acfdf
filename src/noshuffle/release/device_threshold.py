"""A clip norm that follows a quantile, moved by the device itself: `AdaptiveThreshold` in a graph.

    graph of the sum        count = Σ_u (1[‖g_u‖ ≤ C] − ½)            (its digest covers both)
    graph of the release    b̃ = (count + noise)/m + ½ on the grid,  C ← C·exp(−η (b̃ − γ))

What C becomes is a function of noisy counts alone, so nothing is gained by bringing it to the host:
the next step reads it where it lies, and no step waits for the one before. The host draws the noise
of the count, as `AdaptiveThreshold.learn` does, and hands it over when the row of the step is
written. It reads C where somebody asks for it: a checkpoint, an eager step, a loop that prints it.

All of it is some twenty operations of torch on single numbers in float64, in the order of the host:
only exp is the device's own. A quotient of two tensors is one: by a number of Python, torch on CUDA
multiplies with its reciprocal. State: threshold and estimate, the count of the last step, and the
noise that was handed over last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noshuffle.clipping.adaptive import BIT_SENSITIVITY, LARGEST_EXPONENT, QuantileState
from noshuffle.release.threshold import AdaptiveThreshold


class DeviceThreshold:
    """The clip norm of the coming step on a device, and the count of the last one.

    Guarantees: the count noise of step t is the draw that `AdaptiveThreshold.learn` would add, and
    is added once, behind the row of the step (`announce`); what is kept is made of noisy counts on
    the grid alone. Counts are the host's to the bit, thresholds but for the last digit of exp.
    """

    def __init__(
        self, threshold: AdaptiveThreshold, *, divisor: float, device: torch.device
    ) -> None:
        self._threshold, self._device = threshold, device

        def number(dtype: torch.dtype, size: int = 1) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        #: What a sum is multiplied with before and behind its noise: 1/C and C/divisor.
        self.before, self.after = (number(torch.float32).squeeze(0) for _ in range(2))
        self._state = number(torch.float64, 2)
        #: C itself.
        self.norm = self._state[:1]
        self._count, self._middle = number(torch.float64), number(torch.float64)
        self._may_change = number(torch.bool)
        self._drawn = number(torch.complex128)  # two numbers that travel in one launch
        self._pair = torch.view_as_real(self._drawn).view(-1)
        own = threshold.config
        divisors = torch.tensor([own.units, divisor], dtype=torch.float64, device=device)
        self._units, self._by = divisors[:1], divisors[1]
        #: What the device was told last: a grid, and whether the threshold may change.
        self._told = (0.0, False)

    @property
    def printed(self) -> list[Tensor]:
        """What the digest of a sum covers besides the sum."""
        return [self._count, self.norm]

    def stage(self) -> None:
        """Clip the coming step to the norm of the run, where the device does not have it yet."""
        if self._threshold.on_device is self:
            return
        now = self._threshold.state
        self._state.copy_(
            torch.tensor([now.threshold, now.estimate], dtype=torch.float64, device="cpu")
        )
        self._scale_()

    def announce(self, step: int) -> None:
        """Hand over the noise of this step's count; the clip norm is the device's from here on.

        The row of the step must be written, and `move_` follows.
        """
        threshold = self._threshold
        drawn, may_change = threshold.noise_of(step), threshold.may_change(step)
        if self._told != (drawn.middle, may_change):
            self._middle.fill_(drawn.middle)
            self._may_change.fill_(may_change)
            self._told = drawn.middle, may_change
        # The numbers travel in the launch itself, so no buffer of the host is read late.
        self._drawn.fill_(complex(drawn.noise, drawn.coin))
        threshold.follow(self)

    def read(self) -> QuantileState:
        """The clip norm behind all steps that were started; waits for them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return QuantileState(*self._state.tolist())

    # -- what the graphs hold ------------------------------------------------------------------

    def count_(self, norms: Tensor, present: Tensor) -> None:
        """Count the norms of the units that are present: `adaptive.shifted_count`."""
        below = (norms.float() <= self._state[1:].float()) & present
        self._count.copy_(below.sum() - BIT_SENSITIVITY * present.sum(dtype=torch.float64))

    def move_(self) -> None:
        """Add the noise to the count, and move: `adaptive.update`."""
        own, estimate = self._threshold.config, self._state[1:]
        noise, coin = self._pair[:1], self._pair[1:]
        noisy = ((self._count + noise + coin) + self._middle) - self._middle
        exponent = -own.rate * ((noisy / self._units + BIT_SENSITIVITY) - own.quantile)
        grown = exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()
        moved = (estimate * grown).clamp(own.smallest, own.largest)
        estimate.copy_(moved)
        self.norm.copy_(torch.where(self._may_change, moved, self.norm))
        self._scale_()

    def _scale_(self) -> None:
        self.before.copy_(self._state[0].reciprocal())
        self.after.copy_(self._state[0] / self._by)

    def prepare(self) -> None:
        """Run `move_` once before it is captured, and put everything back."""
        before = self._state.clone()
        self.move_()
        self._state.copy_(before)
        self._scale_()
