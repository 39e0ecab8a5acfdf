"""A tensor of a device on its way into the host's memory.

A copy into pinned memory is begun and waited for later, so that the host can hand the device its
next work meanwhile. The copy is of what the tensor held when it was begun: a device takes its work
in order. A tensor that is not on a CUDA device is copied at once. State: the copy, and the event
that is recorded behind it.

>>> value = torch.ones(2)
>>> copy = DeviceCopy(value)
>>> _ = value.zero_()
>>> copy.read()
tensor([1., 1.])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_its_way(source: Tensor) -> Tensor:
    """The copy without an event: good after any wait for later work of the device."""
    kind, is_cuda = source.dtype, source.is_cuda
    values = torch.empty(source.shape, dtype=kind, device="cpu", pin_memory=is_cuda)
    return values.copy_(source.detach(), non_blocking=is_cuda)


class DeviceCopy:
    """The copy; `values` are good after `read`, or after any wait for later work of the device."""

    def __init__(self, source: Tensor) -> None:
        self.values = on_its_way(source)
        self._event: Any = None
        if source.is_cuda:
            self._event = torch.cuda.current_stream(source.device).record_event()

    def read(self) -> Tensor:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()
        return self.values
